// One MoE layer on CPU threads, driven by scheduler.h: sort the routes, gate/up and activation, down, weighted sum.
//
// Threads stand in the place of SMs: each claims tiles in order and waits on counters.
#pragma once
#include <sched.h>
#include <cerrno>

#include "worker.h"

namespace moeflex {

struct ThreadMem {
    int claim(int* p) { return __atomic_fetch_add(p, 1, __ATOMIC_RELAXED); }
    bool wait_at_least(const int* p, int need) {
        for (int spins = 0; __atomic_load_n(p, __ATOMIC_ACQUIRE) < need; ++spins) {
            if (spins > 256) sched_yield();
#if MOEFLEX_ISA > 0
            else
                _mm_pause();
#endif
        }
        return true;
    }
    void release_add(int* p, int v) { __atomic_fetch_add(p, v, __ATOMIC_RELEASE); }
};

template <class Config>
struct Layer : LayerBase<Config> {
    typedef LayerBase<Config> Base;
    typedef typename Base::Kind Kind;
    typedef typename Base::Element Element;
    typedef typename Base::Sum Sum;
    typedef typename Base::Scratch Scratch;
    using Base::args, Base::view, Base::by_route, Base::pitch_h, Base::H, Base::E;

    int* row_of_route = nullptr;  // [T*K], -1 where the id is invalid
    int* route_of_row = nullptr;  // [rows]
    Sum* weights = nullptr;       // [T*K]
    // x where it cannot be read in place: [T] rows, or one a route (position input), or groups; or null
    Element* staged = nullptr;
    int* tile_of_group = nullptr;
    Sum* parts = nullptr;  // [T*K][H], by route

    explicit Layer(const MoeflexArgs& a) : Base(a, a.num_tokens) {}

    // Weights can be read where they lie if their elements along the sum are contiguous.
    bool can_group() const {
        if (!Kind::kHasTiles || args.num_tokens <= args.direct_rows) return false;
        for (long e = 0; e < E; ++e)
            if (args.gate[e].in_stride != 1 || args.down[e].in_stride != 1 ||
                (Base::Config::gated && args.up[e].in_stride != 1))
                return false;
        return true;
    }

    // Rows of x are read in place unless they must be converted, weighted or padded to whole words, or lie one behind
    // the other for the tiles.
    bool must_stage() const {
        return by_route || !Config::x_is_element || args.x_hidden_stride != 1 ||
               H % Kind::kPair != 0;
    }

    // ---- prologue: counting sort of the routes, by expert, then by route
    void sort_routes(const Problem& problem, const PlanArrays& arrays, int* counts) {
        const long K = args.top_k, routes = args.num_tokens * K;
        for (long e = 0; e < E; ++e) counts[e] = 0;
        for (long t = 0, r = 0; t < args.num_tokens; ++t)
            for (long k = 0; k < K; ++k, ++r) {
                const long id = id_at(args, t, k);
                const bool valid = id >= 0 && id < E;
                row_of_route[r] = valid ? (int)id : -1;
                if (valid) ++counts[id];
                weights[r] =
                    float_at<Sum>(args.weights, args.weights_dtype,
                                  t * args.weights_token_stride + k * args.weights_slot_stride);
            }
        view.plan = build_plan(problem, counts, arrays, 0, 1);
        for (long e = 0; e < E; ++e) counts[e] = arrays.expert_row[e];
        for (long r = 0; r < routes; ++r)
            if (row_of_route[r] >= 0) {
                const int row = counts[row_of_route[r]]++;
                row_of_route[r] = row;
                route_of_row[row] = (int)r;
            }
    }

    void stage_row(long row) {
        const long route = by_route ? route_of_row[row] : 0,
                   token = by_route ? route / args.top_k : row;
        this->stage((const typename Config::X*)args.x + token * args.x_token_stride,
                    args.x_hidden_stride, Base::kInput ? weights[route] : Sum(1),
                    staged + row * pitch_h);
    }

#if MOEFLEX_ISA >= 4
    // Numbers the groups, row tile by row tile; how many there are.
    long number_groups(int* first_group) {
        int next = 0;
        for (int t = 0; t < view.plan.num_row_tiles; ++t) {
            first_group[t] = next;
            const int count = (view.tile_rows[t] + kGroup - 1) / kGroup;
            for (int g = 0; g < count; ++g) tile_of_group[next++] = t;
        }
        this->group_of_tile = first_group;
        return next;
    }

    void stage_group(long group) {
        if constexpr (Kind::kHasTiles) {
            typedef typename Config::X X;
            const int t = tile_of_group[group];
            const long in_tile = (group - this->group_of_tile[t]) * kGroup,
                       row0 = view.tile_row[t] + in_tile;
            const int rows = min_int(kGroup, view.tile_rows[t] - (int)in_tile);
            const X* from[kGroup];
            Sum weight[kGroup];
            for (int m = 0; m < rows; ++m) {
                const long route = route_of_row[row0 + m];
                from[m] = (const X*)args.x + route / args.top_k * args.x_token_stride;
                weight[m] = Base::kInput ? weights[route] : Sum(1);
            }
            Element* to = this->groups + group * kGroup * pitch_h;
            if (view.tile_rows[t] <= args.direct_rows) {
                for (int m = 0; m < rows; ++m)
                    this->stage(from[m], args.x_hidden_stride, weight[m], to + m * pitch_h);
                return;
            }
            const bool in_place =
                Config::x_is_element && !Base::kInput && args.x_hidden_stride == 1;
            for (long h = 0; h < H; h += 32) {
                const long n = H - h < 32 ? H - h : 32;
                uint32_t* words = (uint32_t*)to + h / 2 * kGroup;
                if (in_place) {
                    group_words((const bf16* const*)from, h, n, rows, words);
                } else {
                    bf16 part[kGroup][32];
                    const bf16* at[kGroup];
                    for (int m = 0; m < rows; ++m) {
                        this->stage_part(from[m], args.x_hidden_stride, weight[m], h, n,
                                         (Element*)part[m]);
                        at[m] = part[m];
                    }
                    group_words(at, 0, n, rows, words);
                }
            }
        }
    }
#endif

    const Element* row_of_x(long row) const {
        if (by_route) return staged + row * pitch_h;
        const long token = route_of_row[row] / args.top_k;
        return staged ? staged + token * pitch_h
                      : (const Element*)args.x + token * args.x_token_stride;
    }
    Sum weight_of_row(long row) const { return weights[route_of_row[row]]; }
    Sum* result_of_row(long row) const { return parts + (long)route_of_row[row] * H; }
    const Sum* part_of_route(long route) const {
        return row_of_route[route] < 0 ? nullptr : parts + route * H;
    }
    Sum weight_of_route(long route) const { return weights[route]; }

    // ---- drive
    struct Context {
        Layer* layer;
        long count;  // rows or groups to stage
        int claim;   // next block of them
    };

    static void stage_body(int, void* context) {
        Context& c = *(Context*)context;
        constexpr long kBlock = 8;
        for (;;) {
            const long first = __atomic_fetch_add(&c.claim, 1, __ATOMIC_RELAXED) * kBlock;
            if (first >= c.count) return;
            for (long row = first; row < first + kBlock && row < c.count; ++row) {
#if MOEFLEX_ISA >= 4
                if (c.layer->groups) {
                    c.layer->stage_group(row);
                    continue;
                }
#endif
                c.layer->stage_row(row);
            }
        }
    }

    static void work_body(int worker, void* context) {
        Layer& layer = *((Context*)context)->layer;
        ThreadMem mem;
        Worker<Layer> ops(layer, *(Scratch*)(layer.scratch + worker * sizeof(Scratch)));
        work_loop(layer.view, layer.counters, mem, ops);
    }

    static int run(const MoeflexArgs& args) {
        if (args.num_tokens == 0) return 0;
#if MOEFLEX_ISA >= 4
        if (Kind::kHasTiles && !tiles_permitted()) return EOPNOTSUPP;
#endif
        Layer layer(args);
        const long H = layer.H, E = layer.E, routes = args.num_tokens * args.top_k;
        if (!layer.fits(routes)) return E2BIG;
        Problem p = layer.problem(args.num_tokens, args.top_k);
        p.combine_tokens = kCombineTokens;
        const bool grouped = layer.can_group(), stage = grouped || layer.must_stage();
        const long tiles = max_row_tiles(p), max_groups = routes / kGroup + tiles,
                   rows = grouped ? max_groups * kGroup : routes,
                   staged_rows = layer.by_route ? rows : args.num_tokens;
        // One allocation, cut into 64-byte aligned arrays.
        size_t bytes = 0;
        auto reserve = [&](size_t n) {
            const size_t at = bytes;
            bytes += (n + 63) / 64 * 64;
            return at;
        };
        const size_t ints =
            reserve(sizeof(int) * (E + 4 * tiles + 2 * (E + 1) + 2 * routes + 2 * tiles + 32 +
                                   (grouped ? tiles + max_groups : 0)));
        const size_t at_weights = reserve(sizeof(Sum) * routes);
        const size_t at_staged = reserve(stage ? sizeof(Element) * staged_rows * layer.pitch_h : 0);
        const size_t at_hidden = reserve(sizeof(Element) * rows * layer.pitch_i);
        const size_t at_parts = reserve(sizeof(Sum) * routes * H);
        const size_t at_scratch = reserve(sizeof(Scratch) * args.num_threads);
        char* memory = (char*)args.acquire(bytes);
        if (!memory) return ENOMEM;

        int* next = (int*)(memory + ints);
        auto take = [&](long n) {
            int* at = next;
            next += n;
            return at;
        };
        layer.counters.claim = take(16);  // a cache line of its own
        layer.counters.all_done = take(16);
        layer.counters.gemm0_done = take(tiles);
        layer.counters.gemm1_done = layer.counters.ready = nullptr;
        std::memset(layer.counters.claim, 0, sizeof(int) * (32 + tiles));
        int* counts = take(E);
        PlanArrays arrays = {take(tiles), take(tiles), take(tiles),
                             take(tiles), take(E + 1), take(E + 1)};
        layer.row_of_route = take(routes);
        layer.route_of_row = take(routes);
        layer.weights = (Sum*)(memory + at_weights);
        layer.staged = stage ? (Element*)(memory + at_staged) : nullptr;
        layer.hidden = (Element*)(memory + at_hidden);
        layer.parts = (Sum*)(memory + at_parts);
        layer.scratch = memory + at_scratch;
        layer.view = {{},
                      arrays.tile_expert,
                      arrays.tile_row,
                      arrays.tile_rows,
                      arrays.tile_height,
                      arrays.expert_tile};
        layer.sort_routes(p, arrays, counts);

        Context context{&layer, layer.by_route ? layer.view.plan.num_rows : args.num_tokens, 0};
#if MOEFLEX_ISA >= 4
        if (grouped) {
            layer.groups = layer.staged;
            int* first_group = take(tiles);
            layer.tile_of_group = take(max_groups);
            context.count = layer.number_groups(first_group);
        }
#endif
        if (stage)
            args.parallel(min_int(args.num_threads, (int)((context.count + 7) / 8)), stage_body,
                          &context);
        args.parallel(min_int(args.num_threads, layer.view.plan.num_tiles), work_body, &context);
        args.release(memory);
        return 0;
    }
};

}  // namespace moeflex
