// The whole MoE layer in one launch, for many tokens: tokens are the M operand, 128 rows of one
// expert a tile.
//
//   prologue   every block counts its share of the routes; two grid barriers; rows of one expert
//   become contiguous warps 0-3  load role: claim tiles in order, gather token rows by cp.async
//   (gate/up) or load h by TMA (down), weights by TMA warps 4-11 math role: two warpgroups of 64
//   rows; wgmma, activation, store of h or y by TMA combine    a warp a token: weighted sum over k
//   in fixed order, a slice of columns at a time; warps 1-3 while the down
//              projection of later slices runs, all warps at the end
//
// The grid must be resident at once (cooperative launch). Tiles are claimed in a topological order,
// so that a tile waits only for tiles that running blocks already hold.
#pragma once
#include "prefill_finish.cuh"
#include "prefill_plan.cuh"
#include "wgmma.cuh"

namespace moeflex {

// A claimed tile, decoded by the leader of the load role: the others would each wait for the tables
// in memory.
struct ClaimedTile {
    int stage, expert, row_tile, column, rows;
};

template <class C>
struct PrefillShared {
    using S = PrefillShape<C>;
    alignas(1024) u8 a[C::kStages][S::kABytes];
    alignas(1024) u8 b[C::kStages][S::kBBytes];
    alignas(1024) u8 out[2][64 * 128 * 2];
    Mbarrier full[C::kStages], empty[C::kStages];
    Mbarrier tile_full[S::kTileRing], tile_empty[S::kTileRing];
    ClaimedTile tile[S::kTileRing];
    int num_row_tiles;
};

template <class C>
struct Prefill {
    using S = PrefillShape<C>;
    using Shared = PrefillShared<C>;
    using Element = typename C::Element;
    using Finish = PrefillFinish<C>;
    static constexpr int kBlockM = S::kBlockM, kBlockN = S::kBlockN, kBlockK = S::kBlockK;
    static constexpr bool kRowWeights = C::kWeightPosition != WeightPosition::kOutput;

    const LayerArgs& args;
    Shared& shared;
    PrefillWorkspace work;
    int n0, n1;         // column tiles of gate/up and down
    int slice_columns;  // column tiles of a slice of down
    RingPosition<C::kStages> stage;
    RingPosition<S::kTileRing> claim;

    MOEFLEX_DEVICE Prefill(const LayerArgs& a, Shared& s)
        : args(a),
          shared(s),
          work{a},
          n0(ceil_div(a.intermediate, S::kHiddenPerTile)),
          n1(ceil_div(a.hidden, kBlockN)),
          slice_columns(ceil_div(n1, C::kSlices)) {}

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

    // The leader of the load role claims and decodes; all warps of both roles read.
    // One chunk: all gate/up tiles, then the down projection in slices of columns, so that the
    // weighted sums of a slice run beside the products of the next.
    MOEFLEX_DEVICE void push_tile(int number) {
        PlanView view{};
        view.plan.num_cols0 = n0;
        view.tile_expert = work.tile_expert();
        view.expert_tile = work.expert_tile();
        int num_row_tiles = shared.num_row_tiles, rest = number - num_row_tiles * n0;
        Tile tile{kStop, 0, 0, 0};
        if (rest < 0) {
            tile = place(view, kGemm0, 0, num_row_tiles, number);
        } else if (rest < num_row_tiles * n1) {
            int slice = rest / (num_row_tiles * slice_columns);
            view.plan.num_cols1 = columns_of(slice);
            tile =
                place(view, kGemm1, 0, num_row_tiles, rest - slice * num_row_tiles * slice_columns);
            tile.col += slice * slice_columns;
        }
        int rows = tile.stage == kStop ? 0 : work.tile_rows()[tile.row_tile];
        shared.tile_empty[claim.index].wait(claim.parity ^ 1);
        shared.tile[claim.index] =
            ClaimedTile{tile.stage, tile.expert, tile.row_tile, tile.col, rows};
        shared.tile_full[claim.index].arrive();
    }
    MOEFLEX_DEVICE int columns_of(int slice) const {
        return min_int(slice_columns, n1 - slice * slice_columns);
    }
    MOEFLEX_DEVICE ClaimedTile pop_tile(int num_warps = 1) {
        shared.tile_full[claim.index].wait(claim.parity);
        ClaimedTile tile = shared.tile[claim.index];
        __syncwarp();
        if ((threadIdx.x & 31) == 0) shared.tile_empty[claim.index].arrive(num_warps);
        claim.advance();
        return tile;
    }

    // ---- load role
    // -----------------------------------------------------------------------------------------------------

    // `kRows` rows of one expert's matrix at k step `k`: [kRows][64 k] K-major, [kRows / 64][64
    // k][64] MN-major.
    template <bool kMnMajor, int kRows>
    MOEFLEX_DEVICE void load_weights(const TensorMap* map, Mbarrier* bar, u8* dst, int k, int row,
                                     int expert) {
        if constexpr (kMnMajor) {
#pragma unroll
            for (int i = 0; i < kRows / 64; ++i)
                tma_load_3d(map, bar, dst + i * 64 * kBlockK * 2, row + 64 * i, k * kBlockK, expert,
                            kEvictNormal);
        } else {
            tma_load_3d(map, bar, dst, k * kBlockK, row, expert, kEvictNormal);
        }
    }

    MOEFLEX_DEVICE void load_gate_up_tile(const TensorMap* gate, const TensorMap* up,
                                          const ClaimedTile& tile) {
        int expert = tile.expert, rows = tile.rows, row0 = tile.row_tile * kBlockM;
        int hidden = args.hidden, num_steps = ceil_div(hidden, kBlockK);
        bool leader = threadIdx.x == 0;
        // A thread copies chunk c (16 bytes of a 128-byte row) of rows r0, r0 + 16, ...
        int r0 = threadIdx.x >> 3, c = threadIdx.x & 7;
        u32 dst0 = shared_address(shared.a[0]) + r0 * 128 + ((c ^ (r0 & 7)) << 4);
        u32 token[8];
#pragma unroll
        for (int j = 0; j < 8; ++j)
            token[j] =
                r0 + 16 * j < rows ? static_cast<u32>(work.row_token()[row0 + r0 + 16 * j]) : 0u;
#pragma unroll 1
        for (int k = 0; k < num_steps; ++k) {
            shared.empty[stage.index].wait(stage.parity ^ 1);
            Mbarrier* bar = &shared.full[stage.index];
            u8* b = shared.b[stage.index];
            if (leader) {
                bar->arrive_expect(S::kBBytes);
                if constexpr (C::kGated && !C::kPaired) {
                    load_weights<C::kW13MnMajor, 128>(gate, bar, b, k, tile.column * 128, expert);
                    load_weights<C::kW13MnMajor, 128>(up, bar, b + S::kBBytes / 2, k,
                                                      tile.column * 128, expert);
                } else {
                    load_weights<C::kW13MnMajor, 256>(gate, bar, b, k, tile.column * 256, expert);
                }
            }
            bool in_row = k * kBlockK + c * 8 < hidden;
            const u8* x = static_cast<const u8*>(args.x) + (in_row ? k * kBlockK * 2 + c * 16 : 0);
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (r0 + 16 * j < rows)
                    cp_async_16(dst0 + stage.index * S::kABytes + j * 2048,
                                x + static_cast<u64>(token[j]) * (hidden * 2), in_row);
            bar->arrive_after_cp_async();
            stage.advance();
        }
    }

    // The leader alone; it also makes the arrivals of the 128 gathering threads.
    MOEFLEX_DEVICE void load_down_tile(const TensorMap* h, const TensorMap* down,
                                       const ClaimedTile& tile) {
        int row0 = tile.row_tile * kBlockM, column = tile.column * kBlockN,
            num_steps = ceil_div(args.intermediate, kBlockK);
        wait_at_least(work.h_done(tile.row_tile), n0 * (tile.rows > 64 ? 2 : 1));
        fence_async_all();
#pragma unroll 1
        for (int k = 0; k < num_steps; ++k) {
            shared.empty[stage.index].wait(stage.parity ^ 1);
            Mbarrier* bar = &shared.full[stage.index];
            bar->arrive_expect(S::kABytes + S::kBBytes);
            tma_load_2d(h, bar, shared.a[stage.index], k * kBlockK, row0, kEvictNormal);
            load_weights<C::kW2MnMajor, 256>(down, bar, shared.b[stage.index], k, column,
                                             tile.expert);
            bar->arrive(128);
            stage.advance();
        }
    }

    // Gate/up tiles come first: they need all four warps. From the first down tile on warp 0 loads
    // alone, and the other three sum the slices of the result that are complete.
    MOEFLEX_DEVICE void load_role(const TensorMap* gate, const TensorMap* up, const TensorMap* h,
                                  const TensorMap* down) {
        give_registers<C::kLoadRegisters>();
        bool leader = threadIdx.x == 0;
        int number = leader ? atomicAdd(work.tile_claim(), 1) : 0, num_warps = 1;
        for (;;) {
            if (leader) {
                push_tile(number);
                number = atomicAdd(work.tile_claim(), 1);  // in flight while this tile is loaded
            }
            ClaimedTile tile = pop_tile(num_warps);
            if (tile.stage == kStop) break;
            if (tile.stage == kGemm0) {
                load_gate_up_tile(gate, up, tile);
                continue;
            }
            if (threadIdx.x >= 32) break;
            num_warps = 4;
            if (leader) load_down_tile(h, down, tile);
            __syncwarp();
        }
        if (C::kSlices > 1 && threadIdx.x >= 32) {
            for (int slice = 0; slice < C::kSlices; ++slice) combine<1, 4, 200>(slice);
        }
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

    template <bool kMnMajor>
    MOEFLEX_DEVICE void multiply(float (&d)[128], int num_steps, int warpgroup, int thread,
                                 bool gathered) {
        u64 a0 = operand_descriptor<false>(shared_address(shared.a[0]) + warpgroup * 64 * 128, 0);
        u64 b0 = operand_descriptor<kMnMajor>(shared_address(shared.b[0]), 64 * kBlockK * 2);
        int previous = 0;
        // The stores of the last tile are published after two steps, outside of the inner loop: a
        // release is gpu-wide.
#pragma unroll 1
        for (int begin = 0, end = min_int(2, num_steps); begin < num_steps;
             begin = end, end = num_steps) {
#pragma unroll 1
            for (int k = begin; k < end; ++k) {
                u64 a = a0 + static_cast<u64>(stage.index * (S::kABytes >> 4));
                u64 b = b0 + static_cast<u64>(stage.index * (S::kBBytes >> 4));
                shared.full[stage.index].wait(stage.parity);
                if (gathered) fence_async_shared();
                pin_registers(d);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < kBlockK / 16; ++i)
                    Wgmma<Element, 256, false, kMnMajor>::run(
                        d, a + i * kStepUnits<false>, b + i * kStepUnits<kMnMajor>, (k | i) != 0);
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

    // A warpgroup without rows in this tile frees the stages. One thread sees them all full, and the
    // others wait for it: a warp that fell a ring behind would take a later phase of a barrier for
    // its own, one that ran ahead an older phase.
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

    // 64 rows x 128 columns of this warpgroup: packed pairs -> swizzled shared memory -> two bulk
    // stores, clipped at the tensor's edge. packed[2 * j + half] holds columns 8 * j + 2 * (lane %
    // 4) + {0, 1} of row 16 * warp + lane / 4 + 8 * half.
    MOEFLEX_DEVICE void store_half_tile(const u32 (&packed)[32], const TensorMap* map, int row,
                                        int column, int warpgroup, int thread) {
        int warp = thread >> 5, lane = thread & 31;
        if (thread == 0) tma_wait_read();
        named_barrier(1 + warpgroup, 128);
        int matrix_row = 16 * warp + ((lane >> 3) & 1) * 8 + (lane & 7);
        u32 base = shared_address(shared.out[warpgroup]) + matrix_row * 128;
#pragma unroll
        for (int g = 0; g < 16; g += 2) {
            int group = g + (lane >> 4);
            u32 dst = base + (group >> 3) * (64 * 128) + (((group & 7) ^ (matrix_row & 7)) << 4);
            store_matrix_x4(dst, packed[g * 2], packed[g * 2 + 1], packed[g * 2 + 2],
                            packed[g * 2 + 3]);
        }
        fence_async_shared();
        named_barrier(1 + warpgroup, 128);
        if (thread == 0) {
            tma_store_2d(map, shared.out[warpgroup], column, row);
            tma_store_2d(map, shared.out[warpgroup] + 64 * 128, column + 64, row);
            tma_commit();
        }
    }

    MOEFLEX_DEVICE void finish_gate_up(const float (&d)[128], const ClaimedTile& tile, int row,
                                       int warpgroup, int thread, const TensorMap* h) {
        float weight[2] = {1.f, 1.f};
        if constexpr (kRowWeights) {
            int first = row + 16 * (thread >> 5) + (thread & 31) / 4;
            weight[0] = work.row_weight()[first];
            weight[1] = work.row_weight()[first + 8];
        }
        int column0 = tile.column * S::kHiddenPerTile;
        u32 packed[32];
        if constexpr (C::kPaired)
            Finish::finish_paired_columns(args, d, packed, column0, tile.expert, weight);
        else
            Finish::template finish_columns<0>(args, d, packed, column0, tile.expert, weight);
        store_half_tile(packed, h, row, column0, warpgroup, thread);
        if constexpr (!C::kGated) {
            Finish::template finish_columns<64>(args, d, packed, column0 + 128, tile.expert,
                                                weight);
            store_half_tile(packed, h, row, column0 + 128, warpgroup, thread);
        }
    }

    MOEFLEX_DEVICE void finish_down(const float (&d)[128], const ClaimedTile& tile, int row,
                                    int warpgroup, int thread, const TensorMap* y) {
        int column0 = tile.column * kBlockN;
        u32 packed[32];
        Finish::template finish_down<0>(args, d, packed, column0, tile.expert);
        store_half_tile(packed, y, row, column0, warpgroup, thread);
        Finish::template finish_down<64>(args, d, packed, column0 + 128, tile.expert);
        store_half_tile(packed, y, row, column0 + 128, warpgroup, thread);
    }

    MOEFLEX_DEVICE void math_role(const TensorMap* h_store, const TensorMap* y_store) {
        take_registers<C::kMathRegisters>();
        int warpgroup = (threadIdx.x - 128) >> 7, thread = threadIdx.x & 127;
        for (;;) {
            ClaimedTile tile = pop_tile();
            if (tile.stage == kStop) break;
            bool gate_up = tile.stage == kGemm0;
            int num_steps = ceil_div(gate_up ? args.hidden : args.intermediate, kBlockK);
            int row = tile.row_tile * kBlockM + warpgroup * 64;
            // Never block with an unpublished tile: the tile that this one waits for may wait for
            // it.
            if (!shared.full[stage.index].test(stage.parity)) publish(thread);
            if (warpgroup == 1 && tile.rows <= 64) {
                skip_tile(num_steps, warpgroup, thread);
                continue;
            }
            float d[128];
            if constexpr (C::kW13MnMajor == C::kW2MnMajor) {
                multiply<C::kW13MnMajor>(d, num_steps, warpgroup, thread, gate_up);
            } else {
                if (gate_up)
                    multiply<C::kW13MnMajor>(d, num_steps, warpgroup, thread, true);
                else
                    multiply<C::kW2MnMajor>(d, num_steps, warpgroup, thread, false);
            }
            if (gate_up) {
                finish_gate_up(d, tile, row, warpgroup, thread, h_store);
                unpublished = work.h_done(tile.row_tile);
            } else {
                finish_down(d, tile, row, warpgroup, thread, y_store);
                unpublished = work.y_done(tile.column / slice_columns, tile.row_tile);
            }
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
        int begin = slice * slice_columns * (kBlockN / 8),
            end = min_int(row_vectors, begin + slice_columns * (kBlockN / 8));
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
                int row_tile = row / kBlockM, warpgroups = work.tile_rows()[row_tile] > 64 ? 2 : 1;
                wait_at_least<kSleepNs>(work.y_done(slice, row_tile),
                                        columns_of(slice) * warpgroups);
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

    // The last block leaves all counters at zero for the next launch.
    MOEFLEX_DEVICE void restore_control() {
        __syncthreads();
        bool last = threadIdx.x == 0 &&
                    fetch_add_acq_rel(work.blocks_done(), 1) == static_cast<int>(gridDim.x) - 1;
        if (!__syncthreads_or(last)) return;
        for (int i = threadIdx.x; i < work.num_counters(C::kSlices); i += S::kNumThreads)
            args.control[i] = 0;
    }

    MOEFLEX_DEVICE void run(const TensorMap* gate, const TensorMap* up, const TensorMap* down,
                            const TensorMap* h, const TensorMap* h_store,
                            const TensorMap* y_store) {
        if (threadIdx.x == 0) {
            prefetch_map(gate);
            prefetch_map(up);
            prefetch_map(down);
            prefetch_map(h);
            prefetch_map(h_store);
            prefetch_map(y_store);
        }
        init_barriers();
        PrefillPlanner<C>{args, work, &shared.num_row_tiles}.run(
            reinterpret_cast<int*>(shared.out[0]));
        if (__shfl_sync(~0u, threadIdx.x / 128, 0) == 0)
            load_role(gate, up, h, down);
        else
            math_role(h_store, y_store);
        restore_control();
    }
};

}  // namespace moeflex
