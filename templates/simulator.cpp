// Simulates the schedule of one rank's layer tile by tile, to judge what search.h chooses.
//
// Blocks claim tiles of `decode` in order; a tile starts when its block is free and its rows or its gemm0 tiles are there.
// Communication blocks pull rows in the order of chunks, then claim `num_steal_tiles` tiles, then send computed chunks
// home; once no tile is left to claim, every block sends. Tile times and transfer rates are those of the curves: the
// simulation knows no caches, no contention between roles, no jitter.
#include <algorithm>
#include <queue>
#include <vector>

#include "search.h"

using namespace moeflex;

namespace {

struct Event {
    Ns free;
    int block;
    bool operator<(const Event& o) const {
        return free != o.free ? free > o.free : block > o.block;
    }
};

struct Layout {
    std::vector<int> arrays;
    PlanView view;

    Layout(const Problem& p, const int* counts) {
        const int tiles = max_row_tiles(p);
        arrays.assign(4 * tiles + 2 * (p.num_experts + 1), 0);
        int* a = arrays.data();
        PlanArrays out = {a,
                          a + tiles,
                          a + 2 * tiles,
                          a + 3 * tiles,
                          a + 4 * tiles,
                          a + 4 * tiles + p.num_experts + 1};
        view = {build_plan(p, counts, out, 0, 1),
                out.tile_expert,
                out.tile_row,
                out.tile_rows,
                out.tile_height,
                out.expert_tile};
    }
    void cut(int chunks) {
        Plan& p = view.plan;
        p.chunk_tiles = max_int(1, ceil_div(p.num_row_tiles, chunks));
        p.num_chunks = ceil_div(p.num_row_tiles, p.chunk_tiles);
    }
};

Ns simulate(const PlanView& v, const Traffic& t, const Curves& k, int comm, int num_steal_tiles) {
    const Plan& p = v.plan;
    const int all = k.num_blocks;
    const Ns dispatch = transfer_ns(t.in_bytes, k.bytes_per_us[comm]);
    std::priority_queue<Event> blocks;
    for (int b = comm; b < all; ++b) blocks.push({0, b});
    for (int b = 0; b < comm && num_steal_tiles > 0; ++b) blocks.push({dispatch, b});
    std::vector<Ns> hidden(p.num_row_tiles, 0), chunk_done(p.num_chunks, 0);
    int steals = num_steal_tiles;
    Ns last_steal = dispatch;
    for (int seq = 0; seq < p.num_gemm_tiles; ++seq) {
        Event e = blocks.top();
        blocks.pop();
        while (e.block < comm && steals == 0) {  // this block went back to sending
            e = blocks.top();
            blocks.pop();
        }
        const bool window = steals > 0 && e.free >= dispatch;
        if (e.block < comm) --steals;
        const int computing = window ? all : all - comm;
        const Tile tile = decode(v, seq);
        Ns start = e.free;
        if (tile.stage == kGemm0) {
            const int rows = v.tile_row[tile.row_tile] + v.tile_rows[tile.row_tile];
            start = std::max(start, dispatch * rows / std::max(1, p.num_padded_rows));
        } else {
            start = std::max(start, hidden[tile.row_tile]);
        }
        const Ns end = start + (tile.stage == kGemm0 ? k.gemm0_ns : k.gemm1_ns)[computing];
        if (tile.stage == kGemm0) {
            hidden[tile.row_tile] = std::max(hidden[tile.row_tile], end);
        } else {
            Ns& done = chunk_done[tile.row_tile / p.chunk_tiles];
            done = std::max(done, end);
        }
        if (e.block < comm) last_steal = std::max(last_steal, end);
        blocks.push({end, e.block});
    }
    Ns finish = 0;
    for (Ns done : chunk_done) finish = std::max(finish, done);
    Ns link = last_steal, behind = 0;
    for (int g = 0; g < p.num_chunks; ++g) {
        const int first = g * p.chunk_tiles,
                  last = std::min(p.num_row_tiles, first + p.chunk_tiles);
        const Ns bytes = t.out_bytes * (last - first) / p.num_row_tiles;
        const Ns start = std::max(link, chunk_done[g]);
        if (start >= finish) {
            behind += bytes;
            continue;
        }
        const Ns end = start + transfer_ns(bytes, k.bytes_per_us[comm]);
        link = std::min(end, finish);
        if (end > finish) behind += (end - finish) * k.bytes_per_us[comm] / 1000;
    }
    return std::max(finish, dispatch) + transfer_ns(behind, k.bytes_per_us[all]);
}

}  // namespace

struct Verdict {
    Split chosen;
    Ns chosen_ns;  // simulated
    Split best;
    Ns best_ns;
    Split spatial;  // chosen without chunks and stealing
    Ns spatial_ns;
    Ns serial_ns;  // all blocks communicate, then all compute, then all communicate
    int num_simulated;
};

// `counts` [num_experts] rows of each expert of this rank. Comm counts from 1 to num_blocks - 1 in steps of `stride`.
extern "C" int moeflex_judge(const Problem* problem, const int* counts, const Curves* curves,
                             Ns in_bytes, Ns out_bytes, int stride, Verdict* out) {
    Layout layout(*problem, counts);
    const Plan& p = layout.view.plan;
    const Traffic t = {p.num_row_tiles, p.num_cols0, p.num_cols1, in_bytes, out_bytes};
    if (p.num_row_tiles == 0) return 1;
    out->chosen = split_of(t, *curves, search_lane(t, *curves, 0, 1));
    layout.cut(out->chosen.num_chunks);
    out->chosen_ns =
        simulate(layout.view, t, *curves, out->chosen.num_comm_blocks, out->chosen.num_steal_tiles);
    out->best = out->chosen;
    out->best_ns = out->chosen_ns;
    out->num_simulated = 1;
    for (int chunks : {1, 2, 3, 4, 5, 6, 7, 8, 12}) {
        layout.cut(chunks);
        for (int comm = 1; comm < curves->num_blocks; comm += stride)
            for (int part = 0; part <= 8; ++part) {
                const int steal =
                    (int)((Ns)p.num_gemm_tiles * comm / curves->num_blocks * part / 8);
                const Ns ns = simulate(layout.view, t, *curves, comm, steal);
                ++out->num_simulated;
                if (ns >= out->best_ns) continue;
                out->best_ns = ns;
                out->best = {comm, layout.view.plan.num_chunks, -1, steal, ns};
            }
    }
    layout.cut(1);
    out->spatial = split_of(t, *curves, search_lane(t, *curves, 0, 1, kSpatial));
    out->spatial_ns = simulate(layout.view, t, *curves, out->spatial.num_comm_blocks,
                               out->spatial.num_steal_tiles);
    const Split serial = split_of(t, *curves, search_lane(t, *curves, 0, 1, kSerial));
    out->serial_ns =
        simulate(layout.view, t, *curves, serial.num_comm_blocks, serial.num_steal_tiles);
    ++out->num_simulated;
    if (out->serial_ns < out->best_ns) {
        out->best_ns = out->serial_ns;
        out->best = serial;
    }
    return 0;
}

// What the search chooses for the layer, and its simulated time. The layer has rows.
extern "C" void moeflex_plan(const Problem* problem, const int* counts, const Curves* curves,
                             Ns in_bytes, Ns out_bytes, int schedule, Split* split,
                             Ns* simulated_ns) {
    Layout layout(*problem, counts);
    const Plan& p = layout.view.plan;
    const Traffic t = {p.num_row_tiles, p.num_cols0, p.num_cols1, in_bytes, out_bytes};
    *split = split_of(t, *curves, search_lane(t, *curves, 0, 1, (Schedule)schedule));
    layout.cut(split->num_chunks);
    *simulated_ns =
        simulate(layout.view, t, *curves, split->num_comm_blocks, split->num_steal_tiles);
}

// Simulated time of one split of the layer; -1 for a layer without rows.
extern "C" Ns moeflex_simulate(const Problem* problem, const int* counts, const Curves* curves,
                               Ns in_bytes, Ns out_bytes, int comm, int chunks, int steal) {
    Layout layout(*problem, counts);
    const Plan& p = layout.view.plan;
    if (p.num_row_tiles == 0) return -1;
    layout.cut(chunks);
    const Traffic t = {p.num_row_tiles, p.num_cols0, p.num_cols1, in_bytes, out_bytes};
    return simulate(layout.view, t, *curves, comm, steal);
}

// Nanoseconds that search.h predicts for the serial order's tiles alone.
extern "C" Ns moeflex_greedy(Ns tiles0, Ns tiles1, int ns0, int ns1, int blocks) {
    return greedy_ns(tiles0, tiles1, ns0, ns1, blocks);
}

// The best key found by `lanes` lanes apart from each other.
extern "C" unsigned long long moeflex_search(const Traffic* traffic, const Curves* curves,
                                             int lanes) {
    unsigned long long best = ~0ull;
    for (int lane = 0; lane < lanes; ++lane)
        best = std::min(best, search_lane(*traffic, *curves, lane, lanes));
    return best;
}
