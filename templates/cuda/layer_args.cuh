// How a kernel reads its arguments.
#pragma once
#include "layer_args.h"
#include "types.cuh"

namespace moeflex {

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
