"""Time the MoE layer kernel on one H200 against its peers: CUDA-graph replays, interleaved.

    python -m benchmarks.h200_layer      # every model; writes results/h200_layer.h200.json
    python -m benchmarks.h200_layer --models qwen3-30b --tokens 1,64 --no-write

Each model runs in its own process with a time limit. Short runs: a pause before each timed stretch,
so that the card is not at its power limit; clock and power are sampled inside the stretch and stand
beside every row. The router is not included. Triton's sort is not timed, the torch chain's is.
"""

from __future__ import annotations

import argparse
import ast
import csv
import dataclasses
import functools
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from benchmarks import h200_peers, results_io
from moe_compiler.codegen.cuda import CudaConfig, choose_config, render
from moe_compiler.codegen.cuda import Kernel as KernelKind
from moe_compiler.ir import (
    ActivationKind,
    ActivationSpec,
    ExpertSpec,
    GateLayout,
    MoEPlan,
    RouterSpec,
    Score,
)
from moe_compiler.runtime.cuda_build import build, read_template
from moe_compiler.runtime.cuda_driver import Kernel
from moe_compiler.runtime.cuda_launch import CudaLayer

FLOOR_BYTES_PER_US, FLOOR_FLOP_PER_US = 4.5e6, 790e6
# All routings are measured at these; elsewhere the random one only.
REPEATED_TOKENS = (64, 2048, 8192)
ROUTINGS = ("random", "balanced", "power_law_1.2")


@dataclasses.dataclass(frozen=True)
class Model:
    """Shape of one layer, and where it is measured."""

    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    tokens: tuple[int, ...] = (1, 4, 16, 64, 256, 512, 2048, 8192)
    public: str = ""  # its name in the table of published numbers


MODELS = {
    "qwen3-30b": Model(128, 8, 2048, 768, public="qwen3-30b-a3b"),
    "phi-3.5-moe": Model(16, 2, 4096, 6400),
    "deepseek-v2-lite": Model(64, 6, 2048, 1408),
    "qwen3-235b": Model(128, 8, 4096, 1536, public="qwen3-235b-a22b"),
    "qwen3-235b-tp8": Model(128, 8, 4096, 192, (1, 16, 64, 256, 2048, 4096)),
    "qwen3.5-35b": Model(256, 8, 2048, 512, public="qwen3.5-35b-a3b"),
    "deepseek-v3": Model(256, 8, 7168, 2048),
    "deepseek-v2": Model(160, 6, 5120, 1536),
}


def make_plan(model: Model) -> MoEPlan:
    experts = ExpertSpec(
        num_experts=model.num_experts,
        hidden=model.hidden,
        intermediate=model.intermediate,
        gate_layout=GateLayout.CONCAT,
        activation=ActivationSpec(kind=ActivationKind.SILU),
    )
    router = RouterSpec(score=Score.EXTERNAL, top_k=model.top_k, num_experts=model.num_experts)
    return MoEPlan(router=router, experts=experts)


def route(model: Model, num_tokens: int, routing: str) -> tuple[Tensor, Tensor]:
    """Ids [T, K] int64 and weights [T, K] fp32."""
    E, K = model.num_experts, model.top_k
    logits = torch.randn(num_tokens, E, device="cuda")
    if routing == "power_law_1.2":
        rank = torch.randperm(E, device="cuda").add_(1).float()
        gumbel = -torch.log(-torch.log(torch.rand(num_tokens, E, device="cuda")))
        logits = gumbel - 1.2 * rank.log()
    ids = logits.topk(K).indices
    if routing == "balanced":
        names = torch.randperm(E, device="cuda")
        ids = names[torch.arange(num_tokens * K, device="cuda") % E].view(num_tokens, K)
    weights = torch.rand(num_tokens, K, device="cuda") + 0.1
    return ids.contiguous(), weights / weights.sum(-1, keepdim=True)


def capture(runs: list[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """All `runs` once, one after the other, in one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph


class Card:
    """Clock and power of the card, where NVML answers."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)

    def sample(self) -> tuple[float, float]:
        """(SM clock in MHz, power in W)."""
        clock = self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)
        return float(clock), self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3


def time_interleaved(
    graphs: dict[str, torch.cuda.CUDAGraph], num_sets: int, rounds: int
) -> dict[str, Any]:
    """Microseconds a layer of every graph, plus the clock and power seen."""
    card = Card()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    clocks, watts = [], []
    order = list(graphs)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            graph = graphs[name]
            torch.cuda.synchronize()
            time.sleep(0.01)
            graph.replay()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(3):
                graph.replay()
            end.record()
            clock, power = card.sample()
            clocks.append(clock)
            watts.append(power)
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / (3 * num_sets))
    return {"times": times, "sm_mhz": statistics.median(clocks), "watts": statistics.median(watts)}


def load(config: CudaConfig, plan: MoEPlan, experts: list[Tensor], num_tokens: int) -> CudaLayer:
    binary = build(config.name, render(config, read_template()), entry=config.entry)
    return CudaLayer(Kernel(binary.cubin, config.entry), config, plan, experts, num_tokens)


def parse_variant(text: str) -> dict[str, Any]:
    """`kernel='decode',num_stages=4` -> fields of CudaConfig."""
    fields = {
        key: ast.literal_eval(value) for key, value in (pair.split("=") for pair in text.split(","))
    }
    if "kernel" in fields:
        fields["kernel"] = KernelKind(fields["kernel"])
    return fields


def measure(
    model: Model,
    num_tokens: int,
    routing: str,
    experts: list[Tensor],
    peers: bool,
    variants: list[str],
) -> dict[str, Any]:
    """One row: times of ours and of the peers on the same inputs."""
    plan = make_plan(model)
    config = choose_config(plan, num_tokens, "bf16")
    num_sets = 12 if num_tokens <= 16 else 4 if num_tokens <= 256 else 1
    layer = load(config, plan, experts, num_tokens)
    sets = []
    for _ in range(num_sets):
        x = torch.randn(num_tokens, model.hidden, device="cuda").bfloat16()
        sets.append((x, *experts, *route(model, num_tokens, routing)))
    outs = [torch.full_like(entry[0], float("nan")) for entry in sets]
    layer(sets[0][0], sets[0][3], sets[0][4], outs[0])

    def ours(index: int) -> Callable[[], Tensor]:
        x, _, _, ids, weights = sets[index]
        return lambda: layer(x, ids, weights, outs[index])

    graphs = {"ours": capture([ours(i) for i in range(num_sets)])}
    keep: list[Any] = []

    def add(name: str, runs: list[Callable[[], Tensor]], against: Tensor | None) -> None:
        try:
            value = runs[0]()
            if against is not None:
                error = ((value.float() - against.float()).norm() / against.float().norm()).item()
                if not error < 2e-2:
                    raise RuntimeError(f"{name} differs from ours by {error:.2e}")
            graphs[name] = capture(runs)
            keep.append(runs)
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:150]}", flush=True)

    for variant in variants:
        wanted, _, text = variant.rpartition(":")
        if wanted and str(num_tokens) not in wanted.split("/"):
            continue
        fields = parse_variant(text)
        try:
            other = load(dataclasses.replace(config, **fields), plan, experts, num_tokens)
        except Exception as error:
            print(f"  {variant}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        add(
            variant,
            [functools.partial(other, entry[0], entry[3], entry[4]) for entry in sets],
            outs[0],
        )
    if peers:
        chains = [h200_peers.grouped_chain(*entry) for entry in sets]
        add("grouped_graph", chains, outs[0])
        rows = num_tokens * model.top_k / model.num_experts
        for tile in h200_peers.triton_tiles(rows):
            runs = [h200_peers.triton_fused(*entry, tile) for entry in sets]
            add(f"triton {tile}", runs, outs[0])
        if rows >= 16:
            add(
                "matmul",
                [h200_peers.batched_matmul(sets[0][0], *experts, num_tokens * model.top_k)],
                None,
            )
    if peers and not any(name == "grouped_graph" or "triton" in name for name in graphs):
        raise RuntimeError(f"{model} T={num_tokens}: our result differs from that of every peer")
    timed = time_interleaved(graphs, num_sets, rounds=5)
    if "matmul" in graphs:
        timed["times"]["matmul"] = [value * num_sets for value in timed["times"]["matmul"]]
    return summarise(model, num_tokens, routing, config.name, [entry[3] for entry in sets], timed)


def summarise(
    model: Model, num_tokens: int, routing: str, name: str, ids: list[Tensor], timed: dict[str, Any]
) -> dict[str, Any]:
    times = timed["times"]
    median = {key: statistics.median(values) for key, values in times.items()}
    active = statistics.mean(int(entry.unique().numel()) for entry in ids)
    num_bytes = active * 3 * model.hidden * model.intermediate * 2
    flop = 6 * num_tokens * model.top_k * model.hidden * model.intermediate
    ours = sorted(times["ours"])
    known = ("ours", "grouped_graph", "matmul")
    others = {
        key: value for key, value in median.items() if key not in known and "triton" not in key
    }
    if others:
        print(
            "  variants: " + "; ".join(f"{key} {value:.1f}" for key, value in others.items()),
            flush=True,
        )
    row = {"tokens": num_tokens, "routing": routing, "kernel": name, "ours_us": median["ours"]}
    tritons = [value for key, value in median.items() if key.startswith("triton")]
    row["triton_us"] = min(tritons) if tritons else None
    row["grouped_graph_us"] = median.get("grouped_graph")
    row["matmul_us"] = median.get("matmul")
    row["floor_us"] = max(num_bytes / FLOOR_BYTES_PER_US, flop / FLOOR_FLOP_PER_US)
    row["spread"] = [ours[0], ours[-1]]
    row["ours_tflops"] = flop / median["ours"] / 1e6
    row["ours_gbps"] = num_bytes / median["ours"] / 1e3
    row["sm_mhz"], row["watts"] = timed["sm_mhz"], timed["watts"]
    return {
        key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()
    }


def run_model(
    name: str, tokens: list[int], routings: list[str], peers: bool, variants: list[str]
) -> None:
    """Measure one model in this process; one JSON line a row."""
    model = MODELS[name]
    E, H = model.num_experts, model.hidden
    w13 = torch.empty(E, 2 * model.intermediate, H, device="cuda", dtype=torch.bfloat16)
    w2 = torch.empty(E, H, model.intermediate, device="cuda", dtype=torch.bfloat16)
    for tensor in (w13, w2):
        for expert in tensor:
            expert.normal_(std=tensor.shape[2] ** -0.5)
    for num_tokens in tokens or model.tokens:
        for routing in routings:
            if routing != "random" and num_tokens not in REPEATED_TOKENS:
                continue
            row = measure(model, num_tokens, routing, [w13, w2], peers, variants)
            print("ROW " + json.dumps({"model": name, **row}), flush=True)


def public_times(path: str) -> dict[tuple[str, int], float]:
    """Best published time by (model, tokens), balanced routing, one GPU."""
    best: dict[tuple[str, int], float] = {}
    if path:
        with open(path) as file:
            for row in csv.DictReader(file):
                if row["tp"] == row["ep"] == "1" and row["routing"] == "balanced":
                    key = row["model"], int(row["tokens"])
                    best[key] = min(best.get(key, 1e9), float(row["latency_us"]))
    return best


def stream(command: list[str], limit_s: int) -> Iterator[str]:
    """Lines of a child as they come; the child is stopped after `limit_s` seconds."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    timer = threading.Timer(limit_s, child.kill)
    timer.start()
    assert child.stdout is not None
    for line in child.stdout:
        yield line.rstrip()
    timer.cancel()
    if child.wait():
        yield f"{command[4]}: ended with {child.returncode} (limit {limit_s} s)"


def driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[0]


def triton_version() -> str:
    return metadata.version("triton")


def print_row(row: dict[str, Any]) -> None:
    cells = [f"{row['model']:17s} T={row['tokens']:<5d} {row['routing']:13s}"]
    for key in ("ours", "triton", "grouped_graph", "matmul", "floor", "public"):
        value = row.get(f"{key}_us")
        cells.append(f"{key} {value:8.1f}" if value else f"{key}        -")
    cells.append(
        f"{row['ours_tflops']:5.0f} TF {row['ours_gbps']:5.0f} GB/s {row['sm_mhz']:.0f} MHz {row['watts']:.0f} W"
    )
    print("  ".join(cells) + f"  {row['kernel']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="")
    parser.add_argument("--routings", default=",".join(ROUTINGS))
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-write", action="store_true")
    parser.add_argument("--public", default="", help="CSV of published times")
    parser.add_argument("--limit", type=int, default=150, help="seconds a model may take")
    parser.add_argument("--deadline", type=int, default=3600, help="seconds all of it may take")
    parser.add_argument("--commit", default="", help="commit, where git is not there to ask")
    parser.add_argument(
        "--variants",
        default="",
        help="other configs to time too, at some T: `512/2048:num_stages=3;num_slices=1`",
    )
    parser.add_argument("--child", default="")
    options = parser.parse_args()
    tokens = [int(value) for value in options.tokens.split(",") if value]
    if options.child:
        variants = [text for text in options.variants.split(";") if text]
        run_model(
            options.child, tokens, options.routings.split(","), not options.no_peers, variants
        )
        return
    public, rows, begin = public_times(options.public), [], time.monotonic()
    for name in options.models.split(","):
        left = int(begin + options.deadline - time.monotonic())
        if left <= 0:
            print(f"{name}: left out, {options.deadline} s are over", flush=True)
            continue
        command = [
            sys.executable,
            "-m",
            "benchmarks.h200_layer",
            "--child",
            name,
            "--tokens",
            options.tokens,
        ]
        command += ["--routings", options.routings, "--variants", options.variants]
        command += ["--no-peers"] if options.no_peers else []
        for line in stream(command, min(options.limit, left)):
            if not line.startswith("ROW "):
                print(line, flush=True)
                continue
            row = json.loads(line[4:])
            if row["routing"] == "balanced" or row["tokens"] not in REPEATED_TOKENS:
                row["public_us"] = public.get((MODELS[row["model"]].public, row["tokens"]))
            rows.append(row)
            print_row(row)
        if not options.no_write:  # after each model, so that a stopped run keeps what it has
            results_io.write(
                "h200_layer",
                "h200",
                rows,
                device_name=torch.cuda.get_device_name(),
                versions={"driver": driver_version(), "triton": triton_version()},
                **({"commit": options.commit} if options.commit else {}),
            )


if __name__ == "__main__":
    main()
