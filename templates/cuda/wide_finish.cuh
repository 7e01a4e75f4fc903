// What happens to the accumulators of a wide tile: weight, bias, activation, rounding, and the
// transpose to rows of h or y.
//
// A warpgroup has two slabs of 64 weight rows: d[slab * kTokens / 2 + 4 * j + 2 * half + i] is row
// 16 * warp + lane / 4 + 8 * half of the slab, token 8 * j + 2 * (lane % 4) + i. Two neighbouring
// tokens packed are what stmatrix transposes.
#pragma once
#include "activation.cuh"
#include "wide_plan.cuh"

namespace moeflex {

template <class C>
struct WideFinish {
    using S = WideShape<C>;
    using Element = typename C::Element;
    static constexpr int kAccumulators = S::kTokens, kSlab = kAccumulators / 2;
    static constexpr int kRoundTokens = 32, kOutBytes = kRoundTokens * 128;
    // Gate and up in slabs of their own, as MN-major tensors lie; else in rows of one slab.
    static constexpr bool kTwoSlabs = C::kGated && C::kW13MnMajor && !C::kPaired;

    const LayerArgs& args;
    u8* out;  // [2][kOutBytes]: this warpgroup's staging, 128-byte swizzled rows of 64 columns
    int warpgroup, thread;

    MOEFLEX_DEVICE int warp() const { return thread >> 5; }
    MOEFLEX_DEVICE int lane() const { return thread & 31; }

    // Volatile: hoisting these above the products would spill.
    MOEFLEX_DEVICE static float load_bias(const void* bias, long long index, bool valid) {
        u16 bits = 0;
        if (valid)
            asm volatile("ld.global.nc.b16 %0, [%1];"
                         : "=h"(bits)
                         : "l"(static_cast<const u16*>(bias) + index));
        return Element::low(bits);
    }
    struct ColumnBias {
        float gate = 0.f, up = 0.f;
    };
    MOEFLEX_DEVICE ColumnBias column_bias(int expert, int column) const {
        ColumnBias bias;
        if constexpr (C::kBias13) {
            long long index = static_cast<long long>(expert) * args.bias13_expert_stride +
                              static_cast<long long>(column) * C::kBias13Stride;
            bool valid = column < args.intermediate;
            bias.gate = load_bias(args.bias_gate, index, valid);
            if constexpr (C::kGated) bias.up = load_bias(args.bias_up, index, valid);
        }
        return bias;
    }
    // Combine weights of the rows of a tile, where they enter before the down projection.
    MOEFLEX_DEVICE static float row_weight(const float* weights, int token, int rows) {
        if constexpr (C::kWeightPosition == WeightPosition::kOutput) return 1.f;
        return token < rows ? __ldcg(weights + token) : 0.f;
    }

    // h of one (token, column) from its two products.
    MOEFLEX_DEVICE static float finish_element(float gate, float up, float weight,
                                               const ColumnBias& bias) {
        if constexpr (C::kWeightPosition == WeightPosition::kInput) {
            gate *= weight;
            up *= weight;
        }
        if constexpr (C::kBias13) {
            gate += bias.gate;
            up += bias.up;
        }
        float value = activate<C>(gate, up);
        return C::kWeightPosition == WeightPosition::kHidden ? value * weight : value;
    }

    // h of one gate/up tile. First column of h of this warpgroup's 64 or, not gated, 128.
    MOEFLEX_DEVICE void gate_up(const float (&d)[kAccumulators], int expert, int column0, int rows,
                                int row, const float* weights, const TensorMap* h) {
        int c = lane() >> 2;
        if constexpr (!C::kGated) {
#pragma unroll
            for (int slab = 0; slab < 2; ++slab) {
                int first = column0 + 64 * slab;
                ColumnBias bias[2] = {column_bias(expert, first + 16 * warp() + c),
                                      column_bias(expert, first + 16 * warp() + c + 8)};
                store_columns<false>(rows, row, first, h, [&](int j, int half) {
                    int at = slab * kSlab + 4 * j + 2 * half;
                    return finish_tokens(d[at], d[at + 1], 0.f, 0.f, j, rows, weights, bias[half]);
                });
            }
        } else if constexpr (kTwoSlabs) {
            ColumnBias bias[2] = {column_bias(expert, column0 + 16 * warp() + c),
                                  column_bias(expert, column0 + 16 * warp() + c + 8)};
            store_columns<false>(rows, row, column0, h, [&](int j, int half) {
                int at = 4 * j + 2 * half;
                return finish_tokens(d[at], d[at + 1], d[kSlab + at], d[kSlab + at + 1], j, rows,
                                     weights, bias[half]);
            });
        } else if constexpr (C::kPaired) {
            int pair = column0 + 8 * warp() + (lane() >> 3);
            ColumnBias bias[4] = {column_bias(expert, pair), column_bias(expert, pair + 4),
                                  column_bias(expert, pair + 32), column_bias(expert, pair + 36)};
            store_columns<true>(rows, row, column0, h, [&](int j, int slab) {
                const float* p = &d[slab * kSlab + 4 * j];
                return finish_neighbours(p[0], p[1], p[2], p[3], j, rows, weights, bias[2 * slab],
                                         bias[2 * slab + 1]);
            });
        } else {
            ColumnBias bias[2] = {column_bias(expert, column0 + 8 * warp() + c),
                                  column_bias(expert, column0 + 8 * warp() + c + 32)};
            store_columns<true>(rows, row, column0, h, [&](int j, int slab) {
                const float* p = &d[slab * kSlab + 4 * j];
                bool swap = args.up_first;
                return finish_tokens(swap ? p[2] : p[0], swap ? p[3] : p[1], swap ? p[0] : p[2],
                                     swap ? p[1] : p[3], j, rows, weights, bias[slab]);
            });
        }
    }

    // y of one down tile: 128 columns from `column0` on.
    MOEFLEX_DEVICE void down(const float (&d)[kAccumulators], int expert, int column0, int rows,
                             int row, const TensorMap* y) {
#pragma unroll
        for (int slab = 0; slab < 2; ++slab) {
            int first = column0 + 64 * slab;
            float bias[2] = {};
            if constexpr (C::kBias2) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    int c = first + 16 * warp() + (lane() >> 2) + 8 * half;
                    bias[half] =
                        load_bias(args.bias_down, static_cast<long long>(expert) * args.hidden + c,
                                  c < args.hidden);
                }
            }
            store_columns<false>(rows, row, first, y, [&](int j, int half) {
                int at = slab * kSlab + 4 * j + 2 * half;
                if constexpr (C::kBias2)
                    return Element::pack(d[at] + bias[half], d[at + 1] + bias[half]);
                else
                    return Element::pack(d[at], d[at + 1]);
            });
        }
    }

    // h of one column of tokens 8 * j + 2 * (lane % 4) + {0, 1}.
    MOEFLEX_DEVICE u32 finish_tokens(float gate0, float gate1, float up0, float up1, int j,
                                     int rows, const float* weights, const ColumnBias& bias) const {
        int token = 8 * j + 2 * (lane() & 3);
        float w0 = row_weight(weights, token, rows), w1 = row_weight(weights, token + 1, rows);
        return Element::pack(finish_element(gate0, up0, w0, bias),
                             finish_element(gate1, up1, w1, bias));
    }

    // Weight rows 2 * r and 2 * r + 1 are gate and up of column r: they lie in lanes four apart.
    // The lower lane finishes the even token of a pair, the upper the odd one, for columns lane / 8
    // and lane / 8 + 4; then each lane gathers two tokens of column lane / 4.
    MOEFLEX_DEVICE u32 finish_neighbours(float a0, float a1, float b0, float b1, int j, int rows,
                                         const float* weights, const ColumnBias& bias_a,
                                         const ColumnBias& bias_b) const {
        int odd = (lane() >> 2) & 1;
        float weight = row_weight(weights, 8 * j + 2 * (lane() & 3) + odd, rows);
        u32 mine = Element::pack(finish_row(a0, a1, odd, weight, bias_a),
                                 finish_row(b0, b1, odd, weight, bias_b));
        int source = ((lane() >> 2) & 3) * 8 + (lane() & 3);
        u32 even = __shfl_sync(~0u, mine, source), next = __shfl_sync(~0u, mine, source + 4);
        return __byte_perm(even, next, lane() < 16 ? 0x5410 : 0x7632);
    }
    MOEFLEX_DEVICE float finish_row(float low, float high, int odd, float weight,
                                    const ColumnBias& bias) const {
        float other = __shfl_xor_sync(~0u, odd ? low : high, 4);
        float even_row = odd ? other : low, odd_row = odd ? high : other;
        return finish_element(args.up_first ? odd_row : even_row,
                              args.up_first ? even_row : odd_row, weight, bias);
    }

    // 64 columns of a tile's rows, kRoundTokens a round through the two staging buffers.
    // pack(j, part) is two tokens of one column: 32 * part + 8 * warp + lane / 4 when
    // kPartsAreSlabs, else 16 * warp + 8 * part + lane / 4. Rows beyond `rows` that a box holds are
    // padding of the tile.
    template <bool kPartsAreSlabs, class Pack>
    MOEFLEX_DEVICE void store_columns(int rows, int row, int column, const TensorMap* map,
                                      const Pack& pack) {
        constexpr int kGroups = S::kTokens / 8;
#pragma unroll
        for (int round = 0; round < ceil_div(S::kTokens, kRoundTokens); ++round) {
            if (kRoundTokens * round < rows) {
                u32 packed[8];
#pragma unroll
                for (int z = 0; z < 8; ++z) {
                    int j = 4 * round + z / 2;
                    packed[z] = j < kGroups ? pack(j < kGroups ? j : 0, z % 2) : 0u;
                }
                if (thread == 0) {
                    if (round == 0)
                        tma_wait_read<0>();
                    else
                        tma_wait_read<1>();
                }
                named_barrier(1 + warpgroup, 128);
                u8* buffer = out + (round & 1) * kOutBytes;
                int chunk = kPartsAreSlabs ? 4 * ((lane() >> 3) & 1) + warp()
                                           : 2 * warp() + ((lane() >> 3) & 1);
#pragma unroll
                for (int g = 0; g < 2; ++g) {
                    int token = 8 * (2 * g + (lane() >> 4)) + (lane() & 7);
                    store_matrix_x4_transposed(
                        shared_address(buffer) + token * 128 + ((chunk ^ (token & 7)) << 4),
                        packed[4 * g], packed[4 * g + 1], packed[4 * g + 2], packed[4 * g + 3]);
                }
                fence_async_shared();
                named_barrier(1 + warpgroup, 128);
                if (thread == 0) {
                    tma_store_2d(map, buffer, column, row + kRoundTokens * round);
                    tma_commit();
                }
            }
        }
    }
};

}  // namespace moeflex
