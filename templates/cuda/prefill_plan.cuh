// Prologue of the prefill kernel: rows of one expert become contiguous, cut into row tiles.
// Parallel form of scheduler.h's build_plan, with one height and rows aligned to it.
#pragma once
#include "layer_args.cuh"

namespace moeflex {

template <class C>
struct PrefillShape {
    static constexpr int kBlockM = 128, kBlockN = 256, kBlockK = 64;
    static constexpr int kABytes = kBlockM * kBlockK * 2, kBBytes = kBlockN * kBlockK * 2;
    static constexpr int kHiddenPerTile =
        C::kGated ? kBlockN / 2 : kBlockN;  // columns of h that a gate/up tile makes
    static constexpr int kTileRing = 4;
    static constexpr int kMaxExperts = 512;
    static constexpr int kNumThreads = 384;
};

// Views of the workspace, computed where they are used (a dozen live pointers would cost the
// accumulators registers). runtime/cuda_launch.py sizes it with the same formulas.
struct PrefillWorkspace {
    const LayerArgs& args;
    static constexpr int kBlockM = 128;

    MOEFLEX_DEVICE int num_routes() const { return args.num_tokens * args.top_k; }
    MOEFLEX_DEVICE int max_row_tiles() const {
        return num_routes() / kBlockM + min_int(args.num_experts, num_routes());
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
    // routes: row of a route (-1: none); expert and rows of a row tile; first row tile of an
    // expert; token and combine weight of a row
    MOEFLEX_DEVICE int* route_row() const { return args.routes; }
    MOEFLEX_DEVICE int* expert_tile() const { return args.routes + num_routes(); }
    MOEFLEX_DEVICE int* tile_expert() const { return expert_tile() + args.num_experts + 1; }
    MOEFLEX_DEVICE int* tile_rows() const { return tile_expert() + max_row_tiles(); }
    MOEFLEX_DEVICE int* row_token() const { return tile_rows() + max_row_tiles(); }
    MOEFLEX_DEVICE float* row_weight() const {
        return reinterpret_cast<float*>(row_token() + max_row_tiles() * kBlockM);
    }
};

template <class C>
struct PrefillPlanner {
    using S = PrefillShape<C>;
    using Index = typename C::Index;
    static constexpr int kBlockM = S::kBlockM;
    static constexpr bool kRowWeights = C::kWeightPosition != WeightPosition::kOutput;

    const LayerArgs& args;
    PrefillWorkspace work;
    int* num_row_tiles;  // shared memory

    MOEFLEX_DEVICE void grid_barrier(int needed) const {
        __syncthreads();
        if (threadIdx.x == 0) {
            add_release(work.grid_arrivals(), 1);
            wait_at_least(work.grid_arrivals(), needed);
        }
        __syncthreads();
    }

    // Counts, row tiles and the row of every route. `scratch`: 2 * kMaxExperts ints of shared
    // memory.
    MOEFLEX_DEVICE void run(int* scratch) const {
        int *local = scratch, *first = scratch + S::kMaxExperts;
        int num_routes = work.num_routes(), num_experts = args.num_experts, grid = gridDim.x,
            tid = threadIdx.x;
        for (int e = tid; e < num_experts; e += S::kNumThreads) local[e] = 0;
        __syncthreads();
        int share = ceil_div(num_routes, grid), begin = blockIdx.x * share,
            end = min_int(num_routes, begin + share);
        for (int i = begin + tid; i < end; i += S::kNumThreads) {
            int e = load_expert<Index>(args, i);
            work.route_row()[i] = e >= 0 ? atomicAdd(&local[e], 1) : -1;
        }
        __syncthreads();
        for (int e = tid; e < num_experts; e += S::kNumThreads) {
            int n = local[e];
            first[e] = n ? atomicAdd(work.counts() + e, n) : 0;
        }
        grid_barrier(grid);
        for (int e = tid; e < num_experts; e += S::kNumThreads)
            local[e] = __ldcg(work.counts() + e);
        __syncthreads();
        if (tid < 32) cut_row_tiles(local, first, tid);
        __syncthreads();
        for (int i = begin + tid; i < end; i += S::kNumThreads) {
            int rank = work.route_row()[i];
            if (rank < 0) continue;
            int row = first[load_expert<Index>(args, i)] + rank;
            work.route_row()[i] = row;
            work.row_token()[row] = i / args.top_k;
            if constexpr (kRowWeights) work.row_weight()[row] = C::Weight::load(args.weights, i);
        }
        grid_barrier(2 * grid);
    }

    // One warp. first[e] grows from this block's offset inside expert e to its first row.
    MOEFLEX_DEVICE void cut_row_tiles(const int* counts, int* first, int lane) const {
        int done = 0;
        for (int e0 = 0; e0 < args.num_experts; e0 += 32) {
            int e = e0 + lane, n = e < args.num_experts ? counts[e] : 0,
                tiles = ceil_div(n, kBlockM), scan = tiles;
#pragma unroll
            for (int delta = 1; delta < 32; delta <<= 1) {
                int below = __shfl_up_sync(~0u, scan, delta);
                if (lane >= delta) scan += below;
            }
            if (e < args.num_experts) {
                int tile0 = done + scan - tiles;
                first[e] += tile0 * kBlockM;
                if (blockIdx.x == 0) write_row_tiles(e, tile0, tiles, n);
            }
            done += __shfl_sync(~0u, scan, 31);
        }
        if (lane == 0) {
            *num_row_tiles = done;
            if (blockIdx.x == 0) work.expert_tile()[args.num_experts] = done;
        }
    }

    MOEFLEX_DEVICE void write_row_tiles(int e, int tile0, int tiles, int num_rows) const {
        work.expert_tile()[e] = tile0;
        for (int i = 0; i < tiles; ++i) {
            work.tile_expert()[tile0 + i] = e;
            work.tile_rows()[tile0 + i] = min_int(kBlockM, num_rows - i * kBlockM);
        }
    }
};

}  // namespace moeflex
