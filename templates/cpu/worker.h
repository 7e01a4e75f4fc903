// The tiles of a MoE layer on a CPU thread: gate/up and activation, down, weighted sum.
//
// Every sum has a fixed order (steps in order inside a chain, routes in the order of k), so two runs give equal bytes
// for any number of threads. Experts with up to args.direct_rows rows take the direct form (weights streamed once,
// nothing copied); the panel form gives a token the same bytes in every batch.
#pragma once
#include "../scheduler.h"
#include "activation.h"
#include "gemm.h"
#if MOEFLEX_ISA >= 4
#include "groups.h"
#endif

namespace moeflex {

constexpr int kCombineTokens = 8;

inline long id_at(const MoeflexArgs& a, long token, long slot) {
    const long i = token * a.ids_token_stride + slot * a.ids_slot_stride;
    switch (a.ids_bytes * 2 + (a.ids_signed != 0)) {
        case 17: return ((const int64_t*)a.ids)[i];
        case 16: {
            const uint64_t v = ((const uint64_t*)a.ids)[i];
            return v > INT64_MAX ? -1 : (long)v;
        }
        case 9: return ((const int32_t*)a.ids)[i];
        case 8: return ((const uint32_t*)a.ids)[i];
        case 5: return ((const int16_t*)a.ids)[i];
        case 4: return ((const uint16_t*)a.ids)[i];
        case 3: return ((const int8_t*)a.ids)[i];
        default: return ((const uint8_t*)a.ids)[i];
    }
}

template <class To>
inline To float_at(const void* p, int dtype, long i) {
    switch (dtype) {
        case kMoeflexBf16: return to_float(((const bf16*)p)[i]);
        case kMoeflexFp16: return to_float(((const fp16*)p)[i]);
        case kMoeflexFp32: return ((const float*)p)[i];
        default: return (To)((const double*)p)[i];
    }
}

// Steps over n elements in vectors of fp32, or one by one in fp64.
inline constexpr int step_of(float) {
    return kLanes;
}
inline constexpr int step_of(double) {
    return 1;
}
inline VecF read(const float* p) {
    return load(p);
}
inline double read(const double* p) {
    return *p;
}

template <class T>
inline void write(T* p, VecF v, long n) {
    if (n >= kLanes)
        store(p, v);
    else
        store_first(p, v, n);
}
template <class T>
inline void write(T* p, double v, long) {
    convert(&v, p, 1);
}

// What the layers of one rank and of several have in common.
template <class ConfigType>
struct LayerBase {
    typedef ConfigType Config;
    typedef typename Config::Kind Kind;
    typedef typename Kind::Element Element;
    typedef typename Kind::Word Word;
    typedef typename Kind::Sum Sum;
    static constexpr int kCols0 = Config::gated ? kPanelLanes / 2 : kPanelLanes,
                         kCols1 = kPanelLanes;
    static constexpr bool kInput = Config::position == WeightPosition::input;

    const MoeflexArgs& args;
    const long H, I, E;
    const long pitch_h, pitch_i;  // elements from row to row of staged x and of `hidden`
    const bool by_route;          // x is staged one row a route, sorted by expert
    PlanView view = {};
    Counters counters = {};
    Element* hidden = nullptr;  // [rows][pitch_i]
    // Where the layer is in groups (see groups.h), a row tile begins with a group of its own, here and in `hidden`; a
    // tile in the direct form has its rows one behind the other there.
    Element* groups = nullptr;           // x, or null: not in groups
    const int* group_of_tile = nullptr;  // first group of a row tile
    char* scratch = nullptr;             // one a worker

    struct Scratch {
        alignas(64) Word panel[(long)kPanelLanes * kMaxSteps];
        alignas(64) Sum sums[(long)kTileRows * kPanelLanes];
        alignas(64) Sum bias[kPanelLanes];
        const Element* rows[kTileRows];
    };

    LayerBase(const MoeflexArgs& a, long num_tokens)
        : args(a),
          H(a.hidden),
          I(a.intermediate),
          E(a.num_experts),
          pitch_h((H + 63) / 64 * 64),
          pitch_i((I + 63) / 64 * 64),
          by_route(kInput || (Kind::kHasTiles && num_tokens > a.direct_rows)) {}

    Problem problem(long num_tokens, long top_k) const {
        Problem p = {};
        p.num_tokens = (int)num_tokens;
        p.top_k = (int)top_k;
        p.num_experts = (int)E;
        p.hidden = (int)H;
        p.intermediate = (int)I;
        p.num_heights = 1;
        p.heights[0] = kTileRows;
        p.row_align = 1;
        p.gemm0_cols = kCols0;
        p.gemm1_cols = kCols1;
        p.arrivals = 1;
        p.world = 1;
        p.num_blocks = args.num_threads;
        return p;
    }
    // First row of a row tile in `hidden` (and in `groups`).
    long base_of_tile(int row_tile) const {
        return groups ? (long)group_of_tile[row_tile] * kGroup : view.tile_row[row_tile];
    }
    // Whether sequence numbers of so many rows fit.
    bool fits(long rows) const {
        return rows <= (1l << 29) &&
               rows * ((I + kCols0 - 1) / kCols0 + (H + kCols1 - 1) / kCols1) <= (1l << 30);
    }

    // One row of x as the products read it, times `weight` where weights enter there.
    void stage(const typename Config::X* from, long stride, Sum weight, Element* to) const {
        stage_part(from, stride, weight, 0, H, to);
        if (H % Kind::kPair) std::memset(to + H, 0, sizeof(Element));
    }

    // Its elements [h, h + num).
    void stage_part(const typename Config::X* from, long stride, Sum weight, long h, long num,
                    Element* to) const {
        if (stride == 1 && !kInput) {
            convert(from + h, to, num);
            return;
        }
        for (long done = 0; done < num; done += 64) {
            Sum part[64];
            const long n = num - done < 64 ? num - done : 64;
            for (long j = 0; j < n; ++j)
                part[j] = to_float(from[(h + done + j) * stride]) * (kInput ? weight : Sum(1));
            convert(part, to + done, n);
        }
    }
};

// Runs tiles of `Layer`, a LayerBase with: row_of_x(row), weight_of_row(row), result_of_row(row) -> where gemm1 writes
// [H]; and of a route of this rank's own tokens: part_of_route(route) -> [H], null where the id is invalid, and
// weight_of_route(route).
template <class Layer>
struct Worker {
    typedef typename Layer::Config Config;
    typedef typename Layer::Kind Kind;
    typedef typename Layer::Element Element;
    typedef typename Layer::Sum Sum;
    typedef typename Layer::Scratch Scratch;
    static constexpr int kCols0 = Layer::kCols0, kCols1 = Layer::kCols1;

    Layer& layer;
    Scratch& s;
    const long H, I;
    Prefetch ahead = {};

    Worker(Layer& l, Scratch& scratch) : layer(l), s(scratch), H(l.H), I(l.I) {}

    bool direct(const MoeflexMatrix& m, int rows) const {
        return Kind::kHasDirect && m.in_stride == 1 && rows <= layer.args.direct_rows;
    }

    // The tile by way of groups; false where it is not in groups.
    template <int kStage>
    bool in_groups(const Tile& t) {
#if MOEFLEX_ISA >= 4
        if constexpr (Kind::kHasTiles) {
            if (!layer.groups || layer.view.tile_rows[t.row_tile] <= layer.args.direct_rows)
                return false;
            GroupWorker<Layer> ops{layer, s, ahead};
            if constexpr (kStage == kGemm0)
                ops.gemm0(t);
            else
                ops.gemm1(t);
            return true;
        }
#endif
        return false;
    }

    static Walk walk(const MoeflexMatrix& m, size_t size, long first, long cols, long ks) {
        Walk w;
        const bool rows_are_outputs = m.in_stride == 1;
        w.line = (const char*)m.data + first * m.out_stride * (long)size;
        w.row_bytes = (rows_are_outputs ? m.out_stride : m.in_stride) * (long)size;
        w.rows = (int)(rows_are_outputs ? cols : ks);
        w.lines_per_row = (int)(((rows_are_outputs ? ks : cols) * (long)size + 63) / 64);
        if (!rows_are_outputs && m.out_stride != 1) w.rows = 0;
        return w;
    }

    void prefetch(const Tile& t) {
        const MoeflexArgs& a = layer.args;
        ahead = Prefetch{};
        if (t.stage == kGemm0) {
            const long first = (long)t.col * kCols0, cols = min_int(kCols0, (int)(I - first));
            ahead.walks[0] = walk(a.gate[t.expert], sizeof(typename Config::W13), first, cols, H);
            if (Config::gated)
                ahead.walks[1] = walk(a.up[t.expert], sizeof(typename Config::W13), first, cols, H);
        } else if (t.stage == kGemm1) {
            const long first = (long)t.col * kCols1, cols = min_int(kCols1, (int)(H - first));
            ahead.walks[0] = walk(a.down[t.expert], sizeof(typename Config::W2), first, cols, I);
        }
    }

    void run(const Tile& t) {
        if (t.stage == kGemm0)
            gemm0(t);
        else if (t.stage == kGemm1)
            gemm1(t);
        else
            combine(t);
    }

    // Spread what is left of `ahead` over the register tiles of the direct form.
    void pace_direct(int rows, long ks) {
        constexpr long kDot = Kind::kVecLanes * Kind::kPair;
        ahead.spread((long)Groups(rows).num * (kPanelLanes / kDotCols) * ((ks + kDot - 1) / kDot));
    }

    template <class Pack>
    void through_panels(int rows, long ks, Pack pack) {
        ahead.spread(num_stretches<Kind>(rows, (ks + Kind::kPair - 1) / Kind::kPair));
        const long block = (long)kMaxSteps * Kind::kPair;
        for (long k = 0; k < ks; k += block) {
            const long n = ks - k < block ? ks - k : block;
            pack(k, n);
            multiply_panel<Kind>(s.rows, rows, k / Kind::kPair, s.panel,
                                 (n + Kind::kPair - 1) / Kind::kPair, s.sums, k > 0, ahead);
        }
    }

    void load_bias(const MoeflexMatrix* bias, int dtype, int expert, long first, long limit,
                   int lane, int lanes) {
        if (!bias) return;
        const MoeflexMatrix& b = bias[expert];
        for (int j = 0; j < lanes; ++j)
            s.bias[lane + j] = first + j < limit
                                   ? float_at<Sum>(b.data, dtype, (first + j) * b.out_stride)
                                   : Sum(0);
    }

    void gemm0(const Tile& t) {
        typedef typename Config::W13 T;
        const MoeflexArgs& a = layer.args;
        const int rows = layer.view.tile_rows[t.row_tile];
        const long row0 = layer.view.tile_row[t.row_tile], first = (long)t.col * kCols0,
                   base = layer.base_of_tile(t.row_tile);
        load_bias(a.gate_bias, a.bias13_dtype, t.expert, first, I, 0, kCols0);
        if constexpr (Config::gated)
            load_bias(a.up_bias, a.bias13_dtype, t.expert, first, I, kCols0, kCols0);
        if (in_groups<kGemm0>(t)) return;
        for (int m = 0; m < rows; ++m)
            s.rows[m] =
                layer.groups ? layer.groups + (base + m) * layer.pitch_h : layer.row_of_x(row0 + m);
        const MoeflexMatrix& gate = a.gate[t.expert];
        // Gate and up that alternate along a contiguous axis are read as one stripe and come out alternating.
        bool alternate = false;
        MoeflexMatrix stripe = gate;
        if constexpr (Config::gated) {
            alternate = a.up_interleaved && gate.in_stride != 1 && gate.out_stride == 2;
            if (alternate) {
                stripe.data = a.up_interleaved > 0 ? gate.data : a.up[t.expert].data;
                stripe.out_stride = 1;
            }
        }
        if (direct(gate, rows)) {
            if constexpr (Kind::kHasDirect) {
                pace_direct(rows, H);
                multiply_direct<Kind, T>(s.rows, rows, gate, first, I, H, s.sums, 0, kCols0, ahead);
                if constexpr (Config::gated)
                    multiply_direct<Kind, T>(s.rows, rows, a.up[t.expert], first, I, H, s.sums,
                                             kCols0, kCols0, ahead);
            }
        } else {
            through_panels(rows, H, [&](long k, long n) {
                if (alternate) {
                    pack_lanes<Kind, T>(stripe, 2 * first, 2 * I, k, n, s.panel, 0, kPanelLanes);
                } else {
                    pack_lanes<Kind, T>(gate, first, I, k, n, s.panel, 0, kCols0);
                    if constexpr (Config::gated)
                        pack_lanes<Kind, T>(a.up[t.expert], first, I, k, n, s.panel, kCols0,
                                            kCols0);
                }
            });
        }
        const long cols = I - first < kCols0 ? I - first : kCols0;
        for (int m = 0; m < rows; ++m) {
            Sum* sums = s.sums + (long)m * kPanelLanes;
            if (alternate) split_pairs(sums, a.up_interleaved < 0);
            Element* out = layer.hidden + (base + m) * layer.pitch_i;
            finish_hidden(sums, cols, out + first, layer.weight_of_row(row0 + m));
            if (I % Kind::kPair && first + cols == I) std::memset(out + I, 0, sizeof(Element));
        }
    }

    static void split_pairs(Sum* sums, bool up_first) {
        Sum both[kPanelLanes];
        std::memcpy(both, sums, sizeof both);
        for (int j = 0; j < kPanelLanes / 2; ++j) {
            sums[j] = both[2 * j + up_first];
            sums[kPanelLanes / 2 + j] = both[2 * j + !up_first];
        }
    }

    void finish_hidden(const Sum* sums, long cols, Element* out, Sum weight) {
        constexpr int kStep = step_of(Sum());
        for (long j = 0; j < cols; j += kStep) {
            auto value = read(sums + j);
            if (layer.args.gate_bias) value = value + read(s.bias + j);
            auto up = value;
            if constexpr (Config::gated) {
                up = read(sums + kCols0 + j);
                if (layer.args.up_bias) up = up + read(s.bias + kCols0 + j);
            }
            write(out + j, hidden_of<Config>(value, up, weight), cols - j);
        }
    }

    void gemm1(const Tile& t) {
        typedef typename Config::W2 T;
        const MoeflexArgs& a = layer.args;
        const int rows = layer.view.tile_rows[t.row_tile];
        const long row0 = layer.view.tile_row[t.row_tile], first = (long)t.col * kCols1,
                   base = layer.base_of_tile(t.row_tile);
        load_bias(a.down_bias, a.bias2_dtype, t.expert, first, H, 0, kCols1);
        if (in_groups<kGemm1>(t)) return;
        for (int m = 0; m < rows; ++m) s.rows[m] = layer.hidden + (base + m) * layer.pitch_i;
        const MoeflexMatrix& down = a.down[t.expert];
        if (direct(down, rows)) {
            if constexpr (Kind::kHasDirect) {
                pace_direct(rows, I);
                multiply_direct<Kind, T>(s.rows, rows, down, first, H, I, s.sums, 0, kCols1, ahead);
            }
        } else {
            through_panels(rows, I, [&](long k, long n) {
                pack_lanes<Kind, T>(down, first, H, k, n, s.panel, 0, kCols1);
            });
        }
        const long cols = H - first < kCols1 ? H - first : kCols1;
        constexpr int kStep = step_of(Sum());
        for (int m = 0; m < rows; ++m) {
            const Sum* sums = s.sums + (long)m * kPanelLanes;
            Sum* out = layer.result_of_row(row0 + m) + first;
            for (long j = 0; j < cols; j += kStep) {
                auto value = read(sums + j);
                if (a.down_bias) value = value + read(s.bias + j);
                write(out + j, gemm_result<Config, T>(value), cols - j);
            }
        }
    }

    void combine(const Tile& t) {
        const long first = (long)t.col * kCombineTokens, num_tokens = layer.args.num_tokens;
        for (long token = first; token < first + kCombineTokens && token < num_tokens; ++token)
            reduce((int)token);
    }

    // The weighted sum over k in order.
    void reduce(int token) {
        const MoeflexArgs& a = layer.args;
        auto* out = (typename Config::Out*)a.out + token * H;
        constexpr int kStep = step_of(Sum());
        for (long h = 0; h < H; h += kStep) {
            auto total = zero(read(s.sums));
            bool none = true;
            for (long k = 0; k < a.top_k; ++k) {
                const long route = token * a.top_k + k;
                const Sum* part = layer.part_of_route(route);
                if (!part) continue;
                part += h;
                auto value = H - h >= kStep ? read(part) : read_tail(part, H - h);
                if (Config::position == WeightPosition::output)
                    value = value * layer.weight_of_route(route);
                total = none ? value : total + value;
                none = false;
            }
            write(out + h, total, H - h);
        }
    }

    static VecF read_tail(const float* p, long n) { return load_first(p, n); }
    static double read_tail(const double* p, long) { return *p; }
    static VecF zero(VecF) { return VecF{}; }
    static double zero(double) { return 0; }
};

}  // namespace moeflex
