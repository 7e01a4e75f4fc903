// The scheduler of a MoE layer: which tile is computed when, and what it waits for.
//
// One file for every target: the H200 kernel (nvcc, NVRTC), the CPU kernel, the emulator and the replay tool.
// No std header, no CUDA header, integer arithmetic only, so that host and device agree bit for bit.
// Memory goes through the policy Mem, work through the policy Ops, tile hand-over between roles through Ring.
//
// What must stay true:
//   * `decode(view, 0 .. num_tiles-1)` is a bijection onto the tiles of the plan;
//   * it is a topological order: a tile depends on tiles of lower sequence number only, so blocks that claim
//     in order cannot deadlock, however many of them run (a block may also hold one claim ahead of its work).
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define MOEFLEX_HD __host__ __device__ __forceinline__
#define MOEFLEX_D __device__ __forceinline__
#else
#define MOEFLEX_HD inline
#define MOEFLEX_D inline
#endif

namespace moeflex {

constexpr int kMaxHeights = 4;

// What is known before routing. Experts are those of this rank; tokens are those of one rank.
struct Problem {
    int num_tokens;
    int top_k;
    int num_experts;
    int hidden;
    int intermediate;
    int num_heights;  // classes of row tiles, 1 .. kMaxHeights
    int heights
        [kMaxHeights];  // descending; heights[0] is the full tile, an expert's tail takes the smallest that holds it
    int row_align;       // the first row of an expert in the sorted buffer is a multiple of this
    int gemm0_cols;      // intermediate columns of one gemm0 tile (gate and up counted once)
    int gemm1_cols;      // hidden columns of one gemm1 tile
    int chunk_tiles;     // row tiles in one chunk; 0: about two waves of gemm0 tiles
    int combine_tokens;  // tokens in one combine tile; 0: no combine tiles (reduce_loop combines)
    int arrivals;        // release-adds that complete one gemm tile (warp groups; 1 on a CPU)
    int world;           // ranks that exchange tokens
    int rank;
    int num_blocks;       // SMs, or threads
    int num_comm_blocks;  // the paper's c; 0: no dispatch, the load role gathers its rows itself
};

constexpr int kReturnRows = 16;   // rows that are sent home at once
constexpr int kReduceTokens = 8;  // tokens that are reduced at once

enum Stage : int { kGemm0 = 0, kGemm1 = 1, kCombine = 2, kStop = 3 };

// What follows from the counts; a few words, broadcast to every block.
struct Plan {
    int num_row_tiles;
    int num_rows;         // routed rows, padding left out
    int num_padded_rows;  // rows of the sorted buffer in use
    int num_cols0;        // gemm0 tiles of one row tile
    int num_cols1;        // gemm1 tiles of one row tile
    int chunk_tiles;
    int num_chunks;
    int num_gemm_tiles;
    int num_combine_tiles;
    int num_tiles;
    int arrivals;
    int return_pieces;  // of a row tile, on its way home
    int dispatches;     // gemm0 waits for its rows (num_comm_blocks > 0)
};

// Row tiles of the plan. `row_tile` arrays hold max_row_tiles(problem) entries, `expert` arrays num_experts + 1.
struct PlanView {
    Plan plan;
    const int* tile_expert;
    const int* tile_row;     // first row in the sorted buffer
    const int* tile_rows;    // valid rows, 1 .. tile_height
    const int* tile_height;  // class of the tile
    const int* expert_tile;  // first row tile of each expert
};

struct PlanArrays {
    int* tile_expert;
    int* tile_row;
    int* tile_rows;
    int* tile_height;
    int* expert_tile;
    int* expert_row;  // first row of each expert in the sorted buffer
};

struct Tile {
    int stage;
    int expert;
    int row_tile;
    int col;  // column tile; of kCombine: the combine tile
};

MOEFLEX_HD int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}
MOEFLEX_HD int min_int(int a, int b) {
    return a < b ? a : b;
}
MOEFLEX_HD int max_int(int a, int b) {
    return a > b ? a : b;
}
MOEFLEX_HD int round_up(int a, int b) {
    return ceil_div(a, b) * b;
}

// Upper bounds that size the workspace: a rank may receive every route of every rank.
MOEFLEX_HD int max_rows(const Problem& p) {
    return p.num_tokens * p.top_k * p.world;
}
MOEFLEX_HD int max_row_tiles(const Problem& p) {
    return max_rows(p) / p.heights[0] + min_int(p.num_experts, max_rows(p));
}
MOEFLEX_HD int max_padded_rows(const Problem& p) {
    int slack = p.row_align > p.heights[0] ? p.row_align : p.heights[0];
    return max_rows(p) + min_int(p.num_experts, max_rows(p)) * slack;
}

// The smallest class that holds `rows` rows (rows <= heights[0]).
MOEFLEX_HD int height_for(const Problem& p, int rows) {
    int height = p.heights[0];
    for (int i = 1; i < p.num_heights; ++i)
        if (p.heights[i] >= rows) height = p.heights[i];
    return height;
}

// Lane `lane` of `lanes` fills its share of the arrays; every lane returns the same plan. An expert's tiles are
// full ones, then one tail. Rows of an expert are padded to its tiles' heights and to row_align only when
// row_align > 1; with row_align == 1 the buffer has no padding at all.
MOEFLEX_HD Plan build_plan(const Problem& p, const int* counts, const PlanArrays& out, int lane,
                           int lanes) {
    int tiles = 0, padded = 0, rows = 0;
    const int full = p.heights[0];
    for (int e = 0; e < p.num_experts; ++e) {
        const int n = counts[e];
        const int num = ceil_div(n, full);
        const int tail = n - (num - 1) * full;
        if (lane == 0) {
            out.expert_tile[e] = tiles;
            out.expert_row[e] = padded;
        }
        for (int i = lane; i < num; i += lanes) {
            const int last = i == num - 1;
            out.tile_expert[tiles + i] = e;
            out.tile_row[tiles + i] = padded + i * full;
            out.tile_rows[tiles + i] = last ? tail : full;
            out.tile_height[tiles + i] = last ? height_for(p, tail) : full;
        }
        if (num > 0) {
            const int used = p.row_align > 1 ? (num - 1) * full + height_for(p, tail) : n;
            padded = round_up(padded + used, p.row_align);
        }
        tiles += num;
        rows += n;
    }
    if (lane == 0) {
        out.expert_tile[p.num_experts] = tiles;
        out.expert_row[p.num_experts] = padded;
    }
    Plan plan;
    plan.num_row_tiles = tiles;
    plan.num_rows = rows;
    plan.num_padded_rows = padded;
    plan.num_cols0 = ceil_div(p.intermediate, p.gemm0_cols);
    plan.num_cols1 = ceil_div(p.hidden, p.gemm1_cols);
    const int workers = max_int(1, p.num_blocks - p.num_comm_blocks);
    plan.chunk_tiles = p.chunk_tiles > 0 ? p.chunk_tiles : ceil_div(2 * workers, plan.num_cols0);
    plan.num_chunks = ceil_div(tiles, plan.chunk_tiles);
    plan.num_gemm_tiles = tiles * (plan.num_cols0 + plan.num_cols1);
    plan.num_combine_tiles = p.combine_tokens > 0 ? ceil_div(p.num_tokens, p.combine_tokens) : 0;
    plan.num_tiles = plan.num_gemm_tiles + plan.num_combine_tiles;
    plan.arrivals = p.arrivals;
    plan.return_pieces = ceil_div(p.heights[0], kReturnRows);
    plan.dispatches = p.num_comm_blocks > 0;
    return plan;
}

// `off` counts the tiles of one stage of row tiles [first, first + num): experts in order; inside an expert columns in
// order, row tiles fastest, so that neighbours in time share the weight tile.
MOEFLEX_HD Tile place(const PlanView& v, int stage, int first, int num, int off) {
    const int cols = stage == kGemm0 ? v.plan.num_cols0 : v.plan.num_cols1;
    const int e = v.tile_expert[first + off / cols];
    const int begin = max_int(v.expert_tile[e], first);
    const int count = min_int(v.expert_tile[e + 1], first + num) - begin;
    const int inside = off - (begin - first) * cols;
    Tile t;
    t.stage = stage;
    t.expert = e;
    t.row_tile = begin + inside % count;
    t.col = inside / count;
    return t;
}

// Order: G0(0) | G0(1) G1(0) | ... | G0(last) G1(last-1) | G1(last) | combine tiles.
MOEFLEX_HD Tile decode(const PlanView& v, int seq) {
    const Plan& p = v.plan;
    if (seq >= p.num_gemm_tiles) {
        Tile t;
        t.stage = seq < p.num_tiles ? kCombine : kStop;
        t.expert = t.row_tile = 0;
        t.col = seq - p.num_gemm_tiles;
        return t;
    }
    const int size = p.chunk_tiles;
    const int head = min_int(size, p.num_row_tiles) * p.num_cols0;  // step 0: gemm0 of chunk 0
    if (seq < head) return place(v, kGemm0, 0, min_int(size, p.num_row_tiles), seq);
    if (p.num_chunks == 1) return place(v, kGemm1, 0, p.num_row_tiles, seq - head);
    const int per_step = size * (p.num_cols0 + p.num_cols1);
    const int step = min_int((seq - head) / per_step + 1,
                             p.num_chunks - 1);  // gemm0 of chunk `step`, gemm1 of the one before
    int off = seq - head - (step - 1) * per_step;
    const int ahead = min_int(size, p.num_row_tiles - step * size);
    if (off < ahead * p.num_cols0) return place(v, kGemm0, step * size, ahead, off);
    off -= ahead * p.num_cols0;
    if (off < size * p.num_cols1) return place(v, kGemm1, (step - 1) * size, size, off);
    return place(v, kGemm1, step * size, ahead, off - size * p.num_cols1);  // after the last step
}

// ---- dependencies --------------------------------------------------------------------------------
// Every counter only grows and starts at zero.
struct Counters {
    int* claim;       // next sequence number
    int* ready;       // [row tiles] rows that arrived (dispatch)
    int* gemm0_done;  // [row tiles]
    int* gemm1_done;  // [row tiles]
    int* all_done;    // gemm1 tiles of the whole plan
    // Of several ranks only: the next arrival, ticket of the steal window, piece on its way home, tokens to reduce.
    int* dispatched;
    int* stolen;
    int* returned;
    int* reduced;
};

struct Dependency {
    const int* counter;  // null: none
    int need;
};

MOEFLEX_HD Dependency dependency(const PlanView& v, const Counters& k, const Tile& t) {
    Dependency d;
    d.counter = nullptr;
    d.need = 0;
    if (t.stage == kGemm0 && v.plan.dispatches) {
        d.counter = k.ready + t.row_tile;
        d.need = v.tile_rows[t.row_tile];
    } else if (t.stage == kGemm1) {
        d.counter = k.gemm0_done + t.row_tile;
        d.need = v.plan.num_cols0 * v.plan.arrivals;
    } else if (t.stage == kCombine) {
        d.counter = k.all_done;
        d.need = v.plan.num_row_tiles * v.plan.num_cols1 * v.plan.arrivals;
    }
    return d;
}

// Publishing a tile: its writes come before the add (release). `all_done` is counted only where combine tiles
// wait for it.
template <class Mem>
MOEFLEX_D void publish(const PlanView& v, const Counters& k, Mem& mem, const Tile& t) {
    if (t.stage == kGemm0) mem.release_add(k.gemm0_done + t.row_tile, 1);
    if (t.stage == kGemm1)
        mem.release_add(v.plan.num_combine_tiles ? k.all_done : k.gemm1_done + t.row_tile, 1);
}

// ---- control loops -------------------------------------------------------------------------------
// Mem:  int claim(int*);  bool wait_at_least(const int*, int);  void release_add(int*, int);  void proxy_fence();
//       A wait that gives false ends its loop: the layer was given up, nothing more may be published.
// Ops:  what a role does with a tile; see each loop. A loop gives false when a wait did.

template <class Mem>
MOEFLEX_D bool wait_for(const PlanView& v, const Counters& k, Mem& mem, const Tile& t) {
    const Dependency d = dependency(v, k, t);
    return !d.counter || mem.wait_at_least(d.counter, d.need);
}

// One role per block: load, math and combine in one thread (CPU). Ops: prefetch(tile), run(tile).
template <class Mem, class Ops>
MOEFLEX_D bool work_loop(const PlanView& v, const Counters& k, Mem& mem, Ops& ops) {
    int seq = mem.claim(k.claim);
    while (seq < v.plan.num_tiles) {
        const Tile t = decode(v, seq);
        seq = mem.claim(k.claim);
        ops.prefetch(decode(v, seq));
        if (!wait_for(v, k, mem, t)) return false;
        ops.run(t);
        publish(v, k, mem, t);
    }
    return true;
}

// The load role of a block. Ring: push(seq). Ops: preload(tile) - operands that need no wait (weights) -, then load(tile),
// which must hand every tile over to the math role, combine tiles too: only this role waits for the dependency.
template <class Mem, class Ring, class Ops>
MOEFLEX_D bool load_loop(const PlanView& v, const Counters& k, Mem& mem, Ring& ring, Ops& ops) {
    for (;;) {
        const int seq = mem.claim(k.claim);
        ring.push(seq);
        const Tile t = decode(v, seq);
        if (t.stage == kStop) return true;
        ops.preload(t);
        const Dependency d = dependency(v, k, t);
        if (d.counter) {
            if (!mem.wait_at_least(d.counter, d.need)) return false;
            mem.proxy_fence();  // generic to async proxy, in the block that issues the bulk load
        }
        ops.load(t);
    }
}

// The math role of a block. Ring: pop(). Ops: run(tile) - ends with the output written -.
template <class Mem, class Ring, class Ops>
MOEFLEX_D void math_loop(const PlanView& v, const Counters& k, Mem& mem, Ring& ring, Ops& ops) {
    for (;;) {
        const Tile t = decode(v, ring.pop());
        if (t.stage == kStop) break;
        ops.run(t);
        publish(v, k, mem, t);
    }
}

// ---- several ranks -------------------------------------------------------------------------------
// A block communicates or computes first, and does what is left of the returns and the sums at last: so the tail
// belongs to all blocks. Units are claimed in order, whoever comes.

// Tokens that arrive, in the order in which row tiles need them. Ops: num_arrivals(); pull(i) - all rows of the token
// are readable on return -; first_row(i), next_row(row) - below zero after the last -; tile_of_row(row).
template <class Mem, class Ops>
MOEFLEX_D void dispatch_loop(const Counters& k, Mem& mem, Ops& ops) {
    for (int i; (i = mem.claim(k.dispatched)) < ops.num_arrivals();) {
        ops.pull(i);
        for (int row = ops.first_row(i); row >= 0; row = ops.next_row(row))
            mem.release_add(k.ready + ops.tile_of_row(row), 1);
    }
}

// The steal window: `num_tiles` tiles for the communicating blocks together. A tile is claimed only by who computes it.
template <class Mem, class Ops>
MOEFLEX_D bool steal_loop(const PlanView& v, const Counters& k, Mem& mem, Ops& ops, int num_tiles) {
    while (mem.claim(k.stolen) < num_tiles) {
        const Tile t = decode(v, mem.claim(k.claim));
        if (t.stage == kStop) return true;
        if (!wait_for(v, k, mem, t)) return false;
        ops.run(t);
        publish(v, k, mem, t);
    }
    return true;
}

// Finished rows to their home ranks, in chunk order. Ops: push(row) - ends with a release-add of one on the home rank's
// counter of that token -.
template <class Mem, class Ops>
MOEFLEX_D bool return_loop(const PlanView& v, const Counters& k, Mem& mem, Ops& ops) {
    for (;;) {
        const int unit = mem.claim(k.returned), b = unit / v.plan.return_pieces;
        if (b >= v.plan.num_row_tiles) return true;
        const int first = unit % v.plan.return_pieces * kReturnRows;
        const int last = min_int(first + kReturnRows, v.tile_rows[b]);
        if (first >= last) continue;
        if (!mem.wait_at_least(k.gemm1_done + b, v.plan.num_cols1 * v.plan.arrivals)) return false;
        for (int row = first; row < last; ++row) ops.push(v.tile_row[b] + row);
    }
}

// The weighted sums of this rank's own tokens, over k in order. Ops: home_counter(token), num_routes(token) - valid
// routes only -, reduce(token).
template <class Mem, class Ops>
MOEFLEX_D bool reduce_loop(const Counters& k, Mem& mem, Ops& ops, int num_tokens) {
    for (int first; (first = mem.claim(k.reduced) * kReduceTokens) < num_tokens;)
        for (int t = first; t < min_int(first + kReduceTokens, num_tokens); ++t) {
            if (!mem.wait_at_least(ops.home_counter(t), ops.num_routes(t))) return false;
            ops.reduce(t);
        }
    return true;
}

// What a block that communicates does before the tail. With no block left that only computes, the window is the plan.
template <class Mem, class Ops>
MOEFLEX_D bool comm_loop(const PlanView& v, const Counters& k, Mem& mem, Ops& ops,
                         int num_steal_tiles, bool all_communicate) {
    dispatch_loop(k, mem, ops);
    return steal_loop(v, k, mem, ops, all_communicate ? v.plan.num_gemm_tiles : num_steal_tiles);
}
template <class Mem, class Ops>
MOEFLEX_D bool tail_loop(const PlanView& v, const Counters& k, Mem& mem, Ops& ops, int num_tokens) {
    return return_loop(v, k, mem, ops) && reduce_loop(k, mem, ops, num_tokens);
}

}  // namespace moeflex
