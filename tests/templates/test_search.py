"""The split of blocks that search.h chooses, beside a simulation of the schedule."""

from __future__ import annotations

import ctypes
import heapq
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cost_model import SHAPES, STATIC_COMM, Group, load

SIMULATOR = Path(__file__).resolve().parents[2] / "templates" / "simulator.cpp"


@pytest.fixture(scope="module")
def simulator(compile_cpp: Any) -> ctypes.CDLL:
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    return load(compile_cpp(SIMULATOR, *flags))


def test_simulated_times_keep_to_their_floors(simulator: ctypes.CDLL) -> None:
    """No faster than all blocks computing, nor than the link; one chunk without stealing adds up exactly."""
    for shape in SHAPES.values():
        group = Group(shape, 512)
        gemm0, gemm1 = group.curves.gemm0_ns[1], group.curves.gemm1_ns[1]
        t = group.traffic
        work = t.num_row_tiles * (t.num_cols0 * gemm0 + t.num_cols1 * gemm1)
        for comm, chunks, steal in ((1, 1, 0), (20, 4, 0), (60, 3, 200), (131, 8, 9999)):
            ns = group.simulate(simulator, comm, chunks, steal)
            assert ns * group.curves.num_blocks >= work
            assert ns >= (group.in_bytes + group.out_bytes) * 1000 // group.curves.bytes_per_us[132]
    # One block computes, one communicates: rows, then every tile, then everything home by both.
    alone = Group((8, 2, 256, 256), 16, num_blocks=2)
    t, curves = alone.traffic, alone.curves
    tiles = t.num_row_tiles * (t.num_cols0 * curves.gemm0_ns[1] + t.num_cols1 * curves.gemm1_ns[1])
    home = -(-alone.out_bytes * 1000 // curves.bytes_per_us[2])
    first = alone.simulate(simulator, 1, 1, 0)
    assert tiles + home <= first
    assert first <= tiles + home + -(-alone.in_bytes * 1000 // curves.bytes_per_us[1])


def test_lanes_do_not_change_the_choice(simulator: ctypes.CDLL) -> None:
    for tokens in (1, 64, 2048):
        group = Group(SHAPES["qwen3-30b"], tokens)
        assert len({group.search(simulator, lanes) for lanes in (1, 7, 128, 384)}) == 1


@pytest.mark.parametrize("num_blocks", [2, 3, 16, 132])
def test_a_choice_can_be_run(simulator: ctypes.CDLL, num_blocks: int) -> None:
    for tokens in (1, 40, 700):
        group = Group(SHAPES["deepseek-v2-lite"], tokens, num_blocks)
        verdict = group.judge(simulator, stride=max(1, num_blocks // 8))
        chosen = verdict.chosen
        assert 1 <= chosen.num_comm_blocks <= num_blocks
        assert 1 <= chosen.num_chunks <= max(1, group.traffic.num_row_tiles)
        assert 0 <= chosen.window_chunks <= chosen.num_chunks
        assert chosen.num_steal_tiles >= 0
        assert 0 < verdict.best_ns <= verdict.chosen_ns


def test_chosen_splits_beat_a_static_one_and_come_close_to_the_best(simulator: ctypes.CDLL) -> None:
    """On average over 16 groups: faster than the static split without chunks, nearer to the best than half of that."""
    ours, static = [], []
    for shape in SHAPES.values():
        for tokens in (512, 1024, 2048, 4096):
            group = Group(shape, tokens)
            verdict = group.judge(simulator, stride=16)
            ours.append(verdict.chosen_ns / verdict.best_ns)
            static.append(group.simulate(simulator, STATIC_COMM, 1, 0) / verdict.best_ns)
    assert np.mean(ours) - 1 < (np.mean(static) - 1) / 2


def _greedy(tiles0: int, tiles1: int, ns0: int, ns1: int, blocks: int) -> int:
    free = [0] * blocks
    for ns in [ns0] * tiles0 + [ns1] * tiles1:
        heapq.heapreplace(free, free[0] + ns)
    return max(free)


def test_serial_tiles_end_when_blocks_that_take_them_in_order_do(simulator: ctypes.CDLL) -> None:
    rng = np.random.default_rng(0)
    for _ in range(2000):
        tiles0, tiles1 = (int(n) for n in rng.integers(0, 60, 2))
        ns0, ns1, blocks = (int(n) for n in rng.integers(1, 14, 3))
        case = (tiles0, tiles1, ns0, ns1, blocks)
        assert simulator.moeflex_greedy(*case) == _greedy(*case), case


def test_the_serial_order_is_chosen_where_nothing_is_gained_by_overlap(
    simulator: ctypes.CDLL,
) -> None:
    """A layer of few, long tiles, and a machine of one block."""
    group = Group(SHAPES["phi-3.5-moe"], 512)
    verdict = group.judge(simulator, stride=16)
    assert verdict.chosen.num_comm_blocks == group.curves.num_blocks
    assert verdict.chosen_ns == verdict.serial_ns
    one = Group((8, 2, 256, 256), 16, num_blocks=1).judge(simulator, stride=1)
    assert one.chosen.num_comm_blocks == 1
    assert one.chosen_ns == one.serial_ns


def test_less_to_choose_from_is_not_predicted_to_be_faster(simulator: ctypes.CDLL) -> None:
    for shape in SHAPES.values():
        group = Group(shape, 1024)
        verdict = group.judge(simulator, stride=32)
        assert verdict.chosen.ns <= verdict.spatial.ns
        assert (verdict.spatial.num_chunks, verdict.spatial.num_steal_tiles) == (1, 0)
        assert verdict.spatial.num_comm_blocks < group.curves.num_blocks
