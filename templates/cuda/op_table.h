// The C interface between runtime/cuda_target.py and the op library for CUDA: a layer and the kernels that serve it.
#pragma once
#include <cstdint>

extern "C" {

enum { kMoeflexCudaAbi = 1, kMoeflexMaxExpertTensors = 8 };
enum MoeflexCudaGateLayout {
    kCudaGateNone = 0,
    kCudaGateConcat = 1,
    kCudaGateConcatUpFirst = 2,
    kCudaGateInterleaved = 3,
    kCudaGateInterleavedUpFirst = 4,
    kCudaGateSeparate = 5
};

// All 32-bit, no padding: specs are compared byte by byte. Dtypes are 0 bf16, 1 fp16, 2 fp32.
struct MoeflexCudaLayerSpec {
    int32_t abi;
    int32_t num_experts, hidden, intermediate, top_k;
    int32_t gate_layout;
    int32_t w13_out_in, w2_out_in;
    int32_t has_b13, has_b2;
    int32_t dtype;  // of x and of the expert tensors
    int32_t out_dtype;
    int32_t combine_dtype;
    int32_t index_bytes;  // of the ids: 4 | 8
};

// One kernel, for first_tokens <= T <= last_tokens: what a launch depends on, so that a new kernel changes nothing in
// the launcher. codegen/cuda_program.py fills it in.
struct MoeflexCudaKernel {
    int32_t first_tokens, last_tokens;
    int32_t cooperative;
    int32_t num_threads, shared_bytes;
    // Boxes of the expert maps. slab_rows > 0: K-major gate and up share one map of slabs of that many rows.
    int32_t slab_rows;
    int32_t pair_rows;   // of gate and of up
    int32_t whole_rows;  // of gate where it is alone, or holds up as its neighbour
    int32_t down_rows;
    int32_t box_k;  // MN-major only; 64 elements where K is contiguous
    // Maps of the workspace: of h (0) or y (1), with boxes of so many rows.
    int32_t num_row_maps, row_map_of[3], row_map_rows[3];
    // Workspace of T tokens in units of 4 bytes, R = T * K routes, E experts:
    // tiles = R / tile_rows + min(E, R), or none; rows = rows_per_tile * tiles + rows_per_route * R.
    int32_t tile_rows, rows_per_tile, rows_per_route;
    int32_t control, control_per_expert, control_per_tile;
    int32_t routes, routes_per_route, routes_per_expert, routes_per_tile, routes_per_row;
    uint64_t cubin_bytes;
    const void* cubin;
    const char* entry;
};
}
