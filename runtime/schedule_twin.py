"""The schedule of a layer over several ranks, planned and simulated on the CPU.

The code is that of the kernels (`templates/scheduler.h`, `search.h`) and of `templates/simulator.cpp`, compiled once a
machine. Curves are assumptions until a machine was calibrated: no time of this module was measured.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path

from moe_compiler.runtime import build, toolchain

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"
SCHEDULES = ("spatial+temporal", "spatial", "serial")
"""In the order of `moeflex::Schedule`."""


def _ints(names: str) -> list[tuple[str, type[ctypes.c_int]]]:
    return [(name, ctypes.c_int) for name in names.split()]


class Problem(ctypes.Structure):
    """`moeflex::Problem`."""

    _fields_ = [
        *_ints("num_tokens top_k num_experts hidden intermediate num_heights"),
        ("heights", ctypes.c_int * 4),
        *_ints(
            "row_align gemm0_cols gemm1_cols chunk_tiles combine_tokens arrivals world rank "
            "num_blocks num_comm_blocks"
        ),
    ]


class Curves(ctypes.Structure):
    """`moeflex::Curves`."""

    _fields_ = [
        ("num_blocks", ctypes.c_int),
        *((n, ctypes.POINTER(ctypes.c_int)) for n in ("bytes_per_us", "gemm0_ns", "gemm1_ns")),
    ]


class Split(ctypes.Structure):
    """`moeflex::Split`."""

    _fields_ = [
        *_ints("num_comm_blocks num_chunks window_chunks num_steal_tiles"),
        ("ns", ctypes.c_longlong),
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AssumedMachine:
    """GPUs of one node: tiles of fixed shape and speed, and a link that saturates.

    Attributes:
        num_blocks: SMs of a GPU.
        rows: rows of a tile.
        cols0: intermediate columns of one tile of GEMM0.
        cols1: hidden columns of one tile of GEMM1.
        link_gbps: bytes/ns that all blocks together move.
        link_blocks: blocks that move 63 % of that.
        tflops: of all blocks together.
    """

    num_blocks: int = 132
    rows: int = 128
    cols0: int = 128
    cols1: int = 256
    link_gbps: float = 369.0
    link_blocks: float = 10.0
    tflops: float = 600.0

    @property
    def title(self) -> str:
        """In words."""
        return f"{self.num_blocks} SMs at {self.tflops:.0f} TFLOP/s, a link of {self.link_gbps:.0f} GB/s"

    def curves(self, hidden: int, intermediate: int) -> Curves:
        """The curves of a layer's tiles; they hold their arrays alive."""
        ints = ctypes.c_int * (self.num_blocks + 1)
        flop_per_ns = self.tflops * 1e3 / self.num_blocks
        gemm0 = int(4 * self.rows * self.cols0 * hidden / flop_per_ns)
        gemm1 = int(2 * self.rows * self.cols1 * intermediate / flop_per_ns)
        speeds = [
            int(self.link_gbps * 1e3 * (1 - math.exp(-blocks / self.link_blocks)))
            for blocks in range(self.num_blocks + 1)
        ]
        length = self.num_blocks + 1
        arrays = (ints(*speeds), ints(*[gemm0] * length), ints(*[gemm1] * length))
        return Curves(
            self.num_blocks, *(ctypes.cast(a, ctypes.POINTER(ctypes.c_int)) for a in arrays)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The split that the search chooses for one layer on one rank, and its times.

    Attributes:
        num_rows: rows of this rank's experts.
        max_expert_rows: rows of its fullest expert.
        in_bytes: tokens pulled from other ranks, each once.
        out_bytes: results sent to other ranks.
        num_comm_sms: all blocks where the order is serial; 0 where nothing is routed to this rank.
        predicted_us: by the recurrence of the search.
        simulated_us: tile by tile.
    """

    num_rows: int
    max_expert_rows: int
    in_bytes: int
    out_bytes: int
    num_comm_sms: int = 0
    num_chunks: int = 0
    num_steal_tiles: int = 0
    predicted_us: float = 0.0
    simulated_us: float = 0.0


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled twin, from the build cache.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    compiler = toolchain.find_compiler()
    source = TEMPLATES / "simulator.cpp"
    flags = ("-std=c++17", "-O2", "-shared", "-fPIC", f"-I{TEMPLATES}")
    headers = {name: (TEMPLATES / name).read_text() for name in ("scheduler.h", "search.h")}
    unit = build.Unit(
        name="schedule-twin",
        source=source.read_text(),
        source_name="simulator.cpp",
        artifact_name="simulator.so",
        command=(*compiler.command, *flags, "{source}", "-o", "{artifact}"),
        inputs={**headers, "compiler": repr(compiler)},
    )
    return ctypes.CDLL(build.build(unit).path)


def plan_rank(
    counts: Sequence[int],
    *,
    shape: tuple[int, int, int, int],
    num_ranks: int,
    num_tokens: int,
    in_bytes: int,
    out_bytes: int,
    schedule: str = SCHEDULES[0],
    machine: AssumedMachine | None = None,
) -> RankPlan:
    """Search and simulate one layer on one rank.

    Args:
        counts: rows of each expert of this rank.
        shape: E, K, H, I of the model.
        num_ranks: R.
        num_tokens: tokens of this rank.
        in_bytes: see `RankPlan`.
        out_bytes: see `RankPlan`.
        schedule: one of `SCHEDULES`.
        machine: whose curves are taken; the assumed one by default.
    """
    machine = machine or AssumedMachine()
    _, top_k, hidden, intermediate = shape
    found = RankPlan(
        num_rows=sum(counts),
        max_expert_rows=max(counts, default=0),
        in_bytes=in_bytes,
        out_bytes=out_bytes,
    )
    if found.num_rows == 0:
        return found
    problem = Problem(
        num_tokens=num_tokens, top_k=top_k, num_experts=len(counts), hidden=hidden,
        intermediate=intermediate, num_heights=1, heights=(ctypes.c_int * 4)(*[machine.rows] * 4),
        row_align=1, gemm0_cols=machine.cols0, gemm1_cols=machine.cols1, chunk_tiles=1, arrivals=1,
        world=num_ranks, num_blocks=machine.num_blocks, num_comm_blocks=1,
    )  # fmt: skip
    split, simulated_ns = Split(), ctypes.c_longlong()
    library().moeflex_plan(
        ctypes.byref(problem),
        (ctypes.c_int * len(counts))(*counts),
        ctypes.byref(machine.curves(hidden, intermediate)),
        ctypes.c_longlong(in_bytes),
        ctypes.c_longlong(out_bytes),
        SCHEDULES.index(schedule),
        ctypes.byref(split),
        ctypes.byref(simulated_ns),
    )
    return dataclasses.replace(
        found,
        num_comm_sms=split.num_comm_blocks,
        num_chunks=split.num_chunks,
        num_steal_tiles=split.num_steal_tiles,
        predicted_us=split.ns / 1e3,
        simulated_us=simulated_ns.value / 1e3,
    )
