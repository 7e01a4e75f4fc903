// Vectors of the CPU kernel: one width per instruction set, loads that widen, stores that round.
//
// GCC/Clang vector extensions wherever they suffice; intrinsics only for what they cannot say (vdpbf16ps, half
// precision). MOEFLEX_ISA is 0 generic, 1 AVX2+FMA+F16C, 2 AVX-512 (F, BW, VL, DQ), 3 AVX-512 with BF16,
// 4 that and AMX tiles.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if MOEFLEX_ISA > 0
#include <immintrin.h>
#endif

namespace moeflex {

#if MOEFLEX_ISA >= 2
constexpr int kVecBytes = 64;
#elif MOEFLEX_ISA == 1
constexpr int kVecBytes = 32;
#else
constexpr int kVecBytes = 16;
#endif
constexpr int kLanes = kVecBytes / 4;
constexpr int kGroup = 16;  // rows of a group, see groups.h

typedef float VecF __attribute__((vector_size(kVecBytes)));
typedef int32_t VecI __attribute__((vector_size(kVecBytes)));
typedef uint32_t VecU __attribute__((vector_size(kVecBytes)));
typedef double VecD __attribute__((vector_size(kVecBytes)));
typedef uint16_t VecH __attribute__((vector_size(kVecBytes / 2)));

struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

template <class V, class T>
inline V load_as(const T* p) {
    V v;
    std::memcpy(&v, p, sizeof(V));
    return v;
}
template <class V, class T>
inline void store_as(T* p, V v) {
    std::memcpy(p, &v, sizeof(V));
}

inline VecF splat(float x) {
    return VecF{} + x;
}
inline VecF select(VecI mask, VecF yes, VecF no) {
    return (VecF)(((VecI)yes & mask) | ((VecI)no & ~mask));
}

// ---- conversions: kLanes elements at p -----------------------------------------------------------
inline VecF load(const float* p) {
    return load_as<VecF>(p);
}
inline VecF load(const bf16* p) {
    return (VecF)(__builtin_convertvector(load_as<VecH>(p), VecU) << 16);
}
inline VecF load(const fp16* p) {
#if MOEFLEX_ISA >= 2
    return (VecF)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif MOEFLEX_ISA == 1
    return (VecF)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    // Exponent moved by a multiplication with 2^112, which also normalises subnormals; inf and NaN fixed after.
    VecU h = __builtin_convertvector(load_as<VecH>(p), VecU);
    VecF magnitude = (VecF)((h & 0x7fff) << 13) * splat(0x1p112f);
    VecI special = (VecI)((h & 0x7c00) == 0x7c00);
    VecU bits =
        ((VecU)magnitude & ~(VecU)special) | ((0x7f800000u | ((h & 0x3ff) << 13)) & (VecU)special);
    return (VecF)(bits | ((h & 0x8000) << 16));
#endif
}

inline void store(float* p, VecF v) {
    store_as(p, v);
}
inline void store(bf16* p, VecF v) {
#if MOEFLEX_ISA >= 3
    store_as(p, _mm512_cvtneps_pbh((__m512)v));
#else
    VecU bits = (VecU)v;
    VecU rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    VecU is_nan = (VecU)(v != v);
    rounded = (rounded & ~is_nan) | (((bits >> 16) | 0x40) & is_nan);
    store_as(p, __builtin_convertvector(rounded, VecH));
#endif
}
inline void store(fp16* p, VecF v) {
#if MOEFLEX_ISA >= 2
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif MOEFLEX_ISA == 1
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    VecU bits = (VecU)v, sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    VecU normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
    // Below 2^-14 the addition of 1/2 leaves the rounded subnormal in the low mantissa bits.
    VecU small = (VecU)((VecF)magnitude + splat(0.5f)) - 0x3f000000u;
    VecU is_small = (VecU)((VecI)magnitude < 0x38800000),
         is_big = (VecU)((VecI)magnitude >= 0x47800000);
    VecU half = (normal & ~is_small) | (small & is_small);
    half = (half & ~is_big) | (0x7c00u & is_big);
    VecU is_nan = (VecU)(v != v);
    half = (half & ~is_nan) | (0x7e00u & is_nan);
    store_as(p, __builtin_convertvector(half | sign, VecH));
#endif
}

// ---- the first n (< kLanes) elements: nothing beyond them is touched ------------------------------
template <class T>
inline VecF load_first(const T* p, long n) {
    T part[kLanes] = {};
    std::memcpy(part, p, n * sizeof(T));
    return load(part);
}
template <class T>
inline void store_first(T* p, VecF v, long n) {
    T part[kLanes];
    store(part, v);
    std::memcpy(p, part, n * sizeof(T));
}

// ---- scalars -------------------------------------------------------------------------------------
inline float to_float(float x) {
    return x;
}
inline double to_float(double x) {
    return x;
}
inline float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline float to_float(fp16 x) {
    return load_first(&x, 1)[0];
}

// out[0..n) = in[0..n), through fp32 (fp64 stays fp64)
template <class From, class To>
inline void convert(const From* in, To* out, long n) {
    long i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, load(in + i));
    if (i < n) store_first(out + i, load_first(in + i, n - i), n - i);
}
inline void convert(const float* in, float* out, long n) {
    std::memcpy(out, in, n * sizeof(float));
}
inline void convert(const double* in, double* out, long n) {
    std::memcpy(out, in, n * sizeof(double));
}
template <class From>
inline void convert(const From* in, double* out, long n) {
    for (long i = 0; i < n; ++i) out[i] = to_float(in[i]);
}
template <class To>
inline void convert(const double* in, To* out, long n) {
    float part[256];
    for (long i = 0; i < n; i += 256) {
        const long m = n - i < 256 ? n - i : 256;
        for (long j = 0; j < m; ++j) part[j] = (float)in[i + j];
        convert(part, out + i, m);
    }
}

}  // namespace moeflex
