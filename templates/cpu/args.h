// The C interface between the op library and a generated kernel. Strides are in elements.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

enum { kMoeflexAbi = 1 };
enum MoeflexDtype { kMoeflexBf16 = 0, kMoeflexFp16 = 1, kMoeflexFp32 = 2, kMoeflexFp64 = 3 };

// One expert's matrix as y[out] += sum over in of x[in] * data[out * out_stride + in * in_stride]. A bias has no in.
struct MoeflexMatrix {
    const void* data;
    int64_t out_stride;
    int64_t in_stride;
};

typedef void (*MoeflexBody)(int worker, void* context);

struct MoeflexArgs {
    int32_t abi;
    int32_t num_threads;
    // Runs body(0..n-1) at least as if in that order by one thread; returns when all have returned.
    void (*parallel)(int num_workers, MoeflexBody body, void* context);
    // 64-byte aligned scratch memory with any content; null when there is none.
    void* (*acquire)(size_t bytes);
    void (*release)(void* memory);
    int64_t num_experts;
    int64_t hidden;
    int64_t intermediate;
    int64_t
        direct_rows;  // experts with up to this many rows may take the direct form; 0: batch invariant
    int64_t num_tokens;
    int64_t top_k;
    const void* x;  // [T, H]
    int64_t x_token_stride;
    int64_t x_hidden_stride;
    const void* ids;  // [T, K]
    int32_t ids_bytes;
    int32_t ids_signed;
    int64_t ids_token_stride;
    int64_t ids_slot_stride;
    const void* weights;  // [T, K]
    int32_t weights_dtype;
    int32_t
        up_interleaved;  // up[e] is gate[e] moved by one in a tensor in which gate and up alternate along out
    int64_t weights_token_stride;
    int64_t weights_slot_stride;
    const MoeflexMatrix* gate;       // [E]; of gate and up that alternate, out_stride counts pairs
    const MoeflexMatrix* up;         // [E] or null
    const MoeflexMatrix* down;       // [E]
    const MoeflexMatrix* gate_bias;  // [E] or null, as the next two
    const MoeflexMatrix* up_bias;
    const MoeflexMatrix* down_bias;
    int32_t bias13_dtype;
    int32_t bias2_dtype;
    void* out;  // [T, H], contiguous
};

// 0, or an errno value (ENOMEM).
typedef int (*MoeflexKernel)(const MoeflexArgs*);
}
