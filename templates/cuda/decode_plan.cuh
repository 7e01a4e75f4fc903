// Shapes and shared memory of the decode kernel, and its plan: routes by expert, cut into tiles.
#pragma once
#include "layer_args.cuh"

namespace moeflex {

template <class C>
struct DecodeShape {
    static constexpr int kTokens = C::kTokens, kBlockK = C::kBlockK,
                         kSlabs = C::kSlabs;  // slab: 64 weight rows
    static constexpr int kUnitRows = 64 * kSlabs;
    static constexpr int kHiddenPerUnit = C::kGated ? kUnitRows / 2 : kUnitRows;
    static constexpr int kWeightBytes = kUnitRows * kBlockK * 2,
                         kTokenBytes = kTokens * kBlockK * 2;
    static constexpr int kAtomBytes = kUnitRows * 128;  // K-major: 64 k of the unit
    static constexpr int kUnitRing = 8;
    static constexpr int kMaxExperts = 512, kMaxRoutes = C::kMaxRoutes;
    static constexpr int kMaxTiles =
        kMaxRoutes / kTokens + (kMaxExperts < kMaxRoutes ? kMaxExperts : kMaxRoutes);
    static constexpr int kTokenWarps = 2, kNumWarps = 8 + 1 + kTokenWarps,
                         kNumThreads = 32 * kNumWarps;
    static_assert(kBlockK == 128, "a token row of a stage is 16 chunks of 16 bytes");
    static_assert(!(C::kGated && C::kW13MnMajor && !C::kPaired) || kSlabs == 2,
                  "MN-major gate and up need a slab each");
};

template <class C>
struct DecodeShared {
    using S = DecodeShape<C>;
    alignas(1024) u8 weights[C::kStages][S::kWeightBytes];
    alignas(1024) u8 tokens[C::kStages][S::kTokenBytes];
    Mbarrier full[C::kStages], empty[C::kStages];
    Mbarrier unit_full[S::kUnitRing], unit_empty[S::kUnitRing];
    int unit[S::kUnitRing];
    int num_tiles;
    u16 routes[S::kMaxRoutes];  // routes by expert, stable
    u16 tile_expert[S::kMaxTiles], tile_first[S::kMaxTiles], tile_rows[S::kMaxTiles];
    u8 num_valid[S::kMaxRoutes];  // valid routes of a token
};

// Scratch of the plan, inside the stage buffers.
template <class C>
struct DecodePlanScratch {
    using S = DecodeShape<C>;
    int counts[S::kNumWarps][S::kMaxExperts];  // routes of a warp's share by expert, then its
                                               // offset inside the expert
    int first[S::kMaxExperts];
    u16 rank[S::kMaxRoutes];
    u16 expert[S::kMaxRoutes];  // kNoExpert: an invalid id
};
constexpr u16 kNoExpert = 0xFFFF;

template <class C>
struct DecodePlanner {
    using S = DecodeShape<C>;
    static constexpr int kN = S::kTokens;

    const LayerArgs& args;
    DecodeShared<C>& shared;

    // Stable order of the routes by expert, cut into tiles of up to kN rows. The same in every
    // block. The ids are read from memory once: each further pass over them would cost its latency.
    MOEFLEX_DEVICE void run() const {
        const int num_routes = args.num_tokens * args.top_k;
        auto& scratch = *reinterpret_cast<DecodePlanScratch<C>*>(shared.weights[0]);
        static_assert(sizeof(DecodePlanScratch<C>) <=
                      C::kStages * (S::kWeightBytes + S::kTokenBytes));
        int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, num_experts = args.num_experts;
#pragma unroll 4
        for (int i = tid; i < num_routes; i += S::kNumThreads)
            scratch.expert[i] = static_cast<u16>(load_expert<typename C::Index>(args, i));
        for (int e = tid; e < num_experts; e += S::kNumThreads) {
#pragma unroll
            for (int w = 0; w < S::kNumWarps; ++w) scratch.counts[w][e] = 0;
        }
        __syncthreads();
        for (int token = tid; token < args.num_tokens; token += S::kNumThreads) {
            int n = 0;
            for (int k = 0; k < args.top_k; ++k)
                n += scratch.expert[token * args.top_k + k] != kNoExpert;
            shared.num_valid[token] = static_cast<u8>(n);
        }
        int share = ceil_div(num_routes, S::kNumThreads) * 32, begin = warp * share,
            end = min_int(begin + share, num_routes);
        for (int i = begin + lane; i - lane < end; i += 32) {
            int e = i < end ? scratch.expert[i] : kNoExpert;
            u32 same = __match_any_sync(~0u, e);
            int rank = __popc(same & ((1u << lane) - 1));
            if (e != kNoExpert) scratch.rank[i] = static_cast<u16>(rank + scratch.counts[warp][e]);
            __syncwarp();
            if (e != kNoExpert && rank == 0) scratch.counts[warp][e] += __popc(same);
            __syncwarp();
        }
        __syncthreads();
        for (int e = tid; e < num_experts; e += S::kNumThreads) {
            int total = 0;
#pragma unroll
            for (int w = 0; w < S::kNumWarps; ++w) {
                int n = scratch.counts[w][e];
                scratch.counts[w][e] = total;
                total += n;
            }
            scratch.first[e] = total;
        }
        __syncthreads();
        if (warp == 0) cut_tiles(scratch.first, lane);
        __syncthreads();
        for (int i = begin + lane; i < end; i += 32) {
            int e = scratch.expert[i];
            if (e != kNoExpert)
                shared.routes[scratch.first[e] + scratch.counts[warp][e] + scratch.rank[i]] =
                    static_cast<u16>(i);
        }
        fence_async_shared();  // bulk copies overwrite the scratch
        __syncthreads();
    }

    // first[e]: number of routes of expert e on entry, its first position on return.
    MOEFLEX_DEVICE void cut_tiles(int* first, int lane) const {
        int routes_done = 0, tiles_done = 0;
        for (int e0 = 0; e0 < args.num_experts; e0 += 32) {
            int e = e0 + lane, n = e < args.num_experts ? first[e] : 0, tiles = ceil_div(n, kN),
                route_scan = n, tile_scan = tiles;
#pragma unroll
            for (int delta = 1; delta < 32; delta <<= 1) {
                int a = __shfl_up_sync(~0u, route_scan, delta),
                    b = __shfl_up_sync(~0u, tile_scan, delta);
                if (lane >= delta) {
                    route_scan += a;
                    tile_scan += b;
                }
            }
            int route0 = routes_done + route_scan - n, tile0 = tiles_done + tile_scan - tiles;
            if (e < args.num_experts) {
                first[e] = route0;
                for (int j = 0; j < tiles; ++j) {
                    shared.tile_expert[tile0 + j] = static_cast<u16>(e);
                    shared.tile_first[tile0 + j] = static_cast<u16>(route0 + j * kN);
                    shared.tile_rows[tile0 + j] = static_cast<u16>(min_int(kN, n - j * kN));
                }
            }
            routes_done += __shfl_sync(~0u, route_scan, 31);
            tiles_done += __shfl_sync(~0u, tile_scan, 31);
        }
        if (lane == 0) shared.num_tiles = tiles_done;
    }
};

}  // namespace moeflex
