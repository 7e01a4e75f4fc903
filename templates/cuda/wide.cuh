// The whole MoE layer in one launch, for many tokens: expert weights are the M operand, 256 rows a
// tile, and up to kTokens rows of one expert the N operand, so that a tile costs what its rows cost.
//
//   prologue    every block counts its share of the routes; two grid barriers; rows of one expert
//               become contiguous
//   warps 0-3   load role: claim tiles in order, gather token rows by cp.async (gate/up) or load h
//               by TMA (down), weights by TMA
//   warps 4-11  math role: two warpgroups of 128 weight rows; wgmma, activation, transpose, store
//               of h or y by TMA
//   combine     a warp a token: weighted sum over k in fixed order, a slice of columns at a time;
//               warps 1-3 while the down projection of later slices runs, all warps at the end
//
// The grid must be resident at once (cooperative launch). Tiles are claimed in a topological order,
// so that a tile waits only for tiles that running blocks already hold.
#pragma once
#include "wgmma.cuh"
#include "wide_finish.cuh"
#include "wide_plan.cuh"

namespace moeflex {

// A claimed tile, decoded by the leader of the load role.
struct ClaimedTile {
    int stage, expert, row_tile, column, rows, row;
};

template <class C>
struct WideShared {
    using S = WideShape<C>;
    alignas(1024) u8 weights[C::kStages][S::kWeightBytes];
    alignas(1024) u8 tokens[C::kStages][S::kTokenBytes];
    alignas(1024) u8 out[2][2][WideFinish<C>::kOutBytes];
    Mbarrier full[C::kStages], empty[C::kStages];
    Mbarrier tile_full[S::kTileRing], tile_empty[S::kTileRing];
    ClaimedTile tile[S::kTileRing];
    ExpertTables<S::kMaxExperts> tables;
};

template <class C>
struct Wide {
    using S = WideShape<C>;
    using Shared = WideShared<C>;
    using Element = typename C::Element;
    using Finish = WideFinish<C>;
    static constexpr int kBlockK = S::kBlockK, kAccumulators = Finish::kAccumulators;
    static constexpr int kRowsPerThread = S::kTokens / 16;  // of a gathering thread
    static constexpr bool kRowWeights = C::kWeightPosition != WeightPosition::kOutput;

    const LayerArgs& args;
    Shared& shared;
    WideWorkspace<C> work;
    int n0, n1;      // column tiles of gate/up and down
    int slice_cols;  // column tiles of a slice of down
    RingPosition<C::kStages> stage;
    RingPosition<S::kTileRing> claim;

    MOEFLEX_DEVICE Wide(const LayerArgs& a, Shared& s)
        : args(a),
          shared(s),
          work{a},
          n0(ceil_div(a.intermediate, S::kHiddenPerTile)),
          n1(ceil_div(a.hidden, S::kTileWeights)),
          slice_cols(ceil_div(n1, C::kSlices)) {}

    MOEFLEX_DEVICE void init_barriers() {
        if (threadIdx.x != 0) return;
        for (int i = 0; i < C::kStages; ++i) {
            shared.full[i].init(128 + 1);  // 128 gathering threads and the leader's expected bytes
            shared.empty[i].init(2);       // one thread of each math warpgroup
        }
        for (int i = 0; i < S::kTileRing; ++i) {
            shared.tile_full[i].init(1);
            shared.tile_empty[i].init(4 + 8);  // warps that read the claimed tile
        }
        fence_mbarrier_init();
    }

    // ---- claimed tiles
    // -----------------------------------------------------------------------------------------------------

    MOEFLEX_DEVICE ClaimedTile decode_tile(int number) const {
        const auto& tables = shared.tables;
        Tile tile = decode_sliced(order(), number);
        if (tile.stage == kStop) return ClaimedTile{kStop, 0, 0, 0, 0, 0};
        int e = tile.expert, inside = tile.row_tile - tables.first_tile[e];
        RowCut cut = cut_rows(tables.num_rows[e], C::kTokens);
        return ClaimedTile{tile.stage,
                           e,
                           tile.row_tile,
                           tile.col,
                           min_int(cut.tile_rows, tables.num_rows[e] - inside * cut.tile_rows),
                           tables.first_row[e] + inside * cut.stride};
    }
    MOEFLEX_DEVICE SlicedOrder order() const {
        return SlicedOrder{shared.tables.first_tile, args.num_experts, n0, n1, slice_cols};
    }
    // The leader of the load role pushes; all warps of both roles pop.
    MOEFLEX_DEVICE ClaimedTile push_tile(int number) {
        ClaimedTile tile = decode_tile(number);
        shared.tile_empty[pushed.index].wait(pushed.parity ^ 1);
        shared.tile[pushed.index] = tile;
        shared.tile_full[pushed.index].arrive();
        pushed.advance();
        return tile;
    }
    RingPosition<S::kTileRing> pushed;  // the leader's
    MOEFLEX_DEVICE ClaimedTile pop_tile() {
        shared.tile_full[claim.index].wait(claim.parity);
        ClaimedTile tile = shared.tile[claim.index];
        __syncwarp();
        if ((threadIdx.x & 31) == 0) shared.tile_empty[claim.index].arrive();
        claim.advance();
        return tile;
    }

    // ---- load role
    // -----------------------------------------------------------------------------------------------------

    // 256 weight rows at k step `k`, as slabs of 64; a warpgroup multiplies two. K-major: [256][64
    // k], gated with 8 gate rows and 8 up rows in turn. MN-major: [slab][64 k][64 rows], gated with
    // gate and up slabs in turn. Paired: gate and up rows alternate in memory and stay so.
    template <bool kGateUp>
    MOEFLEX_DEVICE void load_weights(const TensorMap* map, const TensorMap* up, Mbarrier* bar,
                                     u8* dst, int k, int column, int expert) {
        constexpr bool kMnMajor = kGateUp ? C::kW13MnMajor : C::kW2MnMajor;
        constexpr bool kTwo = kGateUp && C::kGated && !C::kPaired;
        if constexpr (kMnMajor) {
#pragma unroll
            for (int slab = 0; slab < 4; ++slab) {
                int row = kTwo ? column * 128 + 64 * (slab / 2) : column * 256 + 64 * slab;
                tma_load_3d(kTwo && slab % 2 ? up : map, bar, dst + slab * S::kSlabBytes, row,
                            k * kBlockK, expert, kEvictNormal);
            }
        } else if constexpr (kTwo) {
            tma_load_5d(map, bar, dst, k * kBlockK, 0, 0, column * 16, expert, kEvictNormal);
        } else {
            tma_load_3d(map, bar, dst, k * kBlockK, column * 256, expert, kEvictNormal);
        }
    }

    // Where rows r0, r0 + 16, ... of a tile lie in x, in chunks of 16 bytes.
    MOEFLEX_DEVICE void load_row_chunks(u32 (&chunk)[kRowsPerThread],
                                        const ClaimedTile& tile) const {
        int r0 = threadIdx.x >> 3;
#pragma unroll
        for (int j = 0; j < kRowsPerThread; ++j)
            chunk[j] =
                r0 + 16 * j < tile.rows
                    ? static_cast<u32>(work.row_token()[tile.row + r0 + 16 * j]) * (args.hidden / 8)
                    : 0u;
    }

    MOEFLEX_DEVICE void gather_step(const TensorMap* gate, const TensorMap* up,
                                    const ClaimedTile& tile, const u32 (&chunk)[kRowsPerThread],
                                    int k) {
        // A thread copies chunk c (16 bytes of a 128-byte row) of rows r0, r0 + 16, ...
        int r0 = threadIdx.x >> 3, c = threadIdx.x & 7;
        shared.empty[stage.index].wait(stage.parity ^ 1);
        Mbarrier* bar = &shared.full[stage.index];
        if (threadIdx.x == 0) {
            bar->arrive_expect(S::kWeightBytes);
            load_weights<true>(gate, up, bar, shared.weights[stage.index], k, tile.column,
                               tile.expert);
        }
        bool in_row = k * kBlockK + c * 8 < args.hidden;
        const u8* x = static_cast<const u8*>(args.x) + (in_row ? k * kBlockK * 2 + c * 16 : 0);
        u32 dst = shared_address(shared.tokens[stage.index]) + r0 * 128 + ((c ^ (r0 & 7)) << 4);
#pragma unroll
        for (int j = 0; j < kRowsPerThread; ++j)
            if (r0 + 16 * j < tile.rows)
                cp_async_16(dst + j * 2048, x + (static_cast<u64>(chunk[j]) << 4), in_row);
        bar->arrive_after_cp_async();
        stage.advance();
    }

    // All four warps, until the first tile of the down projection, which is returned. The next tile
    // is decoded, and its rows looked up, between the steps of this one: at its start the ring must
    // be refilled at once. `number`: the leader's next claim.
    MOEFLEX_DEVICE ClaimedTile gather_tiles(const TensorMap* gate, const TensorMap* up,
                                            int& number) {
        bool leader = threadIdx.x == 0;
        int num_steps = ceil_div(args.hidden, kBlockK);
        u32 chunk[kRowsPerThread];
        ClaimedTile tile = pop_tile();
        if (tile.stage == kGemm0) load_row_chunks(chunk, tile);
        while (tile.stage == kGemm0) {
            ClaimedTile next = tile;
            u32 next_chunk[kRowsPerThread];
#pragma unroll 1
            for (int part = 0, k = 0; part < 3; ++part) {
                int end = part < 2 ? min_int(num_steps, 2 * part + 1) : num_steps;
#pragma unroll 1
                for (; k < end; ++k) gather_step(gate, up, tile, chunk, k);
                if (part == 0 && leader) {
                    push_tile(number);
                    number = atomicAdd(work.tile_claim(), 1);  // in flight until the next tile
                }
                if (part == 1) {
                    next = pop_tile();
                    if (next.stage == kGemm0) load_row_chunks(next_chunk, next);
                }
            }
            tile = next;
#pragma unroll
            for (int j = 0; j < kRowsPerThread; ++j) chunk[j] = next_chunk[j];
        }
        return tile;
    }

    MOEFLEX_DEVICE void begin_down_step(const TensorMap* down, const ClaimedTile& tile, int k,
                                        int index) {
        Mbarrier* bar = &shared.full[index];
        bar->arrive_expect(S::kWeightBytes +
                           ceil_div(tile.rows, kRowTileAlignment) * (kRowTileAlignment * 128));
        load_weights<false>(down, down, bar, shared.weights[index], k, tile.column, tile.expert);
    }
    // Also makes the arrivals of the 128 gathering threads.
    MOEFLEX_DEVICE void end_down_step(const TensorMap* h, const ClaimedTile& tile, int k,
                                      int index) {
        Mbarrier* bar = &shared.full[index];
#pragma unroll 1
        for (int r = 0; r < tile.rows; r += kRowTileAlignment)
            tma_load_2d(h, bar, shared.tokens[index] + r * 128, k * kBlockK, tile.row + r,
                        kEvictNormal);
        bar->arrive(128);
    }

    // Weights of the free stages are in flight before the wait for h.
    MOEFLEX_DEVICE ClaimedTile load_down_tile(const TensorMap* h, const TensorMap* down,
                                              const ClaimedTile& tile, int& number) {
        int num_steps = ceil_div(args.intermediate, kBlockK), ahead = 0;
        auto begin = stage;
        while (ahead < min_int(num_steps, C::kStages) &&
               shared.empty[begin.index].test(begin.parity ^ 1)) {
            begin_down_step(down, tile, ahead++, begin.index);
            begin.advance();
        }
        wait_at_least(work.h_done(tile.row_tile), n0 * 2);
        fence_async_all();
        ClaimedTile next = tile;
        for (int part = 0, k = 0; part < 2; ++part) {
            int end = part == 0 ? 1 : num_steps;
#pragma unroll 1
            for (; k < end; ++k) {
                if (k >= ahead) {
                    shared.empty[stage.index].wait(stage.parity ^ 1);
                    begin_down_step(down, tile, k, stage.index);
                }
                end_down_step(h, tile, k, stage.index);
                stage.advance();
            }
            if (part == 0) {
                next = push_tile(number);
                number = atomicAdd(work.tile_claim(), 1);
                shared.tile_empty[claim.index].arrive(4);  // the load role's: only the leader reads
                claim.advance();
            }
        }
        return next;
    }

    // Gate/up tiles come first: they need all four warps. From the first down tile on the leader
    // loads alone, and the other three warps sum the slices of the result that are complete.
    MOEFLEX_DEVICE void load_role(const TensorMap* gate, const TensorMap* up, const TensorMap* down,
                                  const TensorMap* h) {
        give_registers<C::kLoadRegisters>();
        int number = 0;
        if (threadIdx.x == 0) {
            push_tile(atomicAdd(work.tile_claim(), 1));
            number = atomicAdd(work.tile_claim(), 1);
        }
        ClaimedTile tile = gather_tiles(gate, up, number);
        if (threadIdx.x == 0)
            while (tile.stage == kGemm1) tile = load_down_tile(h, down, tile, number);
        if (C::kSlices > 1 && threadIdx.x >= 32) {
            for (int slice = 0; slice < C::kSlices; ++slice) combine<1, 4, 200>(slice);
        }
        __syncwarp();  // the barriers at the end want whole warps
    }

    // ---- math role
    // -----------------------------------------------------------------------------------------------------

    int* unpublished =
        nullptr;  // counter of the tile whose stores are in flight (thread 0 of the warpgroup)

    // A tile is published while the next one computes, so that its stores are not waited for in
    // between.
    MOEFLEX_DEVICE void publish(int thread) {
        if (thread != 0 || !unpublished) return;
        tma_wait_written();
        fence_async_all();
        add_release(unpublished, 1);
        unpublished = nullptr;
    }

    template <bool kMnMajor, int kN>
    MOEFLEX_DEVICE void multiply(float (&d)[kAccumulators], int num_steps, int warpgroup,
                                 int thread, bool gathered) {
        u64 a0 = operand_descriptor<kMnMajor>(
            shared_address(shared.weights[0]) + warpgroup * 2 * S::kSlabBytes, S::kSlabBytes);
        u64 b0 = operand_descriptor<false>(shared_address(shared.tokens[0]), 0);
        int previous = 0;
        // The stores of the last tile are published after two steps, outside of the inner loop: a
        // release is gpu-wide.
#pragma unroll 1
        for (int begin = 0, end = min_int(2, num_steps); begin < num_steps;
             begin = end, end = num_steps) {
#pragma unroll 1
            for (int k = begin; k < end; ++k) {
                u64 a = a0 + static_cast<u64>(stage.index * (S::kWeightBytes >> 4));
                u64 b = b0 + static_cast<u64>(stage.index * (S::kTokenBytes >> 4));
                shared.full[stage.index].wait(stage.parity);
                if (gathered) fence_async_shared();
                pin_registers(d);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < kBlockK / 16; ++i) {
#pragma unroll
                    for (int slab = 0; slab < 2; ++slab)
                        Wgmma<Element, kN, kMnMajor, false>::run(
                            reinterpret_cast<float (&)[kN / 2]>(d[slab * Finish::kSlab]),
                            a + slab * (S::kSlabBytes >> 4) + i * kStepUnits<kMnMajor>,
                            b + i * kStepUnits<false>, (k | i) != 0);
                }
                wgmma_commit();
                pin_registers(d);
                if (k > 0) {
                    wgmma_wait<1>();
                    if (thread == 0) shared.empty[previous].arrive();
                }
                previous = stage.index;
                stage.advance();
            }
            publish(thread);
        }
        wgmma_wait<0>();
        pin_registers(d);
        if (thread == 0) shared.empty[previous].arrive();
    }

    // The smallest product that holds `rows` tokens.
    template <bool kMnMajor, int kN, int... kLarger>
    MOEFLEX_DEVICE void multiply_rows(float (&d)[kAccumulators], int rows, int num_steps,
                                      int warpgroup, int thread, bool gathered) {
        if constexpr (kN >= S::kTokens || sizeof...(kLarger) == 0) {
            multiply<kMnMajor, (kN < S::kTokens ? kN : S::kTokens)>(d, num_steps, warpgroup, thread,
                                                                    gathered);
        } else {
            if (rows <= kN)
                multiply<kMnMajor, kN>(d, num_steps, warpgroup, thread, gathered);
            else
                multiply_rows<kMnMajor, kLarger...>(d, rows, num_steps, warpgroup, thread,
                                                    gathered);
        }
    }
    template <bool kMnMajor>
    MOEFLEX_DEVICE void multiply_tile(float (&d)[kAccumulators], int rows, int num_steps,
                                      int warpgroup, int thread, bool gathered) {
        multiply_rows<kMnMajor, 16, 32, 48, 64, 80, 96, 104, 112, 120, 128, 136, 144>(
            d, rows, num_steps, warpgroup, thread, gathered);
    }

    // A warpgroup whose weight rows all lie beyond the matrix frees the stages. One thread sees them
    // all full, and the others wait for it: a warp that fell a ring behind would take a later phase
    // of a barrier for its own, one that ran ahead an older phase.
    MOEFLEX_DEVICE void skip_tile(int num_steps, int warpgroup, int thread) {
        if (thread == 0) {
            auto seen = stage;
            for (int k = 0; k < num_steps; ++k) {
                shared.full[seen.index].wait(seen.parity);
                if (k == 1) publish(thread);
                shared.empty[seen.index].arrive();
                seen.advance();
            }
            publish(thread);
        }
        named_barrier(1 + warpgroup, 128);
        stage.advance(num_steps);
    }

    MOEFLEX_DEVICE void math_role(const TensorMap* h, const TensorMap* y) {
        take_registers<C::kMathRegisters>();
        int warpgroup = (threadIdx.x - 128) >> 7, thread = threadIdx.x & 127;
        Finish finish{args, shared.out[warpgroup][0], warpgroup, thread};
        for (;;) {
            ClaimedTile tile = pop_tile();
            if (tile.stage == kStop) break;
            bool gate_up = tile.stage == kGemm0;
            int num_steps = ceil_div(gate_up ? args.hidden : args.intermediate, kBlockK);
            // First column of h or y of this warpgroup.
            int column0 = (2 * tile.column + warpgroup) *
                          (gate_up ? S::kHiddenPerTile / 2 : S::kTileWeights / 2);
            // Never block with an unpublished tile: the tile that this one waits for may wait for
            // it.
            if (!shared.full[stage.index].test(stage.parity)) publish(thread);
            if (column0 >= (gate_up ? args.intermediate : args.hidden)) {
                skip_tile(num_steps, warpgroup, thread);
            } else {
                float d[kAccumulators];
                if constexpr (C::kW13MnMajor == C::kW2MnMajor) {
                    multiply_tile<C::kW13MnMajor>(d, tile.rows, num_steps, warpgroup, thread,
                                                  gate_up);
                } else {
                    if (gate_up)
                        multiply_tile<C::kW13MnMajor>(d, tile.rows, num_steps, warpgroup, thread,
                                                      true);
                    else
                        multiply_tile<C::kW2MnMajor>(d, tile.rows, num_steps, warpgroup, thread,
                                                     false);
                }
                if (gate_up)
                    finish.gate_up(d, tile.expert, column0, tile.rows, tile.row,
                                   kRowWeights ? work.row_weight() + tile.row : nullptr, h);
                else
                    finish.down(d, tile.expert, column0, tile.rows, tile.row, y);
            }
            unpublished = gate_up ? work.h_done(tile.row_tile)
                                  : work.y_done(tile.column / slice_cols, tile.row_tile);
        }
        publish(thread);
        for (int slice = 0; slice < C::kSlices; ++slice) combine<2, 8, 20>(slice);
    }

    // ---- combine
    // -------------------------------------------------------------------------------------------------------

    // A warp a token: columns of one slice of out[token] = sum over k, in order, of weight[k] *
    // y[row of k], in fp32. A lane has kVectors * kBatch loads of 16 bytes in flight.
    template <int kVectors, int kBatch, int kSleepNs>
    MOEFLEX_DEVICE void combine(int slice) {
        int lane = threadIdx.x & 31, top_k = args.top_k, row_vectors = args.hidden / 8;
        int begin = slice * slice_cols * (S::kTileWeights / 8),
            end = min_int(row_vectors, begin + slice_cols * (S::kTileWeights / 8));
        if (begin >= end) return;
        const uint4* y = reinterpret_cast<const uint4*>(args.y);
        for (;;) {
            int token = lane == 0 ? atomicAdd(work.token_claim() + slice, 1) : 0;
            token = __shfl_sync(~0u, token, 0);
            if (token >= args.num_tokens) return;
            int row = lane < top_k ? work.route_row()[token * top_k + lane] : -1;
            float weight = 0.f;
            if (row >= 0) {
                weight = kRowWeights ? 1.f : C::Weight::load(args.weights, token * top_k + lane);
                wait_at_least<kSleepNs>(work.y_done(slice, work.route_tile()[token * top_k + lane]),
                                        slice_columns(order(), slice) * 2);
            }
            __syncwarp();
#pragma unroll 1
            for (int i = begin + lane; i - lane < end; i += 32 * kVectors) {
                float sum[kVectors][8] = {};
#pragma unroll 1
                for (int k0 = 0; k0 < top_k; k0 += kBatch) {
                    uint4 part[kVectors][kBatch];
#pragma unroll
                    for (int j = 0; j < kBatch; ++j) {
                        int r = __shfl_sync(~0u, row, (k0 + j) & 31);
                        bool valid = r >= 0 && k0 + j < top_k;
                        const uint4* src =
                            y + static_cast<long long>(valid ? r : 0) * row_vectors + i;
#pragma unroll
                        for (int v = 0; v < kVectors; ++v)
                            part[v][j] = valid && i + 32 * v < end ? __ldcg(src + 32 * v)
                                                                   : uint4{0, 0, 0, 0};
                    }
#pragma unroll
                    for (int j = 0; j < kBatch; ++j) {
                        float w = __shfl_sync(~0u, weight, (k0 + j) & 31);
                        if (k0 + j >= top_k) w = 0.f;
#pragma unroll
                        for (int v = 0; v < kVectors; ++v) {
                            const u32* pair = &part[v][j].x;
#pragma unroll
                            for (int z = 0; z < 4; ++z) {
                                sum[v][2 * z] += w * Element::low(pair[z]);
                                sum[v][2 * z + 1] += w * Element::high(pair[z]);
                            }
                        }
                    }
                }
#pragma unroll
                for (int v = 0; v < kVectors; ++v)
                    if (i + 32 * v < end)
                        store_result<typename C::Out, 8>(
                            args.out,
                            static_cast<long long>(token) * args.hidden + (i + 32 * v) * 8, sum[v]);
            }
        }
    }

    // The last block leaves all counters at zero for the next launch. The leader's last claim, which
    // nobody reads, is ordered before by the release.
    MOEFLEX_DEVICE void restore_control() {
        __syncthreads();
        bool last = threadIdx.x == 0 &&
                    fetch_add_acq_rel(work.blocks_done(), 1) == static_cast<int>(gridDim.x) - 1;
        if (!__syncthreads_or(last)) return;
        for (int i = threadIdx.x; i < work.num_counters(C::kSlices); i += S::kNumThreads)
            args.control[i] = 0;
    }

    MOEFLEX_DEVICE void run(const TensorMap* gate, const TensorMap* up, const TensorMap* down,
                            const TensorMap* h, const TensorMap* y) {
        if (threadIdx.x == 0) {
            prefetch_map(gate);
            prefetch_map(up);
            prefetch_map(down);
            prefetch_map(h);
            prefetch_map(y);
        }
        init_barriers();
        static_assert(S::kMaxExperts * sizeof(int) <= sizeof(shared.out));
        WidePlanner<C>{args, work, shared.tables, reinterpret_cast<int*>(shared.out[0][0])}.run();
        if (__shfl_sync(~0u, threadIdx.x / 128, 0) == 0)
            load_role(gate, up, down, h);
        else
            math_role(h, y);
        restore_control();
    }
};

}  // namespace moeflex
