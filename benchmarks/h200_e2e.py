"""Time a whole Hugging Face model on one H200: eager, Inductor on `grouped_mm`, and moeflex.

    python -m benchmarks.h200_e2e                  # writes results/h200_e2e.h200.json
    python -m benchmarks.h200_e2e --layers 4 --no-write

Qwen3-30B-A3B with random weights in bf16; decode steps on a static cache, and a prefill without one.
Compiled contenders run as CUDA-graph replays, eager as it is. `layers` says how many of the 48
decoder layers were built: all contenders alike, since compiling 48 takes minutes. Rates for 48
layers are computed from the time of a layer and the time of what surrounds them (embedding, last
norm, head), which is measured on its own. Each contender runs in a process of its own: all compile
at once, then they are timed one after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import Tensor, nn

from benchmarks import results_io

CONTENDERS = {"eager": "", "inductor_grouped": "inductor", "ours": "moeflex"}
NUM_LAYERS = 48
CONTEXT = 512  # tokens in the cache before a decode step
CACHE_TOKENS = 1024
CONFIG = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
}
# Kernel names, by what they compute; the first that fits.
KINDS = {
    "experts": ("moeflex_", "groupproblemshape", "grouped"),
    "attention": ("flash", "fmha", "attention", "cudnn"),
    "dense": ("gemm", "nvjet", "gemv", "cutlass", "cublas", "splitk"),
}


@dataclasses.dataclass(frozen=True)
class Phase:
    """One forward pass: `batch` sequences of `length` new tokens each."""

    name: str
    batch: int
    length: int

    @property
    def tokens(self) -> int:
        """T of one pass."""
        return self.batch * self.length


def phases(batches: list[int], prefill: int) -> Iterator[Phase]:
    yield from (Phase("decode", batch, 1) for batch in batches)
    if prefill:
        yield Phase("prefill", 1, prefill)


def build(num_layers: int) -> nn.Module:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(**CONFIG, num_hidden_layers=num_layers)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
            experts_implementation="grouped_mm",
        )
    return model.eval().requires_grad_(False)


class Step:
    """One forward pass of a model on inputs of its own, repeatable."""

    def __init__(self, model: nn.Module, phase: Phase) -> None:
        from transformers import StaticCache

        generator = torch.Generator("cuda").manual_seed(1)
        shape = (phase.batch, phase.length)
        vocabulary = CONFIG["vocab_size"]
        self.ids = torch.randint(vocabulary, shape, generator=generator, device="cuda")
        self.more: dict[str, Any] = {"use_cache": False, "logits_to_keep": 1}
        self.cache = None
        if phase.name == "decode":
            self.cache = StaticCache(config=model.config, max_cache_len=CACHE_TOKENS)
            prompt = torch.randint(
                vocabulary, (phase.batch, CONTEXT), generator=generator, device="cuda"
            )
            takes = inspect.signature(model.forward).parameters
            name = "cache" if "cache" in takes else "past_key_values"
            self.more.update({"use_cache": True, name: self.cache})
            model(prompt, **self.more)

    def rewind(self) -> None:
        """Back to the length of the prompt; a step writes behind it."""
        for layer in self.cache.layers if self.cache is not None else ():
            length = getattr(layer, "cumulative_length", None)
            if isinstance(length, Tensor):
                length.fill_(CONTEXT)

    def __call__(self, model: Callable[..., Any]) -> Tensor:
        """Logits of the last token of each sequence."""
        return model(self.ids, **self.more).logits


def median_us(run: Callable[[], Any], before: Callable[[], None], repeats: int) -> float:
    """Median over stretches of five runs."""
    times = []
    for _ in range(repeats):
        before()
        torch.cuda.synchronize()
        time.sleep(0.02)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(5):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / 5)
    return statistics.median(times)


def captured(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """A replay of `run`, and the result that it writes."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph.replay, result


def shares(run: Callable[[], Any]) -> dict[str, float]:
    """Per cent of the GPU's time by kind of kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    times = dict.fromkeys([*KINDS, "rest"], 0.0)
    for entry in profiler.key_averages():
        name = entry.key.lower()
        kind = next((k for k, words in KINDS.items() if any(w in name for w in words)), "rest")
        times[kind] += entry.self_device_time_total
    total = sum(times.values()) or 1.0
    return {f"{kind}_pct": round(100 * spent / total, 1) for kind, spent in times.items()}


def surroundings_us(model: nn.Module, phase: Phase) -> float:
    """What is not a decoder layer: embedding, last norm, head of the last token."""
    ids = torch.zeros(phase.batch, phase.length, dtype=torch.int64, device="cuda")

    def run() -> Tensor:
        return model.lm_head(model.model.norm(model.model.embed_tokens(ids))[:, -1:])

    return median_us(captured(run)[0], lambda: None, 10)


class Prepared:
    """One contender in one phase: compiled, checked and captured."""

    def __init__(self, contender: str, model: nn.Module, phase: Phase) -> None:
        self.phase, self.step = phase, Step(model, phase)
        wanted = self.step(model).float()
        self.step.rewind()
        self.found: dict[str, Any] = {"phase": phase.name, "tokens": phase.tokens}
        run: Callable[..., Any] = model
        if CONTENDERS[contender]:
            run = torch.compile(model, backend=CONTENDERS[contender], dynamic=False)
        begin = time.perf_counter()
        got = self.step(run)
        self.found["compile_s"] = round(time.perf_counter() - begin, 1)
        self.found["error"] = ((got.float() - wanted).norm() / wanted.norm()).item()
        self.run: Callable[[], Any] = lambda: self.step(run)
        if CONTENDERS[contender]:
            self.run()
            self.run, _ = captured(self.run)
        if contender == "ours":
            import moe_compiler

            report = moe_compiler.last_report()
            assert report is not None
            self.found["placements"] = sorted(set(report.placements))
            self.found["stages_s"] = {name: round(s, 2) for name, s in report.stage_seconds}

    def timed(self) -> dict[str, Any]:
        """The fields of this contender in the row of the phase."""
        self.found["us"] = median_us(self.run, self.step.rewind, 10)
        self.step.rewind()
        return {**self.found, **shares(self.run)}


def child(contender: str, num_layers: int, batches: list[int], prefill: int) -> None:
    """Compile everything, say so, wait for a line, measure, print a line a phase."""
    with torch.no_grad():
        model = build(num_layers)
        prepared = [Prepared(contender, model, phase) for phase in phases(batches, prefill)]
        print("READY", flush=True)
        sys.stdin.readline()
        for one in prepared:
            row = one.timed()
            if contender == "ours":
                row["surroundings_us"] = surroundings_us(model, one.phase)
            print("ROW", json.dumps(row), flush=True)


def start(contender: str, arguments: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.h200_e2e", "--child", contender]
    for name in ("layers", "batches", "prefill"):
        command += [f"--{name}", str(getattr(arguments, name))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run_all(arguments: argparse.Namespace) -> dict[str, dict[tuple[str, int], Any]]:
    """The rows of every contender by (phase, tokens)."""
    names = arguments.contenders.split(",")
    children = {name: start(name, arguments) for name in names}
    watch = threading.Timer(arguments.limit_s, lambda: [c.kill() for c in children.values()])
    watch.start()
    for running in children.values():
        assert running.stdout is not None
        while line := running.stdout.readline():
            if line.startswith("READY"):
                break
    found = {}
    for name, running in children.items():
        output, _ = running.communicate("go\n")
        rows = [json.loads(line[4:]) for line in output.splitlines() if line.startswith("ROW ")]
        found[name] = {(row["phase"], row["tokens"]): row for row in rows}
        if running.returncode:
            print(f"{name}: ended with {running.returncode}", file=sys.stderr)
    watch.cancel()
    return found


def whole_model_us(us: float, around: float, num_layers: int) -> float:
    return around + NUM_LAYERS * (us - around) / num_layers


def make_rows(
    found: dict[str, dict[tuple[str, int], Any]], arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    for phase in phases(numbers(arguments.batches), arguments.prefill):
        key = (phase.name, phase.tokens)
        ours = found.get("ours", {}).get(key)
        row: dict[str, Any] = {
            "model": "qwen3-30b-a3b",
            "phase": phase.name,
            "dtype": "bf16",
            "batch": phase.batch,
            "tokens": phase.tokens,
            "context": CONTEXT if phase.name == "decode" else 0,
            "layers": arguments.layers,
        }
        for contender in ("ours", "inductor_grouped", "eager"):
            measured = found.get(contender, {}).get(key)
            row[f"{contender}_us"] = measured and round(measured["us"], 1)
        around = ours["surroundings_us"] if ours else 0.0
        for contender in CONTENDERS:
            measured = found.get(contender, {}).get(key)
            if not measured:
                continue
            if ours:
                total = whole_model_us(measured["us"], around, arguments.layers)
                row[f"{contender}_tokens_per_s_48_layers"] = round(phase.tokens / total * 1e6, 1)
            row.update({f"{contender}_{k}": v for k, v in measured.items() if k.endswith("_pct")})
            row[f"{contender}_error"] = measured["error"]
            row[f"{contender}_compile_s"] = measured.get("compile_s")
        if ours:
            row["surroundings_ms"] = round(around / 1e3, 4)
            row["placements"], row["stages_s"] = ours["placements"], ours["stages_s"]
        yield row


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8, help="decoder layers, of 48")
    parser.add_argument("--batches", default="1,16,64", help="sequences of a decode step")
    parser.add_argument(
        "--prefill", type=int, default=8192, help="tokens of the prefill, 0 for none"
    )
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--limit-s", type=int, default=180, help="seconds of the whole run")
    parser.add_argument("--no-write", action="store_true")
    parser.add_argument("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.layers, numbers(arguments.batches), arguments.prefill)
        return 0
    rows = list(make_rows(run_all(arguments), arguments))
    for row in rows:
        print(json.dumps(row))
    if not arguments.no_write:
        print(results_io.write("h200_e2e", "h200", rows, device_name=torch.cuda.get_device_name()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
