// Runs whole MoE layers on 1 to R ranks with std::thread blocks and the control loops of scheduler.h.
//
// What runs on a GPU can be run on paper: the roles (load, math, comm), counters and order are those of the kernel; only
// the arithmetic is plain fp32. Scratch starts as NaN, so that a read before its write shows. Built as a shared library
// for the tests, or with -DMOEFLEX_EMULATOR_MAIN as a program for ThreadSanitizer. MOEFLEX_BUG_RELEASE and
// MOEFLEX_BUG_ORDER seed the two faults that the tests must catch.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "scheduler.h"

using namespace moeflex;

namespace {

thread_local std::minstd_rand jitter_rng(1);
std::atomic<bool> jitter_on{false};

void jitter() {
    if (jitter_on.load(std::memory_order_relaxed) && jitter_rng() % 3 == 0)
        std::this_thread::yield();
}

struct EmulatorMem {
    int claim(int* p) {
        jitter();
        return __atomic_fetch_add(p, 1, __ATOMIC_RELAXED);
    }
    void wait_at_least(const int* p, int need) {
        while (__atomic_load_n(p, __ATOMIC_ACQUIRE) < need) std::this_thread::yield();
    }
    void release_add(int* p, int v) {
        jitter();
#ifdef MOEFLEX_BUG_RELEASE
        __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
#else
        __atomic_fetch_add(p, v, __ATOMIC_RELEASE);
#endif
    }
    void proxy_fence() {}
};

// One producer, one consumer, four slots.
struct EmulatorRing {
    std::atomic<int> head{0}, tail{0};
    int slot[4];
    void push(int seq) {
        const int h = head.load(std::memory_order_relaxed);
        while (h - tail.load(std::memory_order_acquire) >= 4) std::this_thread::yield();
        slot[h & 3] = seq;
        head.store(h + 1, std::memory_order_release);
    }
    int pop() {
        const int t = tail.load(std::memory_order_relaxed);
        while (head.load(std::memory_order_acquire) == t) std::this_thread::yield();
        const int seq = slot[t & 3];
        tail.store(t + 1, std::memory_order_release);
        return seq;
    }
};

struct Rank {
    Problem problem;
    const float* x;        // [T, H]
    const int* ids;        // [T, K], global expert ids
    const float* weights;  // [T, K]
    const float* w13;      // [E, 2I, H]
    const float* w2;       // [E, H, I]
    float* out;            // [T, H]
    std::vector<float> sorted, hidden, result, home;
    std::vector<int> counts, source, arrays, counters, home_counters;
    PlanView view;
    Counters k;
    int expert0() const { return problem.rank * problem.num_experts; }
};

struct Math {
    std::vector<Rank>& ranks;
    Rank& r;
    EmulatorRing* loaded;  // from the load role; null where one thread does both
    void prefetch(const Tile&) {}
    void run(const Tile& t) {
        if (loaded && loaded->pop() != t.row_tile) std::abort();
#ifdef MOEFLEX_BUG_ORDER
        if (t.stage == kGemm0)
            EmulatorMem().release_add(r.k.gemm0_done + t.row_tile,
                                      1);  // published before it is written
#endif
        if (t.stage == kGemm0)
            gemm0(t);
        else if (t.stage == kGemm1)
            gemm1(t);
        else
            combine(t);
    }
    void gemm0(const Tile& t) {
        const Problem& p = r.problem;
        const int H = p.hidden, I = p.intermediate, row0 = r.view.tile_row[t.row_tile];
        for (int m = row0; m < row0 + r.view.tile_rows[t.row_tile]; ++m) {
            const float* x = row(m);
            for (int n = t.col * p.gemm0_cols; n < min_int((t.col + 1) * p.gemm0_cols, I); ++n) {
                float gate = 0, up = 0;
                const float* wg = r.w13 + ((size_t)t.expert * 2 * I + n) * H;
                const float* wu = wg + (size_t)I * H;
                for (int h = 0; h < H; ++h) {
                    gate += x[h] * wg[h];
                    up += x[h] * wu[h];
                }
                r.hidden[(size_t)m * I + n] = gate / (1 + std::exp(-gate)) * up;
            }
        }
    }
    // Without comm blocks the load role gathers the row from the token itself (one rank).
    const float* row(int m) const {
        const Problem& p = r.problem;
        if (p.num_comm_blocks > 0) return &r.sorted[(size_t)m * p.hidden];
        return r.x + (size_t)(r.source[m] / p.top_k) * p.hidden;
    }
    void gemm1(const Tile& t) {
        const Problem& p = r.problem;
        const int H = p.hidden, I = p.intermediate, row0 = r.view.tile_row[t.row_tile];
        for (int m = row0; m < row0 + r.view.tile_rows[t.row_tile]; ++m)
            for (int n = t.col * p.gemm1_cols; n < min_int((t.col + 1) * p.gemm1_cols, H); ++n) {
                float sum = 0;
                const float* w = r.w2 + ((size_t)t.expert * H + n) * I;
                for (int i = 0; i < I; ++i) sum += r.hidden[(size_t)m * I + i] * w[i];
                r.result[(size_t)m * H + n] = sum;
                if (p.num_comm_blocks == 0) r.home[(size_t)r.source[m] * H + n] = sum;
            }
    }
    void combine(const Tile& t) {
        const Problem& p = r.problem;
        for (int token = t.col * p.combine_tokens;
             token < min_int((t.col + 1) * p.combine_tokens, p.num_tokens); ++token)
            reduce(token);
    }
    bool is_valid(int id) const { return id >= 0 && id < r.problem.num_experts * r.problem.world; }
    void reduce(int token) {
        const Problem& p = r.problem;
        for (int h = 0; h < p.hidden; ++h) {
            float sum = 0;
            for (int k = 0; k < p.top_k; ++k) {
                const int route = token * p.top_k + k;
                if (is_valid(r.ids[route]))
                    sum += r.weights[route] * r.home[(size_t)route * p.hidden + h];
            }
            r.out[(size_t)token * p.hidden + h] = sum;
        }
    }
    int num_routes(int token) const {
        int n = 0;
        for (int k = 0; k < r.problem.top_k; ++k) n += is_valid(r.ids[token * r.problem.top_k + k]);
        return n;
    }
    const int* home_counter(int token) const { return &r.home_counters[token]; }
};

struct Loader {
    EmulatorRing& loaded;
    void preload(const Tile&) {}
    void load(const Tile& t) { loaded.push(t.row_tile); }
};

struct Comm : Math {
    void pull(int m) {
        const Problem& p = r.problem;
        const int routes = p.num_tokens * p.top_k, source = r.source[m];
        const float* x = ranks[source / routes].x + (size_t)(source % routes / p.top_k) * p.hidden;
        std::copy(x, x + p.hidden, &r.sorted[(size_t)m * p.hidden]);
    }
    void push(int m) {
        const Problem& p = r.problem;
        const int routes = p.num_tokens * p.top_k, route = r.source[m] % routes;
        Rank& home = ranks[r.source[m] / routes];
        std::copy(&r.result[(size_t)m * p.hidden], &r.result[(size_t)m * p.hidden] + p.hidden,
                  &home.home[(size_t)route * p.hidden]);
        EmulatorMem().release_add(&home.home_counters[route / p.top_k], 1);
    }
};

void prologue(std::vector<Rank>& ranks, Rank& r) {
    const Problem& p = r.problem;
    const int routes = p.num_tokens * p.top_k, tiles = max_row_tiles(p), rows = max_padded_rows(p);
    r.counts.assign(p.num_experts, 0);
    r.source.assign(rows, -1);
    r.arrays.assign(4 * tiles + 2 * (p.num_experts + 1), -1);
    r.counters.assign(2 + 3 * tiles, 0);
    r.home_counters.assign(p.num_tokens, 0);
    r.sorted.assign((size_t)rows * p.hidden, NAN);
    r.hidden.assign((size_t)rows * p.intermediate, NAN);
    r.result.assign((size_t)rows * p.hidden, NAN);
    r.home.assign((size_t)routes * p.hidden, NAN);
    std::vector<int> slot(routes * p.world, -1);
    for (int i = 0; i < routes * p.world; ++i) {
        const int e = ranks[i / routes].ids[i % routes] - r.expert0();
        if (e >= 0 && e < p.num_experts) slot[i] = r.counts[e]++;
    }
    int* a = r.arrays.data();
    PlanArrays arrays = {a,
                         a + tiles,
                         a + 2 * tiles,
                         a + 3 * tiles,
                         a + 4 * tiles,
                         a + 4 * tiles + p.num_experts + 1};
    r.view = {build_plan(p, r.counts.data(), arrays, 0, 1),
              arrays.tile_expert,
              arrays.tile_row,
              arrays.tile_rows,
              arrays.tile_height,
              arrays.expert_tile};
    for (int i = 0; i < routes * p.world; ++i)
        if (slot[i] >= 0)
            r.source[arrays.expert_row[ranks[i / routes].ids[i % routes] - r.expert0()] + slot[i]] =
                i;
    int* c = r.counters.data();
    r.k = {c, c + 2, c + 2 + tiles, c + 2 + 2 * tiles, c + 1};
}

}  // namespace

// Arrays of all ranks one after the other: x [world, T, H], ids and weights [world, T, K], w13 [world * E, 2I, H],
// w2 [world * E, H, I], out [world, T, H]. `roles`: 1 one thread a block does all, 2 load and math threads.
extern "C" int moeflex_emulate(const Problem* problem, const float* x, const int* ids,
                               const float* weights, const float* w13, const float* w2, float* out,
                               int roles, int seed) {
    jitter_on = seed != 0;
    const Problem& p = *problem;
    if (p.world > 1 && (p.num_comm_blocks < 1 || p.combine_tokens != 0)) return 1;
    if (p.world == 1 && p.num_comm_blocks > 0 && p.combine_tokens != 0) return 1;
    std::vector<Rank> ranks(p.world);
    for (int i = 0; i < p.world; ++i) {
        Rank& r = ranks[i];
        const size_t routes = (size_t)p.num_tokens * p.top_k,
                     tokens = (size_t)p.num_tokens * p.hidden;
        const size_t matrix = (size_t)p.num_experts * p.hidden * p.intermediate;
        r.problem = p;
        r.problem.rank = i;
        r.x = x + i * tokens;
        r.ids = ids + i * routes;
        r.weights = weights + i * routes;
        r.w13 = w13 + i * 2 * matrix;
        r.w2 = w2 + i * matrix;
        r.out = out + i * tokens;
    }
    for (Rank& r : ranks) prologue(ranks, r);
    std::vector<std::thread> threads;
    std::vector<std::unique_ptr<EmulatorRing>> rings;
    int number = 0;
    auto start = [&](auto body) {
        const int own = seed * 1000 + ++number;
        threads.emplace_back([own, body] {
            jitter_rng.seed((unsigned)own);
            EmulatorMem mem;
            body(mem);
        });
    };
    for (Rank& r : ranks)
        for (int b = 0; b < p.num_blocks; ++b) {
            if (b < p.num_comm_blocks) {
                start([&ranks, &r, &p, b](EmulatorMem& mem) {
                    Comm comm{{ranks, r, nullptr}};
                    dispatch_loop(r.view, r.k, mem, comm, b, p.num_comm_blocks);
                    return_loop(r.view, r.k, mem, comm, b, p.num_comm_blocks);
                    reduce_loop(mem, comm, b, p.num_comm_blocks, p.num_tokens);
                });
            } else if (roles == 1) {
                start([&ranks, &r](EmulatorMem& mem) {
                    Math math{ranks, r, nullptr};
                    work_loop(r.view, r.k, mem, math);
                });
            } else {
                rings.push_back(std::make_unique<EmulatorRing>());
                EmulatorRing* claimed = rings.back().get();
                rings.push_back(std::make_unique<EmulatorRing>());
                EmulatorRing* loaded = rings.back().get();
                start([&r, claimed, loaded](EmulatorMem& mem) {
                    Loader loader{*loaded};
                    load_loop(r.view, r.k, mem, *claimed, loader);
                });
                start([&ranks, &r, claimed, loaded](EmulatorMem& mem) {
                    Math math{ranks, r, loaded};
                    math_loop(r.view, r.k, mem, *claimed, math);
                });
            }
        }
    for (auto& t : threads) t.join();
    return 0;
}

#ifdef MOEFLEX_EMULATOR_MAIN
// Random layers without a reference: for ThreadSanitizer, which looks at the order of accesses only.
int main(int argc, char** argv) {
    const int layers = argc > 1 ? std::atoi(argv[1]) : 20;
    for (int i = 0; i < layers; ++i) {
        std::mt19937 rng(i);
        Problem p = {};
        p.world = 1 + i % 3;
        p.num_tokens = 1 + (int)(rng() % 12);
        p.top_k = 2;
        p.num_experts = 4;
        p.hidden = p.intermediate = 32;
        p.num_heights = 2;
        p.heights[0] = 4;
        p.heights[1] = 2;
        p.row_align = i % 2 ? 2 : 1;
        p.gemm0_cols = p.gemm1_cols = 16;
        p.arrivals = 1;
        p.num_blocks = 3;
        p.num_comm_blocks = p.world > 1 ? 1 : 0;
        p.combine_tokens = p.world > 1 ? 0 : 3;
        const size_t tokens = (size_t)p.world * p.num_tokens;
        std::vector<float> x(tokens * 32, .1f), w(tokens * 2, .5f),
            w13((size_t)p.world * 4 * 2 * 32 * 32, .01f), w2((size_t)p.world * 4 * 32 * 32, .01f),
            out(x.size());
        std::vector<int> ids(tokens * 2);
        for (size_t j = 0; j < ids.size(); j += 2) {
            ids[j] = (int)(rng() % (4 * p.world));
            ids[j + 1] = rng() % 8 ? (ids[j] + 1) % (4 * p.world) : -1;
        }
        if (moeflex_emulate(&p, x.data(), ids.data(), w.data(), w13.data(), w2.data(), out.data(),
                            1 + i % 2, i + 1))
            return 1;
    }
    std::puts("done");
}
#endif
