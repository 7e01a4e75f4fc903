// The warpgroup product of templates/cuda/wgmma.cuh, from the bytes that its descriptors name.
#pragma once
#include "ptx.cuh"
#include "types.cuh"

namespace moeflex {

inline void wgmma_fence() {}
inline void wgmma_commit() {}
// All four warps have multiplied.
template <int kPending>
void wgmma_wait() {
    machine::arrive(machine::gpu->current->block->warpgroups[threadIdx.x / 128], 128, true);
}
template <int kCount>
void pin_registers(float (&)[kCount]) {}

template <bool kMnMajor>
u64 operand_descriptor(u32 address, u32 mn_stride) {
    u64 leading = kMnMajor ? mn_stride >> 4 : 1;
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (leading << 16) | (64ull << 32) |
           (1ull << 62);
}
template <bool kMnMajor>
constexpr int kStepUnits = kMnMajor ? 128 : 2;

// Element (row, k) of a 128-byte-swizzled operand.
template <bool kMnMajor>
float operand_element(u64 descriptor, int row, int k) {
    const u32 start = u32(descriptor & 0x3FFF) << 4, leading = u32(descriptor >> 16 & 0x3FFF) << 4,
              stride = u32(descriptor >> 32 & 0x3FFF) << 4;
    const u32 address =
        kMnMajor ? start + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                 : start + row / 8 * stride + row % 8 * 128 + k * 2;
    return Bf16::low(*reinterpret_cast<const u16*>(shared_pointer(swizzle_128(address))));
}

template <class Element, int kN, bool kAMnMajor, bool kBMnMajor>
struct Wgmma {
    static void run(float (&d)[kN / 2], u64 a, u64 b, int accumulate) {
        const int thread = threadIdx.x % 128, lane = thread % 32;
        float left[2][16];
        for (int half = 0; half < 2; ++half)
            for (int k = 0; k < 16; ++k)
                left[half][k] =
                    operand_element<kAMnMajor>(a, thread / 32 * 16 + lane / 4 + 8 * half, k);
        for (int j = 0; j < kN / 8; ++j)
            for (int i = 0; i < 2; ++i) {
                float sum[2] = {};
                for (int k = 0; k < 16; ++k) {
                    const float right =
                        operand_element<kBMnMajor>(b, 8 * j + 2 * (lane % 4) + i, k);
                    for (int half = 0; half < 2; ++half) sum[half] += left[half][k] * right;
                }
                for (int half = 0; half < 2; ++half) {
                    float& value = d[4 * j + 2 * half + i];
                    value = (accumulate ? value : 0.f) + sum[half];
                }
            }
    }
};

}  // namespace moeflex
