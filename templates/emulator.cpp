// Runs MoE layers on 1 to R ranks with std::thread blocks and the control loops of scheduler.h.
//
// What runs on a GPU can be run on paper: the roles (load, math, comm), counters, order and exchange are those of the
// kernel; only the arithmetic is plain fp32. Scratch starts as NaN, so that a read before its write shows; segments last
// over several calls, so that what is written again too early shows. Built as a shared library for the tests, or with
// -DMOEFLEX_EMULATOR_MAIN as a program for ThreadSanitizer. MOEFLEX_BUG_* seed faults that the tests must catch:
// RELEASE no counter is released, READY and HOME only those of arrivals and of results, ORDER a tile is published before
// it is written, IDS ids have one copy.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "exchange.h"

using namespace moeflex;

namespace {

thread_local std::minstd_rand jitter_rng(1);
std::atomic<bool> jitter_on{false};

void jitter() {
    if (jitter_on.load(std::memory_order_relaxed) && jitter_rng() % 3 == 0)
        std::this_thread::yield();
}

#ifdef MOEFLEX_BUG_RELEASE
constexpr int kReleaseOrder = __ATOMIC_RELAXED;
#else
constexpr int kReleaseOrder = __ATOMIC_RELEASE;
#endif
#ifdef MOEFLEX_BUG_HOME
constexpr int kHomeOrder = __ATOMIC_RELAXED;
#else
constexpr int kHomeOrder = kReleaseOrder;
#endif

struct EmulatorMem {
    const int *unordered_begin = nullptr, *unordered_end = nullptr;
    int claim(int* p) {
        jitter();
        return __atomic_fetch_add(p, 1, __ATOMIC_RELAXED);
    }
    bool wait_at_least(const int* p, int need) {
        while (__atomic_load_n(p, __ATOMIC_ACQUIRE) < need) std::this_thread::yield();
        return true;
    }
    void release_add(int* p, int v) {
        jitter();
        if (p >= unordered_begin && p < unordered_end)
            __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
        else
            __atomic_fetch_add(p, v, kReleaseOrder);
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

// All of `num` threads come, then all go on.
struct Barrier {
    const int num;
    std::atomic<int> arrived{0}, round{0};
    explicit Barrier(int n) : num(n) {}
    void meet() {
        const int now = round.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == num - 1) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(now + 1, std::memory_order_release);
        }
        while (round.load(std::memory_order_acquire) == now) std::this_thread::yield();
    }
};

// One layer call of one rank. x [T, H], ids [T, K] of the model, weights [T, K], out [T, H].
struct Call {
    int num_tokens;
    const float* x;
    const int* ids;
    const float* weights;
    float* out;
};

// What a rank shows to the others; see exchange.h.
struct Segment {
    int num_tokens[2] = {0, 0};
    std::vector<int> ids[2], home_counters;
    std::vector<float> x, parts;
};

struct Layer {
    Problem problem;
    int num_model_experts;
    int num_steal_tiles;
    const float* w13;  // [places of all ranks, 2I, H]
    const float* w2;   // [places of all ranks, H, I]
    std::vector<Segment> segments;
    Barrier ranks_meet;
    explicit Layer(const Problem& p) : problem(p), segments(p.world), ranks_meet(p.world) {}
};

int parity(int call) {
#ifdef MOEFLEX_BUG_IDS
    (void)call;
    return 0;
#else
    return call & 1;
#endif
}

struct Rank {
    Layer& layer;
    Problem problem;
    std::vector<Call> calls;
    Call call = {};
    std::vector<float> arrived, hidden, result;
    std::vector<int> counts, plan, rows, counters;
    PlanView view = {};
    Counters k = {};
    Incoming in = {};
    Barrier blocks_meet;

    Rank(Layer& l, int rank, int num_threads)
        : layer(l), problem(l.problem), blocks_meet(num_threads) {
        problem.rank = rank;
    }
    Segment& segment() { return layer.segments[problem.rank]; }
    bool is_valid(int id) const { return id >= 0 && id < layer.num_model_experts; }

    // Tells the others, meets them, then finds what it has to do.
    void begin(int number) {
        const Problem& p = problem;
        call = calls[number];
        Segment& mine = segment();
        const int now = parity(number), routes = call.num_tokens * p.top_k;
        mine.num_tokens[now] = call.num_tokens;
        for (int i = 0; i < routes; ++i)
            mine.ids[now][i] = is_valid(call.ids[i]) ? call.ids[i] : -1;
        std::copy(call.x, call.x + (size_t)call.num_tokens * p.hidden, mine.x.begin());
        for (int t = 0; t < call.num_tokens; ++t) mine.home_counters[t] = 0;
        std::fill(mine.parts.begin(), mine.parts.begin() + (size_t)routes * p.hidden, NAN);
        layer.ranks_meet.meet();
        std::vector<int> num_tokens;
        std::vector<const int*> ids;
        for (const Segment& s : layer.segments) {
            num_tokens.push_back(s.num_tokens[now]);
            ids.push_back(s.ids[now].data());
        }
        prepare({p.world, p.top_k, num_tokens.data(), ids.data(), p.rank * p.num_experts,
                 p.num_experts});
    }

    void prepare(const RouteTable& routes) {
        const Problem& p = problem;
        counts.assign(p.num_experts, 0);
        count_rows(routes, counts.data());
        const int tiles = max_row_tiles(p), padded = max_padded_rows(p);
        plan.assign(4 * tiles + 2 * (p.num_experts + 1), -1);
        int* a = plan.data();
        PlanArrays arrays = {a,
                             a + tiles,
                             a + 2 * tiles,
                             a + 3 * tiles,
                             a + 4 * tiles,
                             a + 4 * tiles + p.num_experts + 1};
        view = {build_plan(p, counts.data(), arrays, 0, 1),
                arrays.tile_expert,
                arrays.tile_row,
                arrays.tile_rows,
                arrays.tile_height,
                arrays.expert_tile};
        rows.assign(6 * padded, -1);
        int* r = rows.data();
        in = {0, r, r + padded, r + 2 * padded, r + 3 * padded, r + 4 * padded, r + 5 * padded};
        std::vector<int> cursors(arrays.expert_row, arrays.expert_row + p.num_experts);
        std::vector<int> seen(max_rows(p));
        place_rows(routes, view, cursors.data(), seen.data(), in);
        arrived.assign((size_t)in.num_arrivals * p.hidden, NAN);
        hidden.assign((size_t)padded * p.intermediate, NAN);
        result.assign((size_t)padded * p.hidden, NAN);
        counters.assign(6 + 3 * tiles, 0);
        int* c = counters.data();
        k = {c, c + 6, c + 6 + tiles, c + 6 + 2 * tiles, c + 1, c + 2, c + 3, c + 4, c + 5};
    }
};

struct Math {
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
    size_t place(const Tile& t) const {
        return (size_t)r.problem.rank * r.problem.num_experts + t.expert;
    }
    void gemm0(const Tile& t) {
        const Problem& p = r.problem;
        const int H = p.hidden, I = p.intermediate, row0 = r.view.tile_row[t.row_tile];
        for (int m = row0; m < row0 + r.view.tile_rows[t.row_tile]; ++m) {
            const float* x = row(m);
            for (int n = t.col * p.gemm0_cols; n < min_int((t.col + 1) * p.gemm0_cols, I); ++n) {
                float gate = 0, up = 0;
                const float* wg = r.layer.w13 + (place(t) * 2 * I + n) * H;
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
        if (p.num_comm_blocks > 0) return &r.arrived[(size_t)r.in.arrival_of_row[m] * p.hidden];
        return r.call.x + (size_t)(r.in.home_route[m] / p.top_k) * p.hidden;
    }
    void gemm1(const Tile& t) {
        const Problem& p = r.problem;
        const int H = p.hidden, I = p.intermediate, row0 = r.view.tile_row[t.row_tile];
        for (int m = row0; m < row0 + r.view.tile_rows[t.row_tile]; ++m)
            for (int n = t.col * p.gemm1_cols; n < min_int((t.col + 1) * p.gemm1_cols, H); ++n) {
                float sum = 0;
                const float* w = r.layer.w2 + (place(t) * H + n) * I;
                for (int i = 0; i < I; ++i) sum += r.hidden[(size_t)m * I + i] * w[i];
                r.result[(size_t)m * H + n] = sum;
                if (p.num_comm_blocks == 0)
                    r.segment().parts[(size_t)r.in.home_route[m] * H + n] = sum;
            }
    }
    void combine(const Tile& t) {
        const Problem& p = r.problem;
        for (int token = t.col * p.combine_tokens;
             token < min_int((t.col + 1) * p.combine_tokens, r.call.num_tokens); ++token)
            reduce(token);
    }
    void reduce(int token) {
        const Problem& p = r.problem;
        for (int h = 0; h < p.hidden; ++h) {
            float sum = 0;
            for (int k = 0; k < p.top_k; ++k) {
                const int route = token * p.top_k + k;
                if (r.is_valid(r.call.ids[route]))
                    sum += r.call.weights[route] * r.segment().parts[(size_t)route * p.hidden + h];
            }
            r.call.out[(size_t)token * p.hidden + h] = sum;
        }
    }

    // ---- several ranks
    int num_arrivals() const { return r.in.num_arrivals; }
    int first_row(int i) const { return r.in.first_row[i]; }
    int next_row(int row) const { return r.in.next_row[row]; }
    int tile_of_row(int row) const { return r.in.tile_of_row[row]; }
    void pull(int i) {
        const Problem& p = r.problem;
        const int row = r.in.first_row[i], token = r.in.home_route[row] / p.top_k;
        const float* x = &r.layer.segments[r.in.home_rank[row]].x[(size_t)token * p.hidden];
        std::copy(x, x + p.hidden, &r.arrived[(size_t)i * p.hidden]);
    }
    void push(int m) {
        const Problem& p = r.problem;
        const int route = r.in.home_route[m];
        Segment& home = r.layer.segments[r.in.home_rank[m]];
        std::copy(&r.result[(size_t)m * p.hidden], &r.result[(size_t)m * p.hidden] + p.hidden,
                  &home.parts[(size_t)route * p.hidden]);
        jitter();
        __atomic_fetch_add(&home.home_counters[route / p.top_k], 1, kHomeOrder);
    }
    int num_routes(int token) const {
        int n = 0;
        for (int k = 0; k < r.problem.top_k; ++k)
            n += r.is_valid(r.call.ids[token * r.problem.top_k + k]);
        return n;
    }
    const int* home_counter(int token) const { return &r.segment().home_counters[token]; }
};

struct Loader {
    EmulatorRing& loaded;
    void preload(const Tile&) {}
    void load(const Tile& t) { loaded.push(t.row_tile); }
};

// The threads of one rank: block b is one thread, or two where roles are apart.
struct Team {
    Rank& rank;
    int roles, seed;
    std::vector<std::thread>& threads;

    static int num_threads(const Problem& p, int roles) {
        return p.num_comm_blocks + (p.num_blocks - p.num_comm_blocks) * roles;
    }
    // Runs `body(mem)` once a call; the first thread of a rank is its leader.
    template <class Body>
    void start(bool leads, Body body) {
        Rank& r = rank;
        const int own = seed * 1000 + (int)threads.size() + 1;
        threads.emplace_back([&r, own, leads, body]() mutable {
            jitter_rng.seed((unsigned)own);
            for (size_t call = 0; call < r.calls.size(); ++call) {
                if (leads) r.begin((int)call);
                r.blocks_meet.meet();
                EmulatorMem mem;
#ifdef MOEFLEX_BUG_READY
                mem.unordered_begin = r.k.ready;
                mem.unordered_end = r.k.ready + r.view.plan.num_row_tiles;
#endif
                body(mem);
                r.blocks_meet.meet();
            }
        });
    }
    void start_all(std::vector<std::unique_ptr<EmulatorRing>>& rings) {
        Rank& r = rank;
        const Problem& p = r.problem;
        const bool exchanges = p.num_comm_blocks > 0, all = p.num_comm_blocks == p.num_blocks;
        for (int b = 0; b < p.num_blocks; ++b) {
            if (b < p.num_comm_blocks) {
                start(b == 0, [&r, all](EmulatorMem& mem) {
                    Math comm{r, nullptr};
                    comm_loop(r.view, r.k, mem, comm, r.layer.num_steal_tiles, all);
                    tail_loop(r.view, r.k, mem, comm, r.call.num_tokens);
                });
            } else if (roles == 1) {
                start(b == 0, [&r, exchanges](EmulatorMem& mem) {
                    Math math{r, nullptr};
                    work_loop(r.view, r.k, mem, math);
                    if (exchanges) tail_loop(r.view, r.k, mem, math, r.call.num_tokens);
                });
            } else {
                rings.push_back(std::make_unique<EmulatorRing>());
                EmulatorRing* claimed = rings.back().get();
                rings.push_back(std::make_unique<EmulatorRing>());
                EmulatorRing* loaded = rings.back().get();
                start(b == 0, [&r, claimed, loaded](EmulatorMem& mem) {
                    Loader loader{*loaded};
                    load_loop(r.view, r.k, mem, *claimed, loader);
                });
                start(false, [&r, claimed, loaded, exchanges](EmulatorMem& mem) {
                    Math math{r, loaded};
                    math_loop(r.view, r.k, mem, *claimed, math);
                    math.loaded = nullptr;
                    if (exchanges) tail_loop(r.view, r.k, mem, math, r.call.num_tokens);
                });
            }
        }
    }
};

}  // namespace

struct Emulation {
    Problem problem;  // num_tokens: the most of any rank and call
    int num_model_experts;
    int num_steal_tiles;
    int roles;  // 1: one thread a block does all; 2: load and math threads
    int num_calls;
    int seed;  // 0: threads are not jittered
};

// num_tokens [calls, world]. Tokens of all calls and ranks one after the other: x [., H], ids and weights [., K], out
// [., H]. w13 [world * places, 2I, H], w2 [world * places, H, I], `places` being problem.num_experts.
extern "C" int moeflex_emulate(const Emulation* run, const int* num_tokens, const float* x,
                               const int* ids, const float* weights, const float* w13,
                               const float* w2, float* out) {
    jitter_on = run->seed != 0;
    const Problem& p = run->problem;
    const bool exchanges = p.num_comm_blocks > 0;
    if (p.world > 1 && !exchanges) return 1;
    if (exchanges != (p.combine_tokens == 0)) return 1;
    Layer layer(p);
    layer.num_model_experts = run->num_model_experts;
    layer.num_steal_tiles = run->num_steal_tiles;
    layer.w13 = w13;
    layer.w2 = w2;
    for (Segment& s : layer.segments) {
        const size_t routes = (size_t)p.num_tokens * p.top_k;
        for (auto& copy : s.ids) copy.resize(routes);
        s.home_counters.resize(p.num_tokens);
        s.x.resize((size_t)p.num_tokens * p.hidden);
        s.parts.resize(routes * p.hidden);
    }
    std::vector<std::unique_ptr<Rank>> ranks;
    for (int r = 0; r < p.world; ++r)
        ranks.push_back(std::make_unique<Rank>(layer, r, Team::num_threads(p, run->roles)));
    size_t token = 0;
    for (int i = 0; i < run->num_calls * p.world; ++i) {
        ranks[i % p.world]->calls.push_back({num_tokens[i], x + token * p.hidden,
                                             ids + token * p.top_k, weights + token * p.top_k,
                                             out + token * p.hidden});
        token += num_tokens[i];
    }
    std::vector<std::thread> threads;
    std::vector<std::unique_ptr<EmulatorRing>> rings;
    for (auto& rank : ranks) Team{*rank, run->roles, run->seed, threads}.start_all(rings);
    for (auto& t : threads) t.join();
    return 0;
}

#ifdef MOEFLEX_EMULATOR_MAIN
// Random layers without a reference: for ThreadSanitizer, which looks at the order of accesses only.
int main(int argc, char** argv) {
    const int layers = argc > 1 ? std::atoi(argv[1]) : 20;
    for (int i = 0; i < layers; ++i) {
        std::mt19937 rng(i);
        Emulation run = {};
        Problem& p = run.problem;
        p.world = 1 + i % 3;
        p.num_tokens = 12;
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
        p.num_comm_blocks = p.world > 1 ? 1 + i % 2 : 0;
        p.combine_tokens = p.world > 1 ? 0 : 3;
        run.num_model_experts = 4 * p.world - (p.world > 1);
        run.num_steal_tiles = i % 4 * 3;
        run.roles = 1 + i % 2;
        run.num_calls = 3;
        run.seed = i + 1;
        std::vector<int> num_tokens;
        size_t tokens = 0;
        for (int j = 0; j < run.num_calls * p.world; ++j) {
            num_tokens.push_back((int)(rng() % 13));
            tokens += num_tokens.back();
        }
        std::vector<float> x(tokens * 32, .1f), w(tokens * 2, .5f),
            w13((size_t)p.world * 4 * 2 * 32 * 32, .01f), w2((size_t)p.world * 4 * 32 * 32, .01f),
            out(x.size());
        std::vector<int> ids(tokens * 2);
        // Every other layer sends nothing to the last rank, which reads ids all the same.
        const int experts = p.world > 1 && i % 2 ? 4 : 4 * p.world;
        for (size_t j = 0; j < ids.size(); j += 2) {
            ids[j] = (int)(rng() % experts);
            ids[j + 1] = rng() % 8 ? (ids[j] + 1) % experts : -1;
        }
        if (moeflex_emulate(&run, num_tokens.data(), x.data(), ids.data(), w.data(), w13.data(),
                            w2.data(), out.data()))
            return 1;
    }
    std::puts("done");
}
#endif
