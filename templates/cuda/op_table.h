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

// One kernel, for first_tokens <= T <= last_tokens.
struct MoeflexCudaKernel {
    int32_t first_tokens, last_tokens;
    int32_t prefill;  // else decode
    int32_t num_threads, shared_bytes;
    int32_t block_m;
    int32_t num_slabs, max_tiles;  // decode
    int32_t num_slices;            // prefill
    uint64_t cubin_bytes;
    const void* cubin;
    const char* entry;
};
}
