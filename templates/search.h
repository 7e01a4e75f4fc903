// How a layer's blocks are split between computing and communicating, searched after routing.
//
// A candidate is (communication blocks, chunks, end of the steal window). A small recurrence predicts its time from the
// layer's traffic and from measured curves; the shortest wins, the smaller index among equals. Integers only: host and
// device choose alike. Lanes evaluate candidates apart from each other and take the minimum of their keys.
//
// Source: Weave 2026, joint search over communication SMs and chunks; differs: the end of the steal window is searched
// too, as the chunk at whose completion the communication blocks go back; and the serial order is a candidate.
#pragma once
#include "scheduler.h"

namespace moeflex {

typedef long long Ns;

// What one rank moves and computes in this layer, known once the ids are.
struct Traffic {
    int num_row_tiles;
    int num_cols0, num_cols1;  // tiles of one row tile
    Ns in_bytes;               // pulled from other ranks, each token once
    Ns out_bytes;              // results sent home
};

// Measured on the machine; entries 0 .. num_blocks, the first unused.
struct Curves {
    int num_blocks;
    const int* bytes_per_us;  // [c] that c blocks move
    const int* gemm0_ns;      // [n] one tile while n blocks compute
    const int* gemm1_ns;
};

struct Split {
    int num_comm_blocks;  // all of them: the serial order
    int num_chunks;
    int window_chunks;    // the window ends when so many chunks are computed; 0: no stealing
    int num_steal_tiles;  // predicted number of tiles inside of the window
    Ns ns;                // predicted time
};

constexpr int kMaxCommChoices = 32, kNumChunkChoices = 6, kNumWindows = 4;
constexpr int kNumCandidates = kMaxCommChoices * kNumChunkChoices * kNumWindows;
// The place of a split that cannot be (half of one chunk as its window) is that of the serial order.
constexpr int kSerialCandidate = 2;

// What the search may choose from. The narrower ones are there to be compared with.
enum Schedule {
    kSpatialTemporal = 0,  // all candidates
    kSpatial = 1,          // blocks are split, chunks and stealing are not
    kSerial = 2,           // everything arrives, is computed, goes home
};

MOEFLEX_HD Ns transfer_ns(Ns bytes, int bytes_per_us) {
    return bytes > 0 ? (bytes * 1000 + bytes_per_us - 1) / bytes_per_us : 0;
}

// Compute blocks as a fluid. `work` is in block-nanoseconds.
struct Flow {
    Ns now;
    Ns steal_from;       // the communication blocks compute too from here on, while `open`
    int workers, extra;  // blocks without and on top by stealing
    bool open;
    Ns stolen;  // block-nanoseconds done by the extra blocks

    MOEFLEX_HD void run(Ns work_alone, Ns work_all) {
        if (!open) {
            now += (work_alone + workers - 1) / workers;
            return;
        }
        if (now < steal_from) {
            const Ns alone = (steal_from - now) * workers;
            if (alone >= work_alone) {
                now += (work_alone + workers - 1) / workers;
                return;
            }
            now = steal_from;
            // What is left, at the pace of all blocks.
            work_all -= work_alone > 0 ? work_all * alone / work_alone : 0;
        }
        const Ns took = (work_all + workers + extra - 1) / (workers + extra);
        now += took;
        stolen += took * extra;
    }
};

// When the last of all tiles ends, where blocks that are free at once take them in order: exact but for gemm1 tiles that
// wait for gemm0. A layer of a few waves is far from a fluid.
MOEFLEX_HD Ns greedy_ns(Ns tiles0, Ns tiles1, int ns0, int ns1, int blocks) {
    const Ns late = tiles0 % blocks, early = blocks - late;  // late: blocks with a gemm0 tile more
    const Ns start = tiles0 / blocks * ns0, gemm0_end = start + (late ? ns0 : 0);
    if (tiles1 == 0) return gemm0_end;
    // Tiles that an early block ends, and begins, before the late ones begin their first.
    const Ns whole = late ? ns0 / ns1 : 0, begun = late ? (ns0 + ns1 - 1) / ns1 : 0;
    const Ns last_early = early * begun >= tiles1 ? (tiles1 + early - 1) / early
                                                  : (tiles1 + late * begun + blocks - 1) / blocks;
    Ns end = start + last_early * ns1;
    if (late && early * whole < tiles1) {
        const Ns last_late = (tiles1 - early * whole + blocks - 1) / blocks;
        if (gemm0_end + last_late * ns1 < end) end = gemm0_end + last_late * ns1;
    }
    return end < gemm0_end ? gemm0_end : end;
}

// All blocks pull every row, compute every tile, and send every result.
MOEFLEX_HD Split predict_serial(const Traffic& t, const Curves& curves) {
    const int all = curves.num_blocks;
    const Ns rows = t.num_row_tiles;
    Split s;
    s.num_comm_blocks = all;
    s.num_chunks = 1;
    s.window_chunks = 1;
    s.num_steal_tiles = t.num_row_tiles * (t.num_cols0 + t.num_cols1);
    s.ns = transfer_ns(t.in_bytes, curves.bytes_per_us[all]) +
           greedy_ns(rows * t.num_cols0, rows * t.num_cols1, curves.gemm0_ns[all],
                     curves.gemm1_ns[all], all) +
           transfer_ns(t.out_bytes, curves.bytes_per_us[all]);
    return s;
}

// The time of one split. Chunk g is gemm0 when its rows are there; gemm1 of the chunk before follows; a computed chunk
// goes home by the communication blocks, the last one by all.
MOEFLEX_HD Split predict(const Traffic& t, const Curves& curves, int comm, int chunks, int window) {
    const int workers = curves.num_blocks - comm, all = curves.num_blocks;
    const int size = max_int(1, ceil_div(t.num_row_tiles, chunks));
    chunks = max_int(1, ceil_div(t.num_row_tiles, size));
    window = min_int(window, chunks);
    const Ns dispatch = transfer_ns(t.in_bytes, curves.bytes_per_us[comm]);
    Flow flow = {0, dispatch, workers, comm, window > 0, 0};
    Ns link_free = dispatch;  // when the communication blocks can send
    for (int g = 0; g <= chunks; ++g) {
        if (g < chunks) {
            const int rows = min_int(t.num_row_tiles, (g + 1) * size);
            const Ns here = t.num_row_tiles ? dispatch * rows / t.num_row_tiles : 0;
            // Its first tile starts with its own rows, its last one not before all rows are here.
            const Ns first =
                t.num_row_tiles ? dispatch * min_int(rows, g * size + 1) / t.num_row_tiles : 0;
            if (flow.now < first) flow.now = first;
            const Ns tiles = (Ns)(rows - g * size) * t.num_cols0;
            flow.run(tiles * curves.gemm0_ns[workers], tiles * curves.gemm0_ns[all]);
            const Ns least = here + curves.gemm0_ns[workers];
            if (flow.now < least) flow.now = least;
        }
        if (g > 0) {
            const int done = min_int(t.num_row_tiles, g * size), count = done - (g - 1) * size;
            const Ns tiles = (Ns)count * t.num_cols1;
            flow.run(tiles * curves.gemm1_ns[workers], tiles * curves.gemm1_ns[all]);
            // Blocks end within one tile of each other.
            const Ns ready =
                flow.now + (g == chunks ? curves.gemm1_ns[flow.open ? all : workers] * 3 / 4 : 0);
            if (g == window) {
                flow.open = false;
                if (link_free < ready) link_free = ready;
            }
            if (g > 0 && g >= window && g < chunks) {
                // Chunks computed inside of the window wait for its end.
                const int first = g == window ? 0 : (g - 1) * size;
                const Ns bytes = t.out_bytes * (done - first) / t.num_row_tiles;
                if (link_free < ready) link_free = ready;
                link_free += transfer_ns(bytes, curves.bytes_per_us[comm]);
            }
            if (g == chunks) {
                const int first = g == window ? 0 : (g - 1) * size;
                const Ns bytes =
                    t.num_row_tiles ? t.out_bytes * (done - first) / t.num_row_tiles : 0;
                // Between the last tile and the end every block sends; what is behind is sent by all, too.
                Ns rest = bytes;
                if (link_free > ready)
                    rest += (link_free - ready) * curves.bytes_per_us[comm] / 1000;
                link_free = ready + transfer_ns(rest, curves.bytes_per_us[all]);
            }
        }
    }
    Split s;
    s.num_comm_blocks = comm;
    s.num_chunks = chunks;
    s.window_chunks = window;
    const Ns tile_ns =
        max_int(1, (curves.gemm0_ns[all] * t.num_cols0 + curves.gemm1_ns[all] * t.num_cols1) /
                       max_int(1, t.num_cols0 + t.num_cols1));
    s.num_steal_tiles = (int)(flow.stolen / tile_ns);
    s.ns = link_free;
    return s;
}

MOEFLEX_HD int chunk_choice(int i) {
    return i < 4 ? i + 1 : i == 4 ? 6 : 8;
}

// Candidate `i` of kNumCandidates but the serial one; false where this machine or layer has no such one.
MOEFLEX_HD bool candidate(const Curves& curves, int i, int* comm, int* chunks, int* window) {
    const int step = ceil_div(curves.num_blocks - 1, kMaxCommChoices);
    *comm = 1 + i / (kNumChunkChoices * kNumWindows) * step;
    *chunks = chunk_choice(i / kNumWindows % kNumChunkChoices);
    const int w = i % kNumWindows;  // none, the first chunk, half of them, all
    *window = w == 0 ? 0 : w == 1 ? 1 : w == 2 ? *chunks / 2 : *chunks;
    if (w == 2 && *window <= 1) return false;
    if (w == 3 && *chunks == 1) return false;
    return *comm < curves.num_blocks;
}

MOEFLEX_HD bool is_allowed(Schedule schedule, int chunks, int window) {
    return schedule == kSpatialTemporal || (schedule == kSpatial && chunks == 1 && window == 0);
}

// The best key of the candidates of lane `lane`: predicted time, then index. Times stay below 2^47 ns.
MOEFLEX_HD unsigned long long search_lane(const Traffic& t, const Curves& curves, int lane,
                                          int lanes, Schedule schedule = kSpatialTemporal) {
    unsigned long long best = ~0ull;
    for (int i = lane; i < kNumCandidates; i += lanes) {
        Ns ns;
        int comm, chunks, window;
        if (i == kSerialCandidate) {
            if (schedule == kSpatial && curves.num_blocks > 1) continue;
            ns = predict_serial(t, curves).ns;
        } else {
            if (!candidate(curves, i, &comm, &chunks, &window)) continue;
            if (!is_allowed(schedule, chunks, window)) continue;
            ns = predict(t, curves, comm, chunks, window).ns;
        }
        const unsigned long long key = (unsigned long long)ns << 16 | (unsigned)i;
        if (key < best) best = key;
    }
    return best;
}

MOEFLEX_HD Split split_of(const Traffic& t, const Curves& curves, unsigned long long key) {
    const int i = (int)(key & 0xffff);
    if (i == kSerialCandidate) return predict_serial(t, curves);
    int comm, chunks, window;
    candidate(curves, i, &comm, &chunks, &window);
    return predict(t, curves, comm, chunks, window);
}

}  // namespace moeflex
