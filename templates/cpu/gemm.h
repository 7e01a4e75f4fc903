// Register-tiled GEMM cores, panel packing, and the direct form that streams weights where they lie.
//
// A *word* is what one lane consumes in one step: an fp32, an fp64, or two neighbouring bf16. A *panel* holds
// kPanelLanes output columns of a block of steps: [sub-panel][step][kSubLanes] words. Every output is one chain of
// multiply-adds over the steps in order, whatever the number of rows: the panel form is batch invariant.
#pragma once
#include "args.h"
#include "simd.h"
#if MOEFLEX_ISA >= 4
#include "tiles.h"
#endif

namespace moeflex {

constexpr int kTileRows = 256;
constexpr int kPanelLanes = 64;
constexpr int kMaxGroupRows = 6;                      // rows of one register tile
constexpr int kGroupVecs = MOEFLEX_ISA >= 2 ? 4 : 2;  // vectors of one register tile's row
constexpr int kMaxSteps = 1024;                       // steps of a panel: 256 KB of 4-byte words

struct KindF32 {
    typedef float Element;
    typedef float Word;
    typedef float Sum;
    typedef VecF Vec;
    static constexpr int kPair = 1, kVecLanes = kLanes;
    static constexpr bool kHasDirect = true, kHasTiles = false;
    static Vec multiply_add(Vec acc, Word a, Vec b) { return acc + b * a; }
    template <class T>
    static Vec dot(Vec acc, const float* a, const T* b) {
        return acc + load(a) * load(b);
    }
    template <class T>
    static Vec dot_first(Vec acc, const float* a, const T* b, long n) {
        return acc + load_first(a, n) * load_first(b, n);
    }
};

struct KindF64 {
    typedef double Element;
    typedef double Word;
    typedef double Sum;
    typedef VecD Vec;
    static constexpr int kPair = 1, kVecLanes = kLanes / 2;
    static constexpr bool kHasDirect = false, kHasTiles = false;
    static Vec multiply_add(Vec acc, Word a, Vec b) { return acc + b * a; }
};

#if MOEFLEX_ISA >= 3
struct KindBF16 {
    typedef bf16 Element;
    typedef uint32_t Word;
    typedef float Sum;
    typedef VecF Vec;
    static constexpr int kPair = 2, kVecLanes = kLanes;
    static constexpr bool kHasDirect = true, kHasTiles = MOEFLEX_ISA >= 4;
    static Vec multiply_add(Vec acc, Word a, Vec b) {
        return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
    }
    static Vec dot(Vec acc, const bf16* a, const bf16* b) {
        return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)load_as<VecF>(a),
                                     (__m512bh)load_as<VecF>(b));
    }
    static Vec dot_first(Vec acc, const bf16* a, const bf16* b, long n) {
        const __mmask32 mask = (__mmask32)((1ull << n) - 1);
        return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_maskz_loadu_epi16(mask, a),
                                     (__m512bh)_mm512_maskz_loadu_epi16(mask, b));
    }
};
#endif

// Lines of the next tile's weights, asked for while this tile is computed.
struct Walk {
    const char* line = nullptr;
    long row_bytes = 0;  // from one row to the next
    int lines_per_row = 0, rows = 0, at = 0;
    void next() {
        if (rows <= 0) return;
        __builtin_prefetch(line + (long)at * 64, 0, 2);
        if (++at == lines_per_row) {
            at = 0;
            line += row_bytes;
            --rows;
        }
    }
};
struct Prefetch {
    Walk walks[2];
    int per_stretch = 0;  // lines asked for in one stretch of kStretch steps
    void next() {
        Walk& w = walks[0].rows > 0 ? walks[0] : walks[1];
        for (int i = 0; i < per_stretch; ++i) w.next();
    }
    void next_line() { (walks[0].rows > 0 ? walks[0] : walks[1]).next(); }
    // Spread what is left over so many calls of `next`.
    void spread(long calls) {
        const long lines = (long)walks[0].rows * walks[0].lines_per_row +
                           (long)walks[1].rows * walks[1].lines_per_row;
        per_stretch = (int)((lines + calls - 1) / calls);
    }
};
constexpr int kStretch = 8;

// sums[m][lanes] (+)= rows a[m] times one sub-panel.
template <class Kind, int kRows>
__attribute__((noinline)) void multiply_rows(const typename Kind::Element* const* a,
                                             const typename Kind::Word* b, long steps,
                                             typename Kind::Sum* sums, long pitch, bool add,
                                             Prefetch& ahead) {
    typedef typename Kind::Vec Vec;
    typedef typename Kind::Word Word;
    constexpr int kVecs = kGroupVecs, kWidth = Kind::kVecLanes;
    Vec acc[kRows][kVecs];
    const char* row[kRows];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
        row[m] = (const char*)a[m];
#pragma GCC unroll 8
        for (int n = 0; n < kVecs; ++n)
            acc[m][n] = add ? load_as<Vec>(sums + m * pitch + n * kWidth) : Vec{};
    }
    for (long s = 0; s < steps;) {
        const long end = s + kStretch < steps ? s + kStretch : steps;
        ahead.next();
        for (; s < end; ++s) {
            Vec panel[kVecs];
#pragma GCC unroll 8
            for (int n = 0; n < kVecs; ++n) panel[n] = load_as<Vec>(b + n * kWidth);
            b += kVecs * kWidth;
#pragma GCC unroll 8
            for (int m = 0; m < kRows; ++m) {
                Word word;
                std::memcpy(&word, row[m] + s * sizeof(Word), sizeof(Word));
#pragma GCC unroll 8
                for (int n = 0; n < kVecs; ++n)
                    acc[m][n] = Kind::multiply_add(acc[m][n], word, panel[n]);
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 8
        for (int n = 0; n < kVecs; ++n) store_as(sums + m * pitch + n * kWidth, acc[m][n]);
}

// Rows are split into groups of nearly equal size, none above kMaxGroupRows.
struct Groups {
    int num, size, larger;  // the first `larger` groups have size + 1 rows
    explicit Groups(int rows) {
        num = (rows + kMaxGroupRows - 1) / kMaxGroupRows;
        size = rows / num;
        larger = rows - size * num;
    }
    int rows(int i) const { return size + (i < larger); }
};

// Calls of `Prefetch::next` in the product of `rows` rows with a panel of `steps` steps.
template <class Kind>
long num_stretches(int rows, long steps) {
#if MOEFLEX_ISA >= 4
    if constexpr (Kind::kHasTiles)
        return (steps + kTileSteps - 1) / kTileSteps * ((rows + kTileBlock - 1) / kTileBlock) *
               (kPanelLanes / 32);
#endif
    return (steps + kStretch - 1) / kStretch * (kPanelLanes / (kGroupVecs * Kind::kVecLanes)) *
           Groups(rows).num;
}

template <class Kind>
void multiply_panel(const typename Kind::Element* const* a, int rows, long first_step,
                    typename Kind::Word* panel, long steps, typename Kind::Sum* sums, bool add,
                    Prefetch& ahead) {
    typedef typename Kind::Element Element;
    constexpr int kSub = kGroupVecs * Kind::kVecLanes;
#if MOEFLEX_ISA >= 4
    if constexpr (Kind::kHasTiles) {
        static_assert(kSub == kPanelLanes && kMaxSteps % kTileSteps == 0, "one sub-panel");
        const long whole = (steps + kTileSteps - 1) / kTileSteps * kTileSteps;
        std::memset(panel + steps * kSub, 0, sizeof(*panel) * kSub * (size_t)(whole - steps));
        multiply_tiles((const char* const*)a, rows, first_step * 4, panel, kSub, steps, sums, add,
                       ahead);
        return;
    }
#endif
    const Groups groups(rows);
    for (int g = 0, m = 0; g < groups.num; m += groups.rows(g), ++g) {
        const Element* at[kMaxGroupRows];
        const int count = groups.rows(g);
        for (int i = 0; i < count; ++i) at[i] = a[m + i] + first_step * Kind::kPair;
        for (int sub = 0; sub < kPanelLanes / kSub; ++sub) {
            const auto* b = panel + (long)sub * steps * kSub;
            auto* out = sums + (long)m * kPanelLanes + sub * kSub;
            switch (count) {
                case 1: multiply_rows<Kind, 1>(at, b, steps, out, kPanelLanes, add, ahead); break;
                case 2: multiply_rows<Kind, 2>(at, b, steps, out, kPanelLanes, add, ahead); break;
                case 3: multiply_rows<Kind, 3>(at, b, steps, out, kPanelLanes, add, ahead); break;
                case 4: multiply_rows<Kind, 4>(at, b, steps, out, kPanelLanes, add, ahead); break;
                case 5: multiply_rows<Kind, 5>(at, b, steps, out, kPanelLanes, add, ahead); break;
                default: multiply_rows<Kind, 6>(at, b, steps, out, kPanelLanes, add, ahead); break;
            }
        }
    }
}

// ---- packing -------------------------------------------------------------------------------------
#if MOEFLEX_ISA >= 2
inline void transpose(VecF r[16]) {
    VecF t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = (VecF)_mm512_unpacklo_ps((__m512)r[i], (__m512)r[i + 1]);
        t[i + 1] = (VecF)_mm512_unpackhi_ps((__m512)r[i], (__m512)r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = (VecF)_mm512_unpacklo_pd((__m512d)t[i], (__m512d)t[i + 2]);
        r[i + 1] = (VecF)_mm512_unpackhi_pd((__m512d)t[i], (__m512d)t[i + 2]);
        r[i + 2] = (VecF)_mm512_unpacklo_pd((__m512d)t[i + 1], (__m512d)t[i + 3]);
        r[i + 3] = (VecF)_mm512_unpackhi_pd((__m512d)t[i + 1], (__m512d)t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        t[i] = (VecF)_mm512_shuffle_f32x4((__m512)r[i], (__m512)r[i + 4], 0x88);
        t[i + 4] = (VecF)_mm512_shuffle_f32x4((__m512)r[i], (__m512)r[i + 4], 0xdd);
        t[i + 8] = (VecF)_mm512_shuffle_f32x4((__m512)r[i + 8], (__m512)r[i + 12], 0x88);
        t[i + 12] = (VecF)_mm512_shuffle_f32x4((__m512)r[i + 8], (__m512)r[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        r[i] = (VecF)_mm512_shuffle_f32x4((__m512)t[i], (__m512)t[i + 8], 0x88);
        r[i + 8] = (VecF)_mm512_shuffle_f32x4((__m512)t[i], (__m512)t[i + 8], 0xdd);
        r[i + 4] = (VecF)_mm512_shuffle_f32x4((__m512)t[i + 4], (__m512)t[i + 12], 0x88);
        r[i + 12] = (VecF)_mm512_shuffle_f32x4((__m512)t[i + 4], (__m512)t[i + 12], 0xdd);
    }
}
#elif MOEFLEX_ISA == 1
inline void transpose(VecF r[8]) {
    VecF t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = (VecF)_mm256_unpacklo_ps((__m256)r[i], (__m256)r[i + 1]);
        t[i + 1] = (VecF)_mm256_unpackhi_ps((__m256)r[i], (__m256)r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = (VecF)_mm256_unpacklo_pd((__m256d)t[i], (__m256d)t[i + 2]);
        r[i + 1] = (VecF)_mm256_unpackhi_pd((__m256d)t[i], (__m256d)t[i + 2]);
        r[i + 2] = (VecF)_mm256_unpacklo_pd((__m256d)t[i + 1], (__m256d)t[i + 3]);
        r[i + 3] = (VecF)_mm256_unpackhi_pd((__m256d)t[i + 1], (__m256d)t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = (VecF)_mm256_permute2f128_ps((__m256)r[i], (__m256)r[i + 4], 0x20);
        t[i + 4] = (VecF)_mm256_permute2f128_ps((__m256)r[i], (__m256)r[i + 4], 0x31);
    }
    std::memcpy(r, t, sizeof t);
}
#else
inline void transpose(VecF r[kLanes]) {
    for (int i = 0; i < kLanes; ++i)
        for (int j = 0; j < i; ++j) {
            const float swapped = r[i][j];
            r[i][j] = r[j][i];
            r[j][i] = swapped;
        }
}
#endif

// kLanes words of one output row, from `w`; the first n elements only when n is given.
template <class Kind, class T>
struct Words {
    static VecF whole(const T* w) { return load(w); }
    static VecF first(const T* w, long n) { return load_first(w, n); }
    static VecF pair_up(const T* even, const T*, long n) {
        return n == kLanes ? load(even) : load_first(even, n);
    }
};
#if MOEFLEX_ISA >= 3
template <>
struct Words<KindBF16, bf16> {
    static VecF whole(const bf16* w) { return load_as<VecF>(w); }
    static VecF first(const bf16* w, long n) {
        return (VecF)_mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), w);
    }
    // kLanes words of two rows of a tensor whose outputs are neighbours; odd is null after the last row.
    static VecF pair_up(const bf16* even, const bf16* odd, long n) {
        const __mmask16 mask = (__mmask16)((1u << n) - 1);
        __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, even));
        __m512i high = odd ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, odd))
                           : _mm512_setzero_si512();
        return (VecF)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    }
};
#endif

template <class Kind, class T>
inline typename Kind::Word word_at(const T* w, long in_stride, long left) {
    if constexpr (Kind::kPair == 2) {
        return (uint32_t)w[0].bits | (left > 1 ? (uint32_t)w[in_stride].bits << 16 : 0);
    } else {
        return (typename Kind::Word)to_float(w[0]);
    }
}

// One vector of output columns: `valid` of them exist, the rest become zero. `w` points at (first column, first k);
// `ks` input elements follow. Words go to dest + step * pitch.
template <class Kind, class T>
void pack_vector(const T* w, long out_stride, long in_stride, int valid, long ks,
                 typename Kind::Word* dest, long pitch) {
    constexpr int kPair = Kind::kPair, kWidth = Kind::kVecLanes;
    const long steps = (ks + kPair - 1) / kPair;
    if constexpr (sizeof(typename Kind::Word) == 4) {
        if (in_stride == 1) {
            for (long s = 0; s < steps; s += kLanes) {
                const long left = ks - s * kPair;
                VecF rows[kLanes];
#pragma GCC unroll 16
                for (int j = 0; j < kLanes; ++j) {
                    const T* from = w + j * out_stride + s * kPair;
                    rows[j] = j >= valid               ? VecF{}
                              : left >= kLanes * kPair ? Words<Kind, T>::whole(from)
                                                       : Words<Kind, T>::first(from, left);
                }
                transpose(rows);
                const long count = steps - s < kLanes ? steps - s : kLanes;
                for (int j = 0; j < count; ++j) store_as(dest + (s + j) * pitch, rows[j]);
            }
            return;
        }
        if (out_stride == 1) {
            for (long s = 0; s < steps; ++s) {
                const T* even = w + s * kPair * in_stride;
                const T* odd = kPair == 2 && s * 2 + 1 < ks ? even + in_stride : nullptr;
                store_as(dest + s * pitch, Words<Kind, T>::pair_up(even, odd, valid));
            }
            return;
        }
    }
    for (long s = 0; s < steps; ++s)  // any strides
        for (int j = 0; j < kWidth; ++j)
            dest[s * pitch + j] = j < valid
                                      ? word_at<Kind, T>(w + j * out_stride + s * kPair * in_stride,
                                                         in_stride, ks - s * kPair)
                                      : typename Kind::Word(0);
}

// Columns [first, first + lanes) of `matrix`, of which those below `limit` exist, into panel lanes [lane, lane + lanes).
template <class Kind, class T>
void pack_lanes(const MoeflexMatrix& matrix, long first, long limit, long k, long ks,
                typename Kind::Word* panel, int lane, int lanes) {
    constexpr int kWidth = Kind::kVecLanes, kSub = kGroupVecs * kWidth;
    const long steps = (ks + Kind::kPair - 1) / Kind::kPair;
    const T* w = (const T*)matrix.data + first * matrix.out_stride + k * matrix.in_stride;
    for (int j = 0; j < lanes; j += kWidth) {
        const long exist = limit - first - j;
        const int valid = exist < 0 ? 0 : exist < kWidth ? (int)exist : kWidth;
        const int at = lane + j;
        pack_vector<Kind, T>(w + j * matrix.out_stride, matrix.out_stride, matrix.in_stride, valid,
                             ks, panel + (long)(at / kSub) * steps * kSub + at % kSub, kSub);
    }
}

// ---- the direct form -----------------------------------------------------------------------------
#if MOEFLEX_ISA >= 2
inline float sum_of(VecF v) {
    return _mm512_reduce_add_ps((__m512)v);
}
#else
inline float sum_of(VecF v) {
    float total[kLanes];
    store_as(total, v);
    for (int step = kLanes / 2; step > 0; step /= 2)
        for (int i = 0; i < step; ++i) total[i] += total[i + step];
    return total[0];
}
#endif

// sums[m * pitch] = rows a[m] . one weight row; in_stride == 1. The weight is read as one rising stream, which the
// prefetchers of a CPU follow farther than several streams at once; `kChains` sums a row hide the latency of a sum.
template <class Kind, class T, int kRows>
inline void dot_row(const typename Kind::Element* const* a, const T* weight, long ks,
                    typename Kind::Sum* sums, long pitch, Prefetch& ahead) {
    typedef typename Kind::Vec Vec;
    constexpr int kDot = Kind::kVecLanes * Kind::kPair;
    constexpr int kChains = kRows >= 4 ? 1 : kRows >= 2 ? 2 : 4;
    Vec acc[kRows][kChains];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c) acc[m][c] = Vec{};
    long k = 0;
    for (; k + kChains * kDot <= ks; k += kChains * kDot)
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c) {
            ahead.next_line();
#pragma GCC unroll 8
            for (int m = 0; m < kRows; ++m)
                acc[m][c] = Kind::dot(acc[m][c], a[m] + k + c * kDot, weight + k + c * kDot);
        }
    for (; k + kDot <= ks; k += kDot)
#pragma GCC unroll 8
        for (int m = 0; m < kRows; ++m) acc[m][0] = Kind::dot(acc[m][0], a[m] + k, weight + k);
    if (k < ks)
        for (int m = 0; m < kRows; ++m)
            acc[m][0] = Kind::dot_first(acc[m][0], a[m] + k, weight + k, ks - k);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
        Vec total = acc[m][0];
#pragma GCC unroll 4
        for (int c = 1; c < kChains; ++c) total = total + acc[m][c];
        sums[m * pitch] = sum_of((VecF)total);
    }
}

// Output columns of one register tile of dot products.
#if MOEFLEX_ISA >= 2
constexpr int kDotCols = 4;
#else
constexpr int kDotCols = 1;
#endif

// sums[m * pitch + c] = rows a[m] . weight rows c, for kDotCols of them: a vector of weights serves all rows, a vector of
// a row all columns.
template <class Kind, class T, int kRows>
inline void dot_tile(const typename Kind::Element* const* a, const T* weight, long out_stride,
                     long ks, typename Kind::Sum* sums, long pitch, Prefetch& ahead) {
    typedef typename Kind::Vec Vec;
    constexpr int kDot = Kind::kVecLanes * Kind::kPair;
    Vec acc[kRows][kDotCols];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
        for (int c = 0; c < kDotCols; ++c) acc[m][c] = Vec{};
    long k = 0;
    for (; k + kDot <= ks; k += kDot) {
        ahead.next();
#pragma GCC unroll 4
        for (int c = 0; c < kDotCols; ++c)
#pragma GCC unroll 8
            for (int m = 0; m < kRows; ++m)
                acc[m][c] = Kind::dot(acc[m][c], a[m] + k, weight + c * out_stride + k);
    }
    if (k < ks)
#pragma GCC unroll 4
        for (int c = 0; c < kDotCols; ++c)
#pragma GCC unroll 8
            for (int m = 0; m < kRows; ++m)
                acc[m][c] =
                    Kind::dot_first(acc[m][c], a[m] + k, weight + c * out_stride + k, ks - k);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
        for (int c = 0; c < kDotCols; ++c) sums[m * pitch + c] = sum_of((VecF)acc[m][c]);
}

template <class Kind, class T, int kRows>
__attribute__((noinline)) void dot_columns(const typename Kind::Element* const* a, const T* weight,
                                           long out_stride, long count, long ks,
                                           typename Kind::Sum* sums, bool stream, Prefetch& ahead) {
    const typename Kind::Element* row[kRows];
    for (int m = 0; m < kRows; ++m) row[m] = a[m];
    long j = 0;
    if (!stream)
        for (; j + kDotCols <= count; j += kDotCols)
            dot_tile<Kind, T, kRows>(row, weight + j * out_stride, out_stride, ks, sums + j,
                                     kPanelLanes, ahead);
    for (; j < count; ++j)
        dot_row<Kind, T, kRows>(row, weight + j * out_stride, ks, sums + j, kPanelLanes, ahead);
}

// `lanes` output columns from `first` on (those below `limit` exist) for all rows, into sums[m][lane ..].
template <class Kind, class T>
void multiply_direct(const typename Kind::Element* const* a, int rows, const MoeflexMatrix& matrix,
                     long first, long limit, long ks, typename Kind::Sum* sums, int lane, int lanes,
                     Prefetch& ahead) {
    const Groups groups(rows);
    const T* weight = (const T*)matrix.data + first * matrix.out_stride;
    const long count = limit - first < lanes ? limit - first : lanes, step = matrix.out_stride;
    const bool stream = groups.num == 1;
    for (int g = 0, m = 0; g < groups.num; m += groups.rows(g), ++g) {
        auto* out = sums + (long)m * kPanelLanes + lane;
        switch (groups.rows(g)) {
            case 1:
                dot_columns<Kind, T, 1>(a + m, weight, step, count, ks, out, stream, ahead);
                break;
            case 2:
                dot_columns<Kind, T, 2>(a + m, weight, step, count, ks, out, stream, ahead);
                break;
            case 3:
                dot_columns<Kind, T, 3>(a + m, weight, step, count, ks, out, stream, ahead);
                break;
            case 4:
                dot_columns<Kind, T, 4>(a + m, weight, step, count, ks, out, stream, ahead);
                break;
            case 5:
                dot_columns<Kind, T, 5>(a + m, weight, step, count, ks, out, stream, ahead);
                break;
            default:
                dot_columns<Kind, T, 6>(a + m, weight, step, count, ks, out, stream, ahead);
                break;
        }
    }
}

}  // namespace moeflex
