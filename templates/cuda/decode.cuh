// The whole MoE layer in one launch, for few tokens: expert weights are the M operand, up to
// kTokens rows of one expert the N operand, so that every active expert's weights are read once at
// memory speed.
//
//   plan        every block builds the same plan from the ids (no grid barrier)
//   warps 0-7   math role: two warpgroups take units in turn
//   warp 8      weight role: claims units in order, weights by TMA; never waits for activations, so
//   the weights of the down
//               projection are in flight before the gate/up units that they wait for are done
//   warps 9-10  token role: rows of x or h by cp.async; waits for the gate/up units of a down unit
//   combine     when all of y is there, a warp sums 256 columns of a token over k in fixed order
//
// A unit is kUnitRows weight rows times all of the contraction. Units are claimed in a topological
// order by running blocks only, so the launch needs no co-residency.
#pragma once
#include "activation.cuh"
#include "decode_plan.cuh"
#include "wgmma.cuh"

namespace moeflex {

// Control counters, zero at launch: [0] claim, [32] blocks done, [64] down units done, [96..)
// h_done [tiles].
struct DecodeWorkspace {
    int *claim, *blocks_done, *down_done, *h_done;

    MOEFLEX_DEVICE explicit DecodeWorkspace(const LayerArgs& args)
        : claim(args.control),
          blocks_done(args.control + 32),
          down_done(args.control + 64),
          h_done(args.control + 96) {}
};

template <class C>
struct Decode {
    using S = DecodeShape<C>;
    using Shared = DecodeShared<C>;
    using Element = typename C::Element;
    static constexpr int kN = S::kTokens, kBlockK = S::kBlockK, kSlabs = S::kSlabs;
    static constexpr bool kRowWeights = C::kWeightPosition != WeightPosition::kOutput;

    struct Unit {
        bool gate_up;
        int tile, column, num_steps;
    };

    const LayerArgs& args;
    Shared& shared;
    DecodeWorkspace work;
    int n0, n1;
    int num_gate_up = 0, num_units = 0;
    int last_stage = 0;  // stage of the last k step, freed when its products are complete
    RingPosition<C::kStages> stage;
    RingPosition<S::kUnitRing> claim;

    MOEFLEX_DEVICE Decode(const LayerArgs& a, Shared& s)
        : args(a),
          shared(s),
          work(a),
          n0(ceil_div(a.intermediate, S::kHiddenPerUnit)),
          n1(ceil_div(a.hidden, S::kUnitRows)) {}

    MOEFLEX_DEVICE void init_barriers() {
        if (threadIdx.x != 0) return;
        for (int i = 0; i < C::kStages; ++i) {
            shared.full[i].init(1 + 32 * S::kTokenWarps);
            shared.empty[i].init(1);
        }
        for (int i = 0; i < S::kUnitRing; ++i) {
            shared.unit_full[i].init(1);
            shared.unit_empty[i].init(8 + S::kTokenWarps);
        }
        fence_mbarrier_init();
    }

    // Tokens without a valid route get zeros.
    MOEFLEX_DEVICE void write_empty_tokens() {
        const float zeros[8] = {};
        for (int token = blockIdx.x; token < args.num_tokens; token += gridDim.x) {
            if (shared.num_valid[token]) continue;
            for (int i = threadIdx.x; i < args.hidden / 8; i += S::kNumThreads)
                store_result<typename C::Out, 8>(
                    args.out, static_cast<long long>(token) * args.hidden + i * 8, zeros);
        }
    }

    MOEFLEX_DEVICE Unit decode_unit(int number) const {
        bool gate_up = number < num_gate_up;
        int rest = gate_up ? number : number - num_gate_up, columns = gate_up ? n0 : n1;
        return Unit{gate_up, rest / columns, rest % columns,
                    ceil_div(gate_up ? args.hidden : args.intermediate, kBlockK)};
    }
    MOEFLEX_DEVICE int read_unit() {
        shared.unit_full[claim.index].wait(claim.parity);
        int number = *static_cast<volatile int*>(&shared.unit[claim.index]);
        __syncwarp();
        if ((threadIdx.x & 31) == 0) shared.unit_empty[claim.index].arrive();
        claim.advance();
        return number;
    }

    // ---- weight role (one thread)
    // ----------------------------------------------------------------------------------------

    // K-major: [2 atoms of 64 k][kUnitRows][128 bytes]; a gated gate/up atom interleaves 8 gate
    // rows and 8 up rows. MN-major: [kSlabs][128 k][64]; a gated gate/up unit has the gate slab
    // first. Paired: gate and up rows alternate in memory and stay so.
    MOEFLEX_DEVICE void load_weights(const TensorMap* gate, const TensorMap* up,
                                     const TensorMap* down, const Unit& unit, int expert, int k) {
        u8* dst = shared.weights[stage.index];
        Mbarrier* bar = &shared.full[stage.index];
        bar->arrive_expect(S::kWeightBytes);
        int k0 = k * kBlockK;
        bool mn_major = unit.gate_up ? C::kW13MnMajor : C::kW2MnMajor;
        if (mn_major) {
#pragma unroll
            for (int slab = 0; slab < kSlabs; ++slab) {
                bool split = unit.gate_up && C::kGated && !C::kPaired;
                const TensorMap* map = unit.gate_up ? (split && slab ? up : gate) : down;
                int row = split ? unit.column * S::kHiddenPerUnit
                                : unit.column * S::kUnitRows + 64 * slab;
                tma_load_3d(map, bar, dst + slab * 64 * kBlockK * 2, row, k0, expert, kEvictFirst);
            }
            return;
        }
#pragma unroll
        for (int atom = 0; atom < kBlockK / 64; ++atom) {
            u8* atom_dst = dst + atom * S::kAtomBytes;
            if (unit.gate_up && C::kGated && !C::kPaired)
                tma_load_5d(gate, bar, atom_dst, k0 + 64 * atom, 0, 0, unit.column * 4 * kSlabs,
                            expert, kEvictFirst);
            else
                tma_load_3d(unit.gate_up ? gate : down, bar, atom_dst, k0 + 64 * atom,
                            unit.column * S::kUnitRows, expert, kEvictFirst);
        }
    }

    MOEFLEX_DEVICE void weight_role(const TensorMap* gate, const TensorMap* up,
                                    const TensorMap* down) {
        int number = atomicAdd(work.claim, 1);
        for (;;) {
            shared.unit_empty[claim.index].wait(claim.parity ^ 1);
            *static_cast<volatile int*>(&shared.unit[claim.index]) = number;
            shared.unit_full[claim.index].arrive();
            claim.advance();
            if (number >= num_units) return;
            int next = atomicAdd(work.claim, 1);  // in flight while this unit is loaded
            Unit unit = decode_unit(number);
            int expert = shared.tile_expert[unit.tile];
#pragma unroll 1
            for (int k = 0; k < unit.num_steps; ++k) {
                shared.empty[stage.index].wait(stage.parity ^ 1);
                load_weights(gate, up, down, unit, expert, k);
                stage.advance();
            }
            number = next;
        }
    }

    // ---- token role (kTokenWarps warps)
    // ----------------------------------------------------------------------------------

    MOEFLEX_DEVICE void token_role() {
        int lane = threadIdx.x & 31, token_warp = (threadIdx.x >> 5) - 9;
        // A lane copies chunk c of rows r0, r0 + 2 * kTokenWarps, ...
        int c = lane & 15, r0 = (lane >> 4) + 2 * token_warp;
        constexpr int kRowsPerLane = kN / (2 * S::kTokenWarps);
        for (;;) {
            int number = read_unit();
            if (number >= num_units) return;
            Unit unit = decode_unit(number);
            int rows = shared.tile_rows[unit.tile], first = shared.tile_first[unit.tile];
            if (!unit.gate_up) {
                if (lane == 0) wait_at_least(work.h_done + unit.tile, n0);
                __syncwarp();  // the other lanes are ordered behind the acquire of lane 0
            }
            int width = unit.gate_up ? args.hidden : args.intermediate;
            const u8* src[kRowsPerLane];
#pragma unroll
            for (int j = 0; j < kRowsPerLane; ++j) {
                int r = 2 * S::kTokenWarps * j + r0,
                    route = r < rows ? shared.routes[first + r] : 0;
                const u8* base = unit.gate_up ? static_cast<const u8*>(args.x) : args.h;
                src[j] = base + static_cast<long long>(unit.gate_up ? route / args.top_k : route) *
                                    width * 2;
            }
#pragma unroll 1
            for (int k = 0; k < unit.num_steps; ++k) {
                shared.empty[stage.index].wait(stage.parity ^ 1);
                u32 dst = shared_address(shared.tokens[stage.index]) + (c >> 3) * (kN * 128);
                bool in_row = k * kBlockK + c * 8 < width;
                int offset = in_row ? (k * kBlockK + c * 8) * 2 : 0;
#pragma unroll
                for (int j = 0; j < kRowsPerLane; ++j) {
                    int r = 2 * S::kTokenWarps * j + r0;
                    if (r < rows)
                        cp_async_16(dst + r * 128 + (((c & 7) ^ (r & 7)) << 4), src[j] + offset,
                                    in_row);
                }
                shared.full[stage.index].arrive_after_cp_async();
                stage.advance();
            }
        }
    }

    // ---- math role (two warpgroups in turn)
    // --------------------------------------------------------------------------------

    template <bool kMnMajor>
    MOEFLEX_DEVICE void multiply(float (&d)[kSlabs][kN / 2], int num_steps, int thread) {
        int previous = 0;
#pragma unroll 1
        for (int k = 0; k < num_steps; ++k) {
            shared.full[stage.index].wait(stage.parity);
            fence_async_shared();
#pragma unroll
            for (int slab = 0; slab < kSlabs; ++slab) pin_registers(d[slab]);
            wgmma_fence();
            u64 a0 = operand_descriptor<kMnMajor>(shared_address(shared.weights[stage.index]),
                                                  64 * kBlockK * 2);
            u64 b0 = operand_descriptor<false>(shared_address(shared.tokens[stage.index]), 0);
#pragma unroll
            for (int i = 0; i < kBlockK / 16; ++i) {
#pragma unroll
                for (int slab = 0; slab < kSlabs; ++slab) {
                    u64 a = kMnMajor ? a0 + ((slab * 64 * kBlockK * 2) >> 4) + i * kStepUnits<true>
                                     : a0 + ((i / 4 * S::kAtomBytes + slab * 64 * 128) >> 4) +
                                           (i % 4) * kStepUnits<false>;
                    Wgmma<Element, kN, kMnMajor, false>::run(
                        d[slab], a, b0 + ((i / 4 * kN * 128) >> 4) + (i % 4) * kStepUnits<false>,
                        (k | i) != 0);
                }
            }
            wgmma_commit();
#pragma unroll
            for (int slab = 0; slab < kSlabs; ++slab) pin_registers(d[slab]);
            if (k > 0) {
                wgmma_wait<1>();
                if (thread == 0) shared.empty[previous].arrive();
            }
            previous = stage.index;
            stage.advance();
        }
        last_stage = previous;
    }

    // h[route, column] of one accumulator pair.
    MOEFLEX_DEVICE void store_h(float gate, float up, int expert, int route, int column) {
        if constexpr (kRowWeights) {
            float weight = C::Weight::load(args.weights, route);
            if constexpr (C::kWeightPosition == WeightPosition::kInput) {
                gate *= weight;
                up *= weight;
            }
            if constexpr (C::kBias13) add_bias13(gate, up, expert, column);
            float value = activate<C>(gate, up);
            if constexpr (C::kWeightPosition == WeightPosition::kHidden) value *= weight;
            write_h(value, route, column);
        } else {
            if constexpr (C::kBias13) add_bias13(gate, up, expert, column);
            write_h(activate<C>(gate, up), route, column);
        }
    }
    MOEFLEX_DEVICE void write_h(float value, int route, int column) {
        reinterpret_cast<u16*>(args.h)[static_cast<long long>(route) * args.intermediate + column] =
            Element::round(value);
    }
    MOEFLEX_DEVICE void add_bias13(float& gate, float& up, int expert, int column) {
        long long index = static_cast<long long>(expert) * args.bias13_expert_stride +
                          static_cast<long long>(column) * C::kBias13Stride;
        gate += Element::load(args.bias_gate, index);
        if constexpr (C::kGated) up += Element::load(args.bias_up, index);
    }

    // d[slab][4 * j + i]: weight row 16 * warp + lane / 4 + 8 * (i / 2) of the slab, token 8 * j +
    // 2 * (lane % 4) + i % 2.
    MOEFLEX_DEVICE void finish_slabs(float (&d)[kSlabs][kN / 2], const Unit& unit, int thread) {
        int warp = thread >> 5, lane = thread & 31, rows = shared.tile_rows[unit.tile],
            first = shared.tile_first[unit.tile];
        int expert = shared.tile_expert[unit.tile], column0 = unit.column * S::kHiddenPerUnit;
#pragma unroll
        for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int token = 8 * j + 2 * (lane & 3) + i;
                if (token >= rows) continue;
                int route = shared.routes[first + token];
                if constexpr (C::kGated && !C::kW13MnMajor) {
#pragma unroll
                    for (int slab = 0; slab < kSlabs; ++slab) {
                        int column = column0 + slab * 32 + 8 * warp + lane / 4;
                        float a = d[slab][4 * j + i], b = d[slab][4 * j + 2 + i];
                        if (column < args.intermediate)
                            store_h(args.up_first ? b : a, args.up_first ? a : b, expert, route,
                                    column);
                    }
                } else {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        int row = 16 * warp + lane / 4 + 8 * half;
                        if constexpr (C::kGated) {
                            if (column0 + row < args.intermediate)
                                store_h(d[0][4 * j + 2 * half + i],
                                        d[kSlabs - 1][4 * j + 2 * half + i], expert, route,
                                        column0 + row);
                        } else {
#pragma unroll
                            for (int slab = 0; slab < kSlabs; ++slab)
                                if (column0 + slab * 64 + row < args.intermediate)
                                    store_h(d[slab][4 * j + 2 * half + i], 0.f, expert, route,
                                            column0 + slab * 64 + row);
                        }
                    }
                }
            }
        }
    }

    MOEFLEX_DEVICE void finish_gate_up(float (&d)[kSlabs][kN / 2], const Unit& unit, int warpgroup,
                                       int thread) {
        if constexpr (C::kPaired)
            finish_paired(d, unit, thread);
        else
            finish_slabs(d, unit, thread);
        named_barrier(1 + warpgroup, 128);
        if (thread == 0) add_release(work.h_done + unit.tile, 1);
    }

    // Weight rows 2 * r and 2 * r + 1 are gate and up of column r: they lie in lanes four apart.
    // The lower lane finishes the even token of a pair, the upper the odd one.
    MOEFLEX_DEVICE void finish_paired(float (&d)[kSlabs][kN / 2], const Unit& unit, int thread) {
        int warp = thread >> 5, lane = thread & 31, rows = shared.tile_rows[unit.tile],
            first = shared.tile_first[unit.tile];
        int expert = shared.tile_expert[unit.tile], odd = (lane >> 2) & 1;
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int column = unit.column * (S::kUnitRows / 2) + slab * 32 + 8 * warp + 4 * half +
                             (lane >> 3);
#pragma unroll
                for (int j = 0; j < kN / 8; ++j) {
                    float low = d[slab][4 * j + 2 * half], high = d[slab][4 * j + 2 * half + 1];
                    float other = __shfl_xor_sync(~0u, odd ? low : high, 4);
                    float even_row = odd ? other : low, odd_row = odd ? high : other;
                    int token = 8 * j + 2 * (lane & 3) + odd;
                    if (token < rows && column < args.intermediate)
                        store_h(args.up_first ? odd_row : even_row,
                                args.up_first ? even_row : odd_row, expert,
                                shared.routes[first + token], column);
                }
            }
        }
    }

    MOEFLEX_DEVICE void write_y(float value, int route, int column) {
        __stcg(
            reinterpret_cast<u16*>(args.y) + static_cast<long long>(route) * args.hidden + column,
            Element::round(value));
    }

    MOEFLEX_DEVICE void finish_down(float (&d)[kSlabs][kN / 2], const Unit& unit, int warpgroup,
                                    int thread) {
        int warp = thread >> 5, lane = thread & 31, rows = shared.tile_rows[unit.tile],
            first = shared.tile_first[unit.tile];
        int column0 = unit.column * S::kUnitRows;
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int column = column0 + slab * 64 + 16 * warp + lane / 4 + 8 * half;
                if (column >= args.hidden) continue;
                float bias = 0.f;
                if constexpr (C::kBias2)
                    bias = Element::load(
                        args.bias_down,
                        static_cast<long long>(shared.tile_expert[unit.tile]) * args.hidden +
                            column);
#pragma unroll
                for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        int token = 8 * j + 2 * (lane & 3) + i;
                        if (token < rows)
                            write_y(d[slab][4 * j + 2 * half + i] + bias,
                                    shared.routes[first + token], column);
                    }
                }
            }
        }
        named_barrier(1 + warpgroup, 128);
        if (thread == 0) add_release(work.down_done, 1);
    }

    // All of y is there: a warp sums 256 columns of a token, over k in order.
    MOEFLEX_DEVICE void combine() {
        int lane = threadIdx.x & 31, num_vectors = args.hidden / 8,
            segments = ceil_div(num_vectors, 32);
        if (lane == 0) wait_at_least(work.down_done, num_units - num_gate_up);
        __syncwarp();
        int warp = blockIdx.x * 8 + (threadIdx.x >> 5), num_warps = gridDim.x * 8;
        for (int item = warp; item < args.num_tokens * segments; item += num_warps) {
            int token = item / segments, vector = item % segments * 32 + lane;
            if (!shared.num_valid[token] || vector >= num_vectors) continue;
            float sum[8] = {};
            for (int k0 = 0; k0 < args.top_k; k0 += 8) {
                uint4 part[8];
                float weight[8];
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    int route = token * args.top_k + k0 + j;
                    bool valid =
                        k0 + j < args.top_k && load_expert<typename C::Index>(args, route) >= 0;
                    weight[j] = !valid        ? 0.f
                                : kRowWeights ? 1.f
                                              : C::Weight::load(args.weights, route);
                    const uint4* src = reinterpret_cast<const uint4*>(args.y) +
                                       static_cast<long long>(route) * num_vectors + vector;
                    part[j] = valid ? __ldcg(src) : uint4{0, 0, 0, 0};
                }
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const u32* pair = &part[j].x;
#pragma unroll
                    for (int z = 0; z < 4; ++z) {
                        sum[2 * z] += weight[j] * Element::low(pair[z]);
                        sum[2 * z + 1] += weight[j] * Element::high(pair[z]);
                    }
                }
            }
            store_result<typename C::Out, 8>(
                args.out, static_cast<long long>(token) * args.hidden + vector * 8, sum);
        }
    }

    MOEFLEX_DEVICE void math_role() {
        int warpgroup = threadIdx.x >> 7, thread = threadIdx.x & 127;
        if (warpgroup == 1) named_barrier_arrive(3, 256);  // warpgroup 0 goes first
        for (int turn = 0;; turn ^= 1) {
            int number = read_unit();
            if (number >= num_units) return;
            Unit unit = decode_unit(number);
            if (turn != warpgroup) {
                stage.advance(unit.num_steps);
                continue;
            }
            // The other warpgroup has seen all its stages full: a parity wait below cannot match an
            // older phase.
            named_barrier(3 + warpgroup, 256);
            float d[kSlabs][kN / 2];
            if constexpr (C::kW13MnMajor == C::kW2MnMajor) {
                multiply<C::kW13MnMajor>(d, unit.num_steps, thread);
            } else {
                if (unit.gate_up)
                    multiply<C::kW13MnMajor>(d, unit.num_steps, thread);
                else
                    multiply<C::kW2MnMajor>(d, unit.num_steps, thread);
            }
            named_barrier_arrive(4 - warpgroup, 256);
            wgmma_wait<0>();
#pragma unroll
            for (int slab = 0; slab < kSlabs; ++slab) pin_registers(d[slab]);
            if (thread == 0) shared.empty[last_stage].arrive();
            if (unit.gate_up)
                finish_gate_up(d, unit, warpgroup, thread);
            else
                finish_down(d, unit, warpgroup, thread);
        }
    }

    MOEFLEX_DEVICE void restore_control() {
        __syncthreads();
        bool last = threadIdx.x == 0 &&
                    fetch_add_acq_rel(work.blocks_done, 1) == static_cast<int>(gridDim.x) - 1;
        if (!__syncthreads_or(last)) return;
        for (int i = threadIdx.x; i < 96 + shared.num_tiles; i += S::kNumThreads)
            args.control[i] = 0;
    }

    MOEFLEX_DEVICE void run(const TensorMap* gate, const TensorMap* up, const TensorMap* down) {
        if (threadIdx.x == 0) {
            prefetch_map(gate);
            prefetch_map(up);
            prefetch_map(down);
        }
        init_barriers();
        DecodePlanner<C>{args, shared}.run();
        num_gate_up = shared.num_tiles * n0;
        num_units = num_gate_up + shared.num_tiles * n1;
        write_empty_tokens();
        int warp = threadIdx.x >> 5;
        if (warp < 8) {
            math_role();
            combine();
        } else if (warp > 8) {
            token_role();
        } else {
            if ((threadIdx.x & 31) == 0) weight_role(gate, up, down);
            __syncwarp();  // the barriers below want whole warps
        }
        restore_control();
    }
};

}  // namespace moeflex
