"""Time the router of a layer, and the Triton layer, on one H200: CUDA-graph replays, interleaved.

    python -m benchmarks.h200_router      # writes results/h200_router.h200.json

Router rows: the linear [T, H] x [H, E] alone (cuBLAS), and logits -> ids and weights by eager torch,
by Inductor, and by the Triton kernel. Layer rows: the Triton layer, its sort included, beside the
same products with a fused kernel of the serving engines' kind, whose sort is not timed.
Every graph holds 20 (router) or 4 (layer) launches of the same work in a row.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import h200_layer, h200_peers, results_io
from moe_compiler import reference
from moe_compiler.codegen.triton import TILES, TritonConfig, choose_config, fit
from moe_compiler.ir import GroupScore, Normalize, RouterSpec, Score
from moe_compiler.runtime import triton_layer, triton_router

Run = Callable[[], Any]

ROUTERS = {
    "qwen3-30b": (
        2048,
        RouterSpec(score=Score.SOFTMAX, top_k=8, num_experts=128, normalize=Normalize.SUM),
    ),
    "deepseek-v3": (
        7168,
        RouterSpec(
            score=Score.SIGMOID,
            top_k=8,
            num_experts=256,
            has_bias=True,
            num_groups=8,
            top_k_groups=4,
            group_score=GroupScore.TOP2_SUM,
            normalize=Normalize.SUM,
            eps=1e-20,
            scale=2.5,
        ),
    ),
    "gpt-oss-120b": (
        2880,
        RouterSpec(
            score=Score.IDENTITY,
            top_k=4,
            num_experts=128,
            normalize=Normalize.SOFTMAX,
            score_dtype="",
        ),
    ),
    "qwen3-next": (
        2048,
        RouterSpec(score=Score.SOFTMAX, top_k=10, num_experts=512, normalize=Normalize.SUM),
    ),
}
ROUTER_TOKENS = (1, 16, 64, 256, 2048, 8192)
LAYERS = {"qwen3-30b": ROUTER_TOKENS, "phi-3.5-moe": (1, 64, 2048), "qwen3.5-35b": (1, 64, 2048)}


def time_graphs(runs: dict[str, Run], repeats: int) -> tuple[dict[str, float], float, float]:
    """Microseconds of one run of each, the SM clock in MHz and the power in W."""
    graphs = {name: h200_layer.capture([run] * repeats) for name, run in runs.items()}
    card = h200_layer.Card()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    samples = []
    order = list(graphs)
    for _ in range(7):
        random.shuffle(order)
        for name in order:
            graphs[name].replay()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(3):
                graphs[name].replay()
            end.record()
            samples.append(card.sample())
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / (3 * repeats))
    clock, power = (statistics.median(values) for values in zip(*samples, strict=True))
    return {name: statistics.median(values) for name, values in times.items()}, clock, power


def router_row(name: str, num_tokens: int) -> dict[str, Any]:
    hidden, spec = ROUTERS[name]
    x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
    gate = (torch.randn(spec.num_experts, hidden, device="cuda") * hidden**-0.5).bfloat16()
    logits = x @ gate.t()
    bias = torch.randn(spec.num_experts, device="cuda") * 0.1 if spec.has_bias else None
    eager = functools.partial(reference.route, spec, logits, bias)
    torch._dynamo.reset()
    compiled = torch.compile(reference.route, dynamic=False)
    runs: dict[str, Run] = {
        "linear": lambda: x @ gate.t(),
        "eager": eager,
        "inductor": lambda: compiled(spec, logits, bias),
        "ours": lambda: triton_router.route(spec, logits, bias),
        "linear_ours": lambda: triton_router.route(spec, x @ gate.t(), bias),
    }
    ids, expected = runs["ours"]()[0].sort(-1).values, eager()[0].sort(-1).values
    same = (ids == expected).all(-1).double().mean().item()
    assert same > 0.99, f"{name} T={num_tokens}: {same:.3f} of the rows have eager's experts"
    found, clock, power = time_graphs(runs, repeats=20)
    return {
        "what": "router",
        "model": name,
        "router": spec.kind,
        "tokens": num_tokens,
        **{f"{key}_us": round(value, 2) for key, value in found.items()},
        "sm_mhz": clock,
        "watts": round(power),
    }


def layer_row(name: str, num_tokens: int, experts: list[Tensor]) -> dict[str, Any]:
    model = h200_layer.MODELS[name]
    plan = h200_layer.make_plan(model)
    x = torch.randn(num_tokens, model.hidden, device="cuda").bfloat16()
    ids, weights = h200_layer.route(model, num_tokens, "random")
    capability = torch.cuda.get_device_capability()
    config = choose_config(plan, num_tokens, "bf16", capability)

    def layer(config: TritonConfig) -> Run:
        return lambda: triton_layer.layer(plan, config, x, ids, weights, experts)

    runs: dict[str, Run] = {"ours": layer(config)}
    rows = num_tokens * model.top_k / model.num_experts
    for _, tile in TILES:
        other_config = fit(plan, tile, num_tokens, "bf16", capability)
        if other_config != config and tile.block_m / 4 <= max(rows, 4) <= tile.block_m * 16:
            runs[f"tile_{tile.block_m}x{tile.block_n}"] = layer(other_config)
    runs["sort"] = lambda: triton_layer._align(plan.experts, config, ids)
    for index, tile in enumerate(h200_peers.triton_tiles(rows)):
        runs[f"fused{index}"] = h200_peers.triton_fused(x, *experts, ids, weights, tile)
    ours, other = runs["ours"]().float(), runs["fused0"]().float()
    error = ((ours - other).norm() / other.norm()).item()
    assert error < 2e-2, f"{name} T={num_tokens}: the layers differ by {error:.2e}"
    found, clock, power = time_graphs(runs, repeats=4)
    return {
        "what": "layer",
        "model": name,
        "tokens": num_tokens,
        "ours_us": round(found["ours"], 1),
        "sort_us": round(found["sort"], 1),
        "fused_without_sort_us": round(min(v for k, v in found.items() if "fused" in k), 1),
        **{f"{k}_us": round(v, 1) for k, v in found.items() if k.startswith("tile")},
        "gate_up": "x".join(map(str, dataclasses.astuple(config.gate_up))),
        "down": "x".join(map(str, dataclasses.astuple(config.down))),
        "sm_mhz": clock,
        "watts": round(power),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=("router", "layer"), default="")
    parser.add_argument("--no-write", action="store_true")
    parser.add_argument("--commit", default="", help="commit, where git is not there to ask")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)

    for name in ROUTERS if options.only != "layer" else ():
        for num_tokens in ROUTER_TOKENS:
            add(router_row(name, num_tokens))
    for name, tokens in LAYERS.items() if options.only != "router" else ():
        model = h200_layer.MODELS[name]
        E, H, I = model.num_experts, model.hidden, model.intermediate
        experts = [
            torch.randn(E, 2 * I, H, device="cuda", dtype=torch.bfloat16) * H**-0.5,
            torch.randn(E, H, I, device="cuda", dtype=torch.bfloat16) * I**-0.5,
        ]
        for num_tokens in tokens:
            add(layer_row(name, num_tokens, experts))
    if not options.no_write:
        results_io.write(
            "h200_router",
            "h200",
            rows,
            device_name=torch.cuda.get_device_name(),
            versions={
                "driver": h200_layer.driver_version(),
                "triton": h200_layer.triton_version(),
            },
            **({"commit": options.commit} if options.commit else {}),
        )


if __name__ == "__main__":
    main()
