"""One MoE block on a CPU: ours, Inductor on Hugging Face's two experts functions, eager, and one plain matmul.

    python benchmarks/cpu_layer.py [--threads 2] [--dtypes bf16,fp32] [--tokens 1,16,256,2048]

The block is Hugging Face's Qwen3-MoE block (router, experts, weighted sum) with random weights. Ours is
`torch.compile(block, backend="moeflex")`. Contenders take turns on fresh random inputs; a row holds medians.
`matmul_us` is one `torch.mm` of the experts' FLOPs, the ceiling at large T; `floor_us` is the larger of the bytes of
the active experts over the read bandwidth measured here and of that matmul.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import results_io
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from moe_compiler import bench

SHAPES = {"E64 K6 H1024 I704": (64, 6, 1024, 704), "E128 K8 H1024 I384": (128, 8, 1024, 384)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
MAX_BATCHED_BYTES = 8 << 30
MAX_CALL_S = 60.0
PEERS = ("inductor_grouped", "inductor_batched", "eager", "matmul")

Call = Callable[[Tensor], Any]


def share_weights(block: Any, other: Any) -> Any:
    """`block` with the parameters of `other`: every contender reads the same bytes."""
    block.load_state_dict(other.state_dict(), assign=True)
    return block


def read_gbps() -> float:
    """Read bandwidth of all threads, GB/s."""
    buffer = torch.ones(1 << 28)
    return buffer.numel() * 4 / median_of(lambda _: buffer.sum(), [torch.empty(0)] * 7) / 1e9


def median_of(call: Call, inputs: list[Tensor]) -> float:
    """Median seconds over the inputs, the first left out."""
    times = []
    for x in inputs:
        start = time.perf_counter()
        call(x)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def interleave(
    calls: dict[str, Call], make_input: Callable[[], Tensor], budget_s: float
) -> dict[str, list[float]]:
    """Seconds of each contender: they take turns until the budget is used, at least five rounds.

    Every call has tokens of its own: on shared ones the first contender would read the active experts from memory and
    the others from the last-level cache.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    started = time.perf_counter()
    while len(times["ours"]) < 200:
        for name, call in calls.items():
            x = make_input()
            start = time.perf_counter()
            call(x)
            times[name].append(time.perf_counter() - start)
        if len(times["ours"]) >= 5 and time.perf_counter() - started > budget_s:
            break
    return times


def batched_refusal(shape: tuple[int, int, int, int], tokens: int, dtype: torch.dtype) -> str:
    """Why `batched_mm` is not run: it gathers the expert weights of every route."""
    _, top_k, hidden, intermediate = shape
    needed = tokens * top_k * 2 * intermediate * hidden * dtype.itemsize
    if needed <= MAX_BATCHED_BYTES:
        return ""
    return f"gathers {needed / 2**30:.0f} GiB of weights"


class Contenders:
    """The calls of one shape and dtype, compiled once a token count."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, backend: str) -> None:
        self.shape, self.dtype = shape, dtype
        self.plain = bench.qwen3_block(shape, dtype, "eager")
        self.grouped = share_weights(bench.qwen3_block(shape, dtype, "grouped_mm"), self.plain)
        self.batched = share_weights(bench.qwen3_block(shape, dtype, "batched_mm"), self.plain)
        self.ours_block = share_weights(bench.qwen3_block(shape, dtype, "grouped_mm"), self.plain)
        self.backend = backend

    def make_input(self, tokens: int) -> Tensor:
        """Fresh random tokens [1, T, H]."""
        return torch.randn(1, tokens, self.shape[2]).to(self.dtype)

    def calls(self, tokens: int) -> tuple[dict[str, Call], dict[str, str]]:
        """Contenders that run at this token count, and why the others do not."""
        torch._dynamo.reset()
        calls: dict[str, Call] = {
            # strict: a block that was left to Inductor, or a failed build, raises instead of being timed as ours
            "ours": torch.compile(
                self.ours_block, backend=self.backend, dynamic=False, options={"strict": True}
            ),
            "inductor_grouped": torch.compile(self.grouped, dynamic=False),
            "eager": self.plain,
            "matmul": self.matmul(tokens),
        }
        skipped = {}
        reason = batched_refusal(self.shape, tokens, self.dtype)
        if not reason:
            batched = torch.compile(self.batched, dynamic=False)
            seconds = self.warm(batched, tokens)
            if seconds > MAX_CALL_S:
                reason = f"one call takes {seconds:.0f} s"
            else:
                calls["inductor_batched"] = batched
        if reason:
            skipped["inductor_batched"] = reason
        for call in calls.values():
            self.warm(call, tokens)
        return calls, skipped

    def warm(self, call: Call, tokens: int) -> float:
        """Compile and run; seconds of the second call."""
        call(self.make_input(tokens))
        x = self.make_input(tokens)
        start = time.perf_counter()
        call(x)
        return time.perf_counter() - start

    def matmul(self, tokens: int) -> Call:
        """One plain matmul of the experts' FLOPs."""
        _, top_k, hidden, intermediate = self.shape
        a = torch.randn(tokens * top_k, hidden).to(self.dtype)
        b = torch.randn(3 * intermediate, hidden).to(self.dtype)
        return lambda _: torch.mm(a, b.t())

    def active_bytes(self, tokens: int) -> int:
        """Bytes of the experts that a random batch reads, in expectation."""
        num_experts, top_k, hidden, intermediate = self.shape
        active = num_experts * (1 - (1 - top_k / num_experts) ** tokens)
        return int(active * 3 * hidden * intermediate * self.dtype.itemsize)


def check_same(contenders: Contenders, calls: dict[str, Call]) -> None:
    """Every contender computes the same block, or the times mean nothing."""
    x = contenders.make_input(16)
    expected = contenders.plain(x).float()
    for name in ("ours", "inductor_grouped"):
        error = (calls[name](x).float() - expected).norm() / expected.norm()
        if not error < 3e-2:
            raise RuntimeError(f"{name} differs from eager by {error:.3g}")


def measure(
    contenders: Contenders, name: str, dtype: str, tokens: int, gbps: float, budget_s: float
) -> dict[str, Any]:
    """One row: the contenders' medians at one token count."""
    calls, skipped = contenders.calls(tokens)
    if tokens == 16:
        check_same(contenders, calls)
    times = interleave(calls, lambda: contenders.make_input(tokens), budget_s)
    medians = {key: statistics.median(values) * 1e6 for key, values in times.items()}
    ours = sorted(times["ours"])
    _, top_k, hidden, intermediate = contenders.shape
    flop = 6 * tokens * top_k * hidden * intermediate
    best = min(medians[k] for k in ("inductor_grouped", "inductor_batched") if k in medians)
    row: dict[str, Any] = {
        "model": name,
        "dtype": dtype,
        "tokens": tokens,
        "layout": "single",
        "routing": "random",
    }
    row |= {f"{key}_us": round(value, 1) for key, value in medians.items()}
    row |= {f"{key}_us": None for key in skipped}
    row["floor_us"] = round(max(contenders.active_bytes(tokens) / gbps / 1e3, medians["matmul"]), 1)
    row["spread"] = [
        round(ours[len(ours) // 10] * 1e6, 1),
        round(ours[len(ours) * 9 // 10] * 1e6, 1),
    ]
    row["rounds"] = len(ours)
    row["ours_gflops"] = round(flop / medians["ours"] / 1e3, 1)
    row["speedup_over_better_inductor"] = round(best / medians["ours"], 2)
    if skipped:
        row["skipped"] = "; ".join(f"{key}: {why}" for key, why in skipped.items())
    return row


def show(rows: list[dict[str, Any]], note: str) -> None:
    """Print the table."""
    table = Table(title=f"One MoE block on a CPU, medians in us ({note})")
    columns = ("ours", *PEERS, "floor")
    for heading in ("shape", "dtype", "T", *columns, "x over better Inductor"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [row.get(f"{column}_us") for column in columns]
        table.add_row(
            row["model"], row["dtype"], str(row["tokens"]),
            *("-" if cell is None else f"{cell:,.0f}" for cell in cells),
            f"{row['speedup_over_better_inductor']:.2f}",
        )  # fmt: skip
    console = Console()
    console.print(table)
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        ratios = [row["speedup_over_better_inductor"] for row in rows if row["dtype"] == dtype]
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
        console.print(f"{dtype}: geometric mean {mean:.2f}x, worst point {min(ratios):.2f}x")
    for text in dict.fromkeys(row["skipped"] for row in rows if "skipped" in row):
        console.print(f"not run: {text}")


def main() -> None:
    """Run, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--tokens", default="1,16,256,2048")
    parser.add_argument("--budget", type=float, default=3.0, help="seconds a row")
    parser.add_argument("--no-write", action="store_true", help="leave the result file alone")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    from moe_compiler.runtime import cpu_target

    gbps = read_gbps()
    rows = []
    for dtype in options.dtypes.split(","):
        for name, shape in SHAPES.items():
            contenders = Contenders(shape, DTYPES[dtype], "moeflex")
            for tokens in map(int, options.tokens.split(",")):
                rows.append(measure(contenders, name, dtype, tokens, gbps, options.budget))
                print({k: rows[-1][k] for k in rows[-1] if k.endswith("_us")}, flush=True)
    if not options.no_write:
        results_io.write(
            "cpu_layer",
            "cpu",
            rows,
            threads=options.threads,
            read_gbps=round(gbps, 1),
            ours="torch.compile(backend='moeflex') on the whole block",
            target=cpu_target.description(),
        )
    show(rows, f"{options.threads} threads, {cpu_target.description()}, {gbps:.0f} GB/s")


if __name__ == "__main__":
    main()
