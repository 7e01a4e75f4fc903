// Element types of templates/cuda/types.cuh without inline assembly: bf16 only.
#pragma once
#include "ptx.cuh"

namespace moeflex {

struct Bf16 {
    static constexpr bool kIsBf16 = true;
    static constexpr int kBytes = 2;
    u16 bits;
    static u32 half(float value) {
        u32 b = to_bits(value);
        return (b + 0x7FFF + ((b >> 16) & 1)) >> 16;
    }
    static u32 pack(float low, float high) { return half(low) | (half(high) << 16); }
    static float low(u32 packed) { return from_bits<float>(packed << 16); }
    static float high(u32 packed) { return from_bits<float>(packed & 0xffff0000u); }
    static float load(const void* base, long long index) {
        return low(static_cast<const u16*>(base)[index]);
    }
    static u16 round(float value) { return static_cast<u16>(half(value)); }
};

struct Fp32 {
    static constexpr int kBytes = 4;
    float value;
    static float load(const void* base, long long index) {
        return static_cast<const float*>(base)[index];
    }
};

template <class Out, int kCount>
void store_result(void* base, long long index, const float (&values)[kCount]) {
    for (int i = 0; i < kCount; ++i) {
        if constexpr (Out::kBytes == 4)
            static_cast<float*>(base)[index + i] = values[i];
        else
            static_cast<u16*>(base)[index + i] = Out::round(values[i]);
    }
}

}  // namespace moeflex
