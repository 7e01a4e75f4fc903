"""How far the split that search.h chooses lies from the best one, on a SIMULATED machine.

    python benchmarks/cost_model.py       # writes results/cost_model.simulated.json

Every group is a shape and a number of tokens a rank at two ranks. The curves are assumptions (a link that saturates at
369 GB/s, tiles at 600 TFLOP/s over 132 blocks), the schedule is simulated tile by tile (templates/simulator.cpp), and
the optimum is the best of some thousand simulated splits. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import results_io  # noqa: E402
from moe_compiler.runtime import toolchain  # noqa: E402
from moe_compiler.runtime.schedule_twin import (  # noqa: E402
    AssumedMachine,
    Problem,
    Split,
)

MACHINE = AssumedMachine()
NUM_BLOCKS, TFLOPS = MACHINE.num_blocks, MACHINE.tflops
ROWS, COLS0, COLS1 = MACHINE.rows, MACHINE.cols0, MACHINE.cols1
STATIC_COMM = 20
# E, K, H, I
SHAPES = {
    "qwen3-30b": (128, 8, 2048, 768),
    "qwen3.5-35b": (256, 8, 2048, 512),
    "deepseek-v2-lite": (64, 6, 2048, 1408),
    "phi-3.5-moe": (16, 2, 4096, 6400),
}
TOKENS = (512, 1024, 2048, 4096)


class Traffic(ctypes.Structure):
    """`moeflex::Traffic`."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("num_row_tiles", "num_cols0", "num_cols1")),
        *((name, ctypes.c_longlong) for name in ("in_bytes", "out_bytes")),
    ]


class Verdict(ctypes.Structure):
    """What `moeflex_judge` found."""

    _fields_ = [
        ("chosen", Split), ("chosen_ns", ctypes.c_longlong), ("best", Split),
        ("best_ns", ctypes.c_longlong), ("spatial", Split), ("spatial_ns", ctypes.c_longlong),
        ("serial_ns", ctypes.c_longlong), ("num_simulated", ctypes.c_int),
    ]  # fmt: skip


class Group:
    """One layer on rank 0 of two, with random routing: its counts, its traffic and the curves."""

    def __init__(
        self, shape: tuple[int, int, int, int], tokens: int, num_blocks: int = NUM_BLOCKS
    ) -> None:
        E, K, H, I = shape
        routes = np.random.default_rng(tokens).random((2 * tokens, E)).argsort(1)[:, :K]
        self.counts = np.bincount(routes.ravel(), minlength=E)[: E // 2].astype(np.int32)
        # A token of the other rank comes once, each of its results goes back by itself.
        theirs = routes[tokens:] < E // 2
        self.in_bytes = int(theirs.any(1).sum()) * H * 2
        self.out_bytes = int(theirs.sum()) * H * 2
        self.problem = Problem(
            num_tokens=tokens, top_k=K, num_experts=E // 2, hidden=H, intermediate=I, num_heights=1,
            heights=(ctypes.c_int * 4)(*[ROWS] * 4), row_align=1, gemm0_cols=COLS0, gemm1_cols=COLS1,
            chunk_tiles=1, arrivals=1, world=2, num_blocks=num_blocks, num_comm_blocks=1,
        )  # fmt: skip
        self.traffic = Traffic(
            int((-(-self.counts // ROWS)).sum()), -(-I // COLS0), -(-H // COLS1),
            self.in_bytes, self.out_bytes,
        )  # fmt: skip
        self.curves = AssumedMachine(
            num_blocks=num_blocks, tflops=TFLOPS * num_blocks / NUM_BLOCKS
        ).curves(H, I)

    def judge(self, library: ctypes.CDLL, stride: int) -> Verdict:
        """The chosen split beside the best of the simulated ones."""
        verdict = Verdict()
        code = library.moeflex_judge(*self._layer(), stride, ctypes.byref(verdict))
        assert code == 0
        return verdict

    def simulate(self, library: ctypes.CDLL, comm: int, chunks: int, steal: int) -> int:
        """Simulated nanoseconds of one split."""
        found: int = library.moeflex_simulate(*self._layer(), comm, chunks, steal)
        return found

    def search(self, library: ctypes.CDLL, lanes: int) -> int:
        """The best key, as found by so many lanes."""
        found: int = library.moeflex_search(
            ctypes.byref(self.traffic), ctypes.byref(self.curves), lanes
        )
        return found

    def _layer(self) -> tuple[Any, ...]:
        return (
            ctypes.byref(self.problem),
            self.counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int)),
            ctypes.byref(self.curves),
            ctypes.c_longlong(self.in_bytes),
            ctypes.c_longlong(self.out_bytes),
        )


def load(path: Path) -> ctypes.CDLL:
    """The simulator, compiled to `path`."""
    library = ctypes.CDLL(str(path))
    library.moeflex_search.restype = ctypes.c_ulonglong
    library.moeflex_simulate.restype = ctypes.c_longlong
    library.moeflex_greedy.restype = ctypes.c_longlong
    library.moeflex_greedy.argtypes = [ctypes.c_longlong] * 2 + [ctypes.c_int] * 3
    return library


def compile_simulator(folder: Path) -> ctypes.CDLL:
    path = folder / "simulator.so"
    source = ROOT / "templates" / "simulator.cpp"
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", f"-I{source.parent}"]
    compiler = toolchain.find_compiler().command
    subprocess.run([*compiler, *flags, str(source), "-o", str(path)], check=True)
    return load(path)


def measure(library: ctypes.CDLL, stride: int) -> list[dict[str, Any]]:
    rows = []
    for model, shape in SHAPES.items():
        for tokens in TOKENS:
            group = Group(shape, tokens)
            verdict = group.judge(library, stride)
            times = []
            for _ in range(20):
                start = time.perf_counter()
                group.search(library, 1)
                times.append(time.perf_counter() - start)
            static_ns = group.simulate(library, STATIC_COMM, 1, 0)
            chosen, best = verdict.chosen, verdict.best
            rows.append(
                {
                    "model": model, "tokens": tokens, "ranks": 2, "routing": "random", "simulated": True,
                    "num_comm_sms": chosen.num_comm_blocks, "num_chunks": chosen.num_chunks,
                    "num_steal_tiles": chosen.num_steal_tiles, "predicted_us": chosen.ns / 1e3,
                    "ours_us": verdict.chosen_ns / 1e3, "best_us": verdict.best_ns / 1e3,
                    "best_comm_sms": best.num_comm_blocks, "best_chunks": best.num_chunks,
                    "serial_us": verdict.serial_ns / 1e3, "static_us": static_ns / 1e3,
                    "spatial_us": verdict.spatial_ns / 1e3, "spatial_comm_sms": verdict.spatial.num_comm_blocks,
                    "gap_pct": round(100 * (verdict.chosen_ns / verdict.best_ns - 1), 2),
                    "cpu_search_us": round(min(times) * 1e6, 1), "num_simulated": verdict.num_simulated,
                }
            )  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print("SIMULATED: assumed curves, no GPU")
    head = "model tokens c chunks steal chosen,us best,us (c,chunks) serial,us static20,us "
    print("  ".join((head + "spatial,us gap,% search(CPU),us").split()))
    for r in rows:
        print(
            f"{r['model']:17} {r['tokens']:5} {r['num_comm_sms']:3} {r['num_chunks']:2} {r['num_steal_tiles']:4} "
            f"{r['ours_us']:8.0f} {r['best_us']:8.0f} ({r['best_comm_sms']},{r['best_chunks']}) {r['serial_us']:8.0f} "
            f"{r['static_us']:8.0f} {r['spatial_us']:8.0f} {r['gap_pct']:6.1f} {r['cpu_search_us']:7.1f}"
        )
    gaps = [r["gap_pct"] for r in rows]
    print(f"mean gap {np.mean(gaps):.2f} %, largest {max(gaps):.2f} %, {len(gaps)} groups")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stride", type=int, default=4, help="step of the exhaustive search in c")
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(compile_simulator(Path(folder)), args.stride)
    show(rows)
    if not args.no_write:
        results_io.write("cost_model", "simulated", rows, device_name="simulation, assumed curves")


if __name__ == "__main__":
    main()
