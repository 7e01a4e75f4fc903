// Tiles of a layer on AMX, weights as the A operand: they are read where they lie, but for those at an edge (fewer than
// 16 rows, or no whole tiles along the sum), which are copied and padded.
//
// Rows of a row tile lie in *groups* of 16: [step][16] words, a word being two neighbouring bf16 of one row. So lie the
// staged x and `hidden`; what gate/up give (outputs down, tokens across) is a group of `hidden` as it comes.
#pragma once
#include "activation.h"
#include "gemm.h"

namespace moeflex {

// Words of two vectors of 16 rows: the even element in the low half.
inline VecF pair_words(VecF even, VecF odd) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)even));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)odd));
    return (VecF)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// 16 rows of n bf16 (n <= 32) at `rows`, `pitch` elements apart, as 16 steps of a group.
inline void group_words(const bf16* const* rows, long offset, long n, int num_rows, uint32_t* to) {
    VecF words[16];
    const __mmask32 mask = (__mmask32)((1ull << n) - 1);
#pragma GCC unroll 16
    for (int i = 0; i < kGroup; ++i)
        words[i] = i < num_rows ? (VecF)_mm512_maskz_loadu_epi16(mask, rows[i] + offset) : VecF{};
    transpose(words);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) store_as(to + i * kGroup, words[i]);
}

template <class Layer>
struct GroupWorker {
    typedef typename Layer::Config Config;
    static constexpr int kCols0 = Layer::kCols0, kCols1 = Layer::kCols1;
    static constexpr int kOut = 16;         // outputs of one tile
    static constexpr int kBlockTiles = 32;  // tiles of 16 weight rows that are copied at once

    Layer& layer;
    typename Layer::Scratch& s;
    Prefetch& ahead;

    static TileWeights weights(const MoeflexMatrix& m, long first, long limit) {
        TileWeights w;
        w.at = (const char*)((const bf16*)m.data + first * m.out_stride);
        w.row_bytes = m.out_stride * (long)sizeof(bf16);
        w.exist = limit - first < 0 ? 0 : limit - first < kOut ? (int)(limit - first) : kOut;
        return w;
    }

    // `finish(group, sums)` for every group of the tile and for each pair of 16 outputs in turn; `pair(i)` sets the
    // weights of pair i.
    template <class Pair, class Finish>
    void products(const Tile& t, const bf16* operand, long pitch, long ks, int num_pairs, Pair pair,
                  Finish finish) {
        const int rows = layer.view.tile_rows[t.row_tile], groups = (rows + kGroup - 1) / kGroup;
        const uint32_t* words = (const uint32_t*)operand;
        const long pitch_words = pitch / 2 * kGroup, bytes = ks * 2;  // from group to group
        ahead.spread((bytes + 63) / 64 * groups * 2 * num_pairs);
        configure_tiles(kGroup, kGroup);
        static_assert(sizeof(GroupSums) * (kTileRows / 32) <= sizeof(s.sums));
        static_assert(kBlockTiles * 2048 <= sizeof(s.panel));
        GroupSums* const sums = (GroupSums*)s.sums;
        for (int i = 0; i < num_pairs; ++i) {
            TileWeights two[2];
            pair(i, two);
            const bool in_place = two[0].exist == kOut && two[1].exist == kOut && bytes % 64 == 0;
            const long block = in_place ? bytes : kBlockTiles * 64;
            for (long first = 0; first < bytes; first += block) {
                const long last = bytes - first < block ? bytes : first + block;
                TileSource sources[2];
                for (int j = 0; j < 2; ++j) {
                    char* copied = (char*)s.panel + j * kBlockTiles * 1024;
                    if (!in_place) two[j].copy(first, last, copied);
                    sources[j] = in_place ? TileSource{two[j].at, two[j].row_bytes, 64}
                                          : TileSource{copied, 64, 1024};
                }
                for (int g = 0; g < groups; g += 2) {
                    const uint32_t* at = words + g * pitch_words + first / 4 * kGroup;
                    const long num_tiles = (last - first + 63) / 64;
                    if (g + 1 < groups)
                        multiply_groups<true>(sources[0], sources[1], at, at + pitch_words,
                                              num_tiles, sums[g / 2], first > 0, ahead);
                    else
                        multiply_groups<false>(sources[0], sources[1], at, nullptr, num_tiles,
                                               sums[g / 2], first > 0, ahead);
                }
            }
            for (int g = 0; g < groups; ++g)
                finish(i, g, sums[g / 2].sums[0][g % 2], sums[g / 2].sums[1][g % 2]);
        }
        _tile_release();
    }

    void gemm0(const Tile& t) {
        const MoeflexArgs& a = layer.args;
        const long first = (long)t.col * kCols0, I = layer.I;
        const long row0 = layer.view.tile_row[t.row_tile], base = layer.base_of_tile(t.row_tile);
        const int rows = layer.view.tile_rows[t.row_tile];
        constexpr int kStep = Config::gated ? kOut : 2 * kOut;  // outputs of one pair
        auto pair = [&](int i, TileWeights* two) {
            const long at = first + i * kStep;
            two[0] = weights(a.gate[t.expert], at, I);
            two[1] = Config::gated ? weights(a.up[t.expert], at, I)
                                   : weights(a.gate[t.expert], at + kOut, I);
        };
        auto finish = [&](int i, int group, const float (*left)[kGroup],
                          const float (*right)[kGroup]) {
            uint32_t* out = (uint32_t*)(layer.hidden + (base + group * kGroup) * layer.pitch_i);
            VecF weight = VecF{};
            if (Config::position == WeightPosition::hidden)
                for (int m = 0; m < kGroup && group * kGroup + m < rows; ++m)
                    weight[m] = (float)layer.weight_of_row(row0 + group * kGroup + m);
            const long at = first + i * kStep;
            if constexpr (Config::gated) {
                hidden_words(left, right, i * kOut, at, weight, out);
            } else {
                hidden_words(left, left, i * kStep, at, weight, out);
                hidden_words(right, right, i * kStep + kOut, at + kOut, weight, out);
            }
        };
        products(t, layer.groups + base * layer.pitch_h, layer.pitch_h, layer.H, kCols0 / kStep,
                 pair, finish);
    }

    // 16 outputs of gate (and up) for 16 tokens become 8 steps of a group of `hidden`; `lane` is theirs in the bias.
    void hidden_words(const float (*gate)[kGroup], const float (*up)[kGroup], int lane, long first,
                      VecF weight, uint32_t* out) {
        for (int o = 0; o < kOut; o += 2) {
            VecF two[2];
            for (int j = 0; j < 2; ++j)
                two[j] = first + o + j < layer.I
                             ? hidden(load(gate[o + j]), load(up[o + j]), lane + o + j, weight)
                             : VecF{};
            if (first + o < layer.pitch_i)
                store_as(out + (first + o) / 2 * kGroup, pair_words(two[0], two[1]));
        }
    }

    VecF hidden(VecF gate, VecF up, int lane, VecF weight) {
        if (layer.args.gate_bias) gate = gate + s.bias[lane];
        if (Config::gated && layer.args.up_bias) up = up + s.bias[kCols0 + lane];
        return hidden_of<Config>(gate, up, weight);
    }

    void gemm1(const Tile& t) {
        const long first = (long)t.col * kCols1, H = layer.H;
        const long row0 = layer.view.tile_row[t.row_tile], base = layer.base_of_tile(t.row_tile);
        const int rows = layer.view.tile_rows[t.row_tile];
        const MoeflexMatrix& down = layer.args.down[t.expert];
        auto pair = [&](int i, TileWeights* two) {
            for (int j = 0; j < 2; ++j) two[j] = weights(down, first + (2 * i + j) * kOut, H);
        };
        auto finish = [&](int i, int group, const float (*left)[kGroup],
                          const float (*right)[kGroup]) {
            const float (*sides[2])[kGroup] = {left, right};
            for (int j = 0; j < 2; ++j) {
                const int lane = (2 * i + j) * kOut;
                const long left_over = H - first - lane;
                if (left_over <= 0) return;
                VecF outputs[kOut];
                for (int o = 0; o < kOut; ++o) outputs[o] = load(sides[j][o]);
                transpose(outputs);
                const VecF bias = layer.args.down_bias ? load(s.bias + lane) : VecF{};
                for (int m = 0; m < kGroup && group * kGroup + m < rows; ++m) {
                    VecF value = outputs[m];
                    if (layer.args.down_bias) value = value + bias;
                    value = gemm_result<Config, typename Config::W2>(value);
                    float* out = layer.result_of_row(row0 + group * kGroup + m) + first + lane;
                    if (left_over >= kLanes)
                        store(out, value);
                    else
                        store_first(out, value, left_over);
                }
            }
        };
        products(t, layer.hidden + base * layer.pitch_i, layer.pitch_i, layer.I,
                 kCols1 / (2 * kOut), pair, finish);
    }
};

}  // namespace moeflex
