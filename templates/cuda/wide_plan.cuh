// Prologue of the wide kernel: rows of one expert become contiguous, cut evenly into row tiles.
#pragma once
#include "layer_args.cuh"

namespace moeflex {

template <class C>
struct WideShape {
    static constexpr int kTokens = C::kTokens;  // most rows of a tile: N of the product
    static constexpr int kTileWeights = 256;    // weight rows of a tile: M of the product
    static constexpr int kBlockK = 64;
    static constexpr int kSlabBytes = 64 * kBlockK * 2;  // 64 weight rows of a stage
    static constexpr int kWeightBytes = kTileWeights / 64 * kSlabBytes,
                         kTokenBytes = kTokens * kBlockK * 2;
    // Columns of h that a gate/up tile makes.
    static constexpr int kHiddenPerTile = C::kGated ? kTileWeights / 2 : kTileWeights;
    static constexpr int kTileRing = 4;
    static constexpr int kMaxExperts = 512;
    static constexpr int kNumThreads = 384;
    static_assert(kTokens % 16 == 0 && kTokens <= 144, "two slabs: kTokens accumulators a thread");
};

// Where the rows of every expert lie; in shared memory, because the leader of the load role looks
// here at the start of every tile. Row tiles of an expert follow from its count.
template <int kMaxExperts>
struct ExpertTables {
    int first_tile[kMaxExperts + 1];
    int first_row[kMaxExperts];
    int num_rows[kMaxExperts];
};

// Views of the workspace, computed where they are used (a dozen live pointers would cost the
// accumulators registers). runtime/cuda_launch.py sizes it with the same formulas.
template <class C>
struct WideWorkspace {
    const LayerArgs& args;

    MOEFLEX_DEVICE int num_routes() const { return args.num_tokens * args.top_k; }
    MOEFLEX_DEVICE int max_row_tiles() const {
        return num_routes() / C::kTokens + min_int(args.num_experts, num_routes());
    }
    MOEFLEX_DEVICE int max_rows() const {
        return num_routes() + max_row_tiles() * kRowTileAlignment;
    }
    // control: zero at launch
    MOEFLEX_DEVICE int* tile_claim() const { return args.control; }
    MOEFLEX_DEVICE int* token_claim() const { return args.control + 32; }
    MOEFLEX_DEVICE int* grid_arrivals() const { return args.control + 64; }
    MOEFLEX_DEVICE int* blocks_done() const { return args.control + 96; }
    MOEFLEX_DEVICE int* counts() const { return args.control + 128; }
    MOEFLEX_DEVICE int* h_done(int row_tile) const {
        return counts() + args.num_experts + row_tile;
    }
    MOEFLEX_DEVICE int* y_done(int slice, int row_tile) const {
        return h_done((1 + slice) * max_row_tiles()) + row_tile;
    }
    MOEFLEX_DEVICE int num_counters(int num_slices) const {
        return 128 + args.num_experts + (1 + num_slices) * max_row_tiles();
    }
    // routes: row (-1: none) and row tile of a route; token and combine weight of a row
    MOEFLEX_DEVICE int* route_row() const { return args.routes; }
    MOEFLEX_DEVICE int* route_tile() const { return args.routes + num_routes(); }
    MOEFLEX_DEVICE int* row_token() const { return route_tile() + num_routes(); }
    MOEFLEX_DEVICE float* row_weight() const {
        return reinterpret_cast<float*>(row_token() + max_rows());
    }
};

template <class C>
struct WidePlanner {
    using S = WideShape<C>;
    using Index = typename C::Index;
    using Tables = ExpertTables<S::kMaxExperts>;
    static constexpr bool kRowWeights = C::kWeightPosition != WeightPosition::kOutput;

    const LayerArgs& args;
    WideWorkspace<C> work;
    Tables& tables;
    int* first;  // shared memory, [kMaxExperts]: offset of this block's rows inside an expert

    MOEFLEX_DEVICE void grid_barrier(int needed) const {
        __syncthreads();
        if (threadIdx.x == 0) {
            add_release(work.grid_arrivals(), 1);
            wait_at_least(work.grid_arrivals(), needed);
        }
        __syncthreads();
    }

    // Counts, tables and the row of every route.
    MOEFLEX_DEVICE void run() const {
        int num_routes = work.num_routes(), num_experts = args.num_experts, grid = gridDim.x,
            tid = threadIdx.x;
        for (int e = tid; e < num_experts; e += S::kNumThreads) tables.num_rows[e] = 0;
        __syncthreads();
        int share = ceil_div(num_routes, grid), begin = blockIdx.x * share,
            end = min_int(num_routes, begin + share);
        for (int i = begin + tid; i < end; i += S::kNumThreads) {
            int e = load_expert<Index>(args, i);
            work.route_row()[i] = e >= 0 ? atomicAdd(&tables.num_rows[e], 1) : -1;
        }
        __syncthreads();
        for (int e = tid; e < num_experts; e += S::kNumThreads) {
            int n = tables.num_rows[e];
            first[e] = n ? atomicAdd(work.counts() + e, n) : 0;
        }
        grid_barrier(grid);
        for (int e = tid; e < num_experts; e += S::kNumThreads)
            tables.num_rows[e] = __ldcg(work.counts() + e);
        __syncthreads();
        if (tid < 32) cut_experts(tid);
        __syncthreads();
        for (int i = begin + tid; i < end; i += S::kNumThreads) {
            int rank = work.route_row()[i];
            if (rank < 0) continue;
            int e = load_expert<Index>(args, i), place = first[e] + rank;
            RowCut cut = cut_rows(tables.num_rows[e], C::kTokens);
            int tile = place / cut.tile_rows;
            int row = tables.first_row[e] + tile * cut.stride + place - tile * cut.tile_rows;
            work.route_row()[i] = row;
            work.route_tile()[i] = tables.first_tile[e] + tile;
            work.row_token()[row] = i / args.top_k;
            if constexpr (kRowWeights) work.row_weight()[row] = C::Weight::load(args.weights, i);
        }
        grid_barrier(2 * grid);
    }

    // One warp: first row and first tile of every expert.
    MOEFLEX_DEVICE void cut_experts(int lane) const {
        int tiles_done = 0, rows_done = 0;
        for (int e0 = 0; e0 < args.num_experts; e0 += 32) {
            int e = e0 + lane;
            RowCut cut = cut_rows(e < args.num_experts ? tables.num_rows[e] : 0, C::kTokens);
            int tile_scan = cut.num_tiles, row_scan = cut.num_tiles * cut.stride;
#pragma unroll
            for (int delta = 1; delta < 32; delta <<= 1) {
                int tiles = __shfl_up_sync(~0u, tile_scan, delta),
                    rows = __shfl_up_sync(~0u, row_scan, delta);
                if (lane >= delta) {
                    tile_scan += tiles;
                    row_scan += rows;
                }
            }
            if (e < args.num_experts) {
                tables.first_tile[e] = tiles_done + tile_scan - cut.num_tiles;
                tables.first_row[e] = rows_done + row_scan - cut.num_tiles * cut.stride;
            }
            tiles_done += __shfl_sync(~0u, tile_scan, 31);
            rows_done += __shfl_sync(~0u, row_scan, 31);
        }
        if (lane == 0) tables.first_tile[args.num_experts] = tiles_done;
    }
};

}  // namespace moeflex
