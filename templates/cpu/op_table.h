// What the op library must know of a plan to turn its tensors into the arguments of a kernel.
#pragma once
#include <cstdint>

extern "C" {

enum { kMoeflexMaxRoles = 8 };
enum MoeflexGateLayout {
    kMoeflexGateNone = 0,
    kMoeflexGateConcat = 1,
    kMoeflexGateConcatUpFirst = 2,
    kMoeflexGateInterleaved = 3,
    kMoeflexGateInterleavedUpFirst = 4,
    kMoeflexGateSeparate = 5
};

// All 32-bit, no padding: specs are compared byte by byte. Mirrored in runtime/cpu_target.py.
struct MoeflexLayerSpec {
    int32_t abi;
    int32_t num_experts, hidden, intermediate, top_k;
    int32_t gate_layout;
    int32_t w13_out_in, w2_out_in;
    int32_t stacked;
    int32_t has_b13, has_b2;
    int32_t x_dtype, out_dtype;
    int32_t direct_rows;  // see MoeflexArgs
    int32_t isa;          // MOEFLEX_ISA of the kernel
    int32_t num_roles;
    int32_t role_dtypes[kMoeflexMaxRoles];  // in the order of the roles; unused ones are 0
};
}
