// What happens to the accumulators of a prefill tile: weight, bias, activation, rounding.
//
// d[4 * j + 2 * half + z] is column 8 * j + 2 * (lane % 4) + z of row 16 * warp + lane / 4 + 8 *
// half. packed[2 * j + half] holds the two neighbouring columns z = 0, 1 of 128 columns.
#pragma once
#include "activation.cuh"
#include "layer_args.cuh"

namespace moeflex {

template <class C>
struct PrefillFinish {
    using Element = typename C::Element;

    // Bias at `src` (0 where not `valid`). Volatile: hoisting dozens of these above the products
    // would spill.
    MOEFLEX_DEVICE static float load_bias(const u16* src, bool valid) {
        u16 bits = 0;
        if (valid) asm volatile("ld.global.nc.b16 %0, [%1];" : "=h"(bits) : "l"(src));
        return Element::low(bits);
    }
    MOEFLEX_DEVICE static const u16* bias_at(const void* bias, int expert, int expert_stride,
                                             int offset) {
        return static_cast<const u16*>(bias) + static_cast<long long>(expert) * expert_stride +
               offset;
    }

    // h of one (row, column) from its two products.
    MOEFLEX_DEVICE static float finish_element(float gate, float up, float weight, float bias_gate,
                                               float bias_up) {
        if constexpr (C::kWeightPosition == WeightPosition::kInput) {
            gate *= weight;
            up *= weight;
        }
        if constexpr (C::kBias13) {
            gate += bias_gate;
            up += bias_up;
        }
        float value = activate<C>(gate, up);
        return C::kWeightPosition == WeightPosition::kHidden ? value * weight : value;
    }

    // 128 columns of h in the layout of store_half_tile, two neighbouring columns at a time.
    template <int kFirst>
    MOEFLEX_DEVICE static void finish_columns(const LayerArgs& args, const float (&d)[128],
                                              u32 (&packed)[32], int column0, int expert,
                                              const float (&weight)[2]) {
        constexpr int kStride = C::kBias13Stride;
        int offset = (column0 + 2 * (threadIdx.x & 3)) * kStride;
        const u16* gate_src = bias_at(args.bias_gate, expert, args.bias13_expert_stride, offset);
        const u16* up_src = bias_at(args.bias_up, expert, args.bias13_expert_stride, offset);
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            float bias_gate[2] = {}, bias_up[2] = {};
            if constexpr (C::kBias13) {
                bool valid = column0 + 8 * j < args.intermediate;
#pragma unroll
                for (int z = 0; z < 2; ++z) {
                    bias_gate[z] = load_bias(gate_src + (8 * j + z) * kStride, valid);
                    if constexpr (C::kGated)
                        bias_up[z] = load_bias(up_src + (8 * j + z) * kStride, valid);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int i = kFirst + 4 * j + 2 * half;
                float value[2];
#pragma unroll
                for (int z = 0; z < 2; ++z)
                    value[z] = finish_element(d[i + z], C::kGated ? d[(64 + i + z) % 128] : 0.f,
                                              weight[half], bias_gate[z], bias_up[z]);
                packed[2 * j + half] = Element::pack(value[0], value[1]);
            }
        }
    }

    // Paired: gate and up of a column lie side by side, d[4 * j + 2 * half + {0, 1}] for column 4 *
    // j + lane % 4. Two columns of one thread are four apart; a shuffle among four lanes brings
    // neighbours together.
    MOEFLEX_DEVICE static void finish_paired_columns(const LayerArgs& args, const float (&d)[128],
                                                     u32 (&packed)[32], int column0, int expert,
                                                     const float (&weight)[2]) {
        int lane = threadIdx.x & 31, c = lane & 3;
        constexpr int kStride = C::kBias13Stride;
        const u16* gate_src =
            bias_at(args.bias_gate, expert, args.bias13_expert_stride, (column0 + c) * kStride);
        const u16* up_src =
            bias_at(args.bias_up, expert, args.bias13_expert_stride, (column0 + c) * kStride);
#pragma unroll
        for (int g = 0; g < 16; ++g) {
            float bias_gate[2] = {}, bias_up[2] = {};
            if constexpr (C::kBias13) {
                bool valid = column0 + 8 * g < args.intermediate;
#pragma unroll
                for (int z = 0; z < 2; ++z) {
                    bias_gate[z] = load_bias(gate_src + (8 * g + 4 * z) * kStride, valid);
                    bias_up[z] = load_bias(up_src + (8 * g + 4 * z) * kStride, valid);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float value[2];
#pragma unroll
                for (int z = 0; z < 2; ++z) {
                    int i = 8 * g + 4 * z + 2 * half;
                    float first = d[i], second = d[i + 1];
                    value[z] = finish_element(args.up_first ? second : first,
                                              args.up_first ? first : second, weight[half],
                                              bias_gate[z], bias_up[z]);
                }
                u32 mine = Element::pack(value[0], value[1]);
                u32 even = __shfl_sync(~0u, mine, (lane & ~3) | ((2 * c) & 3));
                u32 odd = __shfl_sync(~0u, mine, (lane & ~3) | ((2 * c + 1) & 3));
                packed[2 * g + half] = __byte_perm(even, odd, c < 2 ? 0x5410 : 0x7632);
            }
        }
    }

    // 128 columns of y.
    template <int kFirst>
    MOEFLEX_DEVICE static void finish_down(const LayerArgs& args, const float (&d)[128],
                                           u32 (&packed)[32], int column0, int expert) {
        const u16* src =
            bias_at(args.bias_down, expert, args.hidden, column0 + 2 * (threadIdx.x & 3));
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            float bias[2] = {};
            if constexpr (C::kBias2) {
#pragma unroll
                for (int z = 0; z < 2; ++z)
                    bias[z] = load_bias(src + 8 * j + z, column0 + 8 * j < args.hidden);
            }
            int i = kFirst + 4 * j;
            packed[2 * j] = Element::pack(d[i] + bias[0], d[i + 1] + bias[1]);
            packed[2 * j + 1] = Element::pack(d[i + 2] + bias[0], d[i + 3] + bias[1]);
        }
    }
};

}  // namespace moeflex
