// What a launch of a layer kernel is given besides its tensor maps: read by the kernels, written by the launcher
// (op_layer.h) and by runtime/cuda_launch.py, byte for byte.
#pragma once

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
    unsigned char* h;          // workspace: activations
    unsigned char* y;          // workspace: rows of the down projection
    int* control;  // workspace: counters, all zero between launches (the kernel restores that)
    int* routes;   // workspace: route tables, no value kept between launches
};

}  // namespace moeflex
