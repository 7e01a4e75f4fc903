// What a launch of a layer kernel is given besides its tensor maps. runtime/cuda_launch.py writes
// the same bytes.
#pragma once
#include "types.cuh"

namespace moeflex {

// Letters: T tokens, H hidden, I expert intermediate, E experts, K experts per token.
struct LayerArgs {
    int num_tokens, top_k, num_experts, hidden, intermediate;
    int up_first;              // decode, K-major: the tensor map's interleaved slabs begin with up
    int bias13_expert_stride;  // elements from one expert to the next in bias_gate and bias_up
    const void* x;             // [T, H] Element
    const void* ids;           // [T, K] Index; an id outside [0, E) contributes nothing
    const void* weights;       // [T, K] Weight
    const void* bias_gate;     // [E, I] Element, or null
    const void* bias_up;       // [E, I] Element, or null
    const void* bias_down;     // [E, H] Element, or null
    void* out;                 // [T, H] Out
    u8* h;                     // workspace: activations
    u8* y;                     // workspace: rows of the down projection
    int* control;  // workspace: counters, all zero between launches (the kernel restores that)
    int* routes;   // workspace: route tables, no value kept between launches
};

MOEFLEX_DEVICE long long load_index(const long long* ids, int i) {
    return __ldg(ids + i);
}
MOEFLEX_DEVICE long long load_index(const int* ids, int i) {
    return __ldg(ids + i);
}

// The expert of a route, or -1.
template <class Index>
MOEFLEX_DEVICE int load_expert(const LayerArgs& args, int route) {
    long long id = load_index(static_cast<const Index*>(args.ids), route);
    return id >= 0 && id < args.num_experts ? static_cast<int>(id) : -1;
}

enum class WeightPosition { kOutput, kHidden, kInput };

}  // namespace moeflex
