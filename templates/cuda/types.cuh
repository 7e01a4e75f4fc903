// Element types of activations and weights, and conversions.
#pragma once
#include "ptx.cuh"

namespace moeflex {

struct Bf16 {
    static constexpr bool kIsBf16 = true;
    static constexpr int kBytes = 2;
    u16 bits;
    MOEFLEX_DEVICE static u32 pack(float low, float high) {
        u32 packed;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
        return packed;
    }
    MOEFLEX_DEVICE static float low(u32 packed) { return __uint_as_float(packed << 16); }
    MOEFLEX_DEVICE static float high(u32 packed) { return __uint_as_float(packed & 0xffff0000u); }
    MOEFLEX_DEVICE static float load(const void* base, long long index) {
        return low(__ldg(static_cast<const u16*>(base) + index));
    }
    MOEFLEX_DEVICE static u16 round(float value) {
        return static_cast<u16>(pack(value, 0.f) & 0xffff);
    }
};

struct Fp16 {
    static constexpr bool kIsBf16 = false;
    static constexpr int kBytes = 2;
    u16 bits;
    MOEFLEX_DEVICE static u32 pack(float low, float high) {
        u32 packed;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
        return packed;
    }
    MOEFLEX_DEVICE static float widen(u16 bits) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
    MOEFLEX_DEVICE static float low(u32 packed) { return widen(static_cast<u16>(packed & 0xffff)); }
    MOEFLEX_DEVICE static float high(u32 packed) { return widen(static_cast<u16>(packed >> 16)); }
    MOEFLEX_DEVICE static float load(const void* base, long long index) {
        return widen(__ldg(static_cast<const u16*>(base) + index));
    }
    MOEFLEX_DEVICE static u16 round(float value) {
        return static_cast<u16>(pack(value, 0.f) & 0xffff);
    }
};

// Only for combine weights and results.
struct Fp32 {
    static constexpr bool kIsBf16 = false;
    static constexpr int kBytes = 4;
    float value;
    MOEFLEX_DEVICE static float load(const void* base, long long index) {
        return __ldg(static_cast<const float*>(base) + index);
    }
};

// Stores `values` at element `index` of a result of type Out; index is a multiple of kCount (4 or
// 8).
template <class Out, int kCount>
MOEFLEX_DEVICE void store_result(void* base, long long index, const float (&values)[kCount]) {
    if constexpr (Out::kBytes == 4) {
        float4* dst = reinterpret_cast<float4*>(static_cast<float*>(base) + index);
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i)
            dst[i] = float4{values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]};
    } else {
        uint2* dst = reinterpret_cast<uint2*>(static_cast<u16*>(base) + index);
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i)
            dst[i] = uint2{Out::pack(values[4 * i], values[4 * i + 1]),
                           Out::pack(values[4 * i + 2], values[4 * i + 3])};
    }
}

}  // namespace moeflex
