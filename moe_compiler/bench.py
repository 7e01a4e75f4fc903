"""`moeflex bench`: a model or one MoE block, compiled by moeflex, by Inductor alone, and in eager mode.

Contenders take turns on fresh random inputs, so that none of them finds the experts of the one before it in a cache; a
row holds medians. Beside them stands the floor of the experts (see `codegen/floor.py`) on this machine.
"""

from __future__ import annotations

import csv
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from moe_compiler import inspection
from moe_compiler.errors import InspectError, OptionError
from moe_compiler.inspect_target import Target, TargetOptions, load_cpu_target
from moe_compiler.ir import MoERegion
from moe_compiler.model_report import ModelReport
from moe_compiler.random_inputs import RandomInputs
from moe_compiler.reference import DTYPES

CONTENDERS = ("moeflex", "inductor", "eager")
MIN_ROUNDS, MAX_ROUNDS = 5, 200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to measure.

    Attributes:
        model: what `inspect_target.load_target` takes; "" where `shape` is given.
        shape: E, K, H, I of a block; () where `model` is given.
        tokens: token counts.
        contenders: some of `CONTENDERS`.
        seconds: to spend on a row, once everything is compiled.
        axis: the token axis of inputs that a factory gave.
        dtype: of the model; "" for its own.
        experts_implementation: of transformers; "" for grouped_mm where the model has the choice.
        threads: of the CPU; 0 for torch's own choice.
        public: path of a CSV with published times; "" for none.
    """

    model: str = ""
    shape: tuple[int, ...] = ()
    tokens: tuple[int, ...] = (1, 16, 256)
    contenders: tuple[str, ...] = CONTENDERS
    seconds: float = 2.0
    axis: int = 0
    dtype: str = ""
    experts_implementation: str = ""
    threads: int = 0
    public: str = ""

    def check(self) -> None:
        """Check the values.

        Raises:
            OptionError: one cannot be used.
        """
        if bool(self.model) == bool(self.shape):
            raise OptionError("give a model, or --shape E,K,H,I, and not both")
        strange = set(self.contenders) - set(CONTENDERS)
        if strange or not self.contenders:
            raise OptionError(
                f"--contenders takes some of {', '.join(CONTENDERS)}; got {', '.join(sorted(strange)) or 'none'}"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One token count.

    Attributes:
        tokens: T.
        times_us: median of each contender.
        rounds: how often each ran.
        floor_us: of the experts of all blocks, random routing; None where no block was matched.
        public_us: the best published time of the shape; None for none.
    """

    tokens: int
    times_us: Mapping[str, float]
    rounds: int
    floor_us: float | None
    public_us: float | None = None

    @property
    def speedup(self) -> float | None:
        """Inductor's time over ours."""
        if not {"moeflex", "inductor"} <= self.times_us.keys():
            return None
        return self.times_us["inductor"] / self.times_us["moeflex"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """What was measured.

    Attributes:
        title: the model and its dtype, in words.
        machine: where, in words.
        rows: one a token count.
        notes: what the reader should know.
    """

    title: str
    machine: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


def bench(request: Request, progress: Callable[[str], None] = lambda _: None) -> BenchReport:
    """Measure.

    Args:
        request: what and how.
        progress: called with a short sentence at the start of each step.

    Raises:
        InspectError: the model cannot be built.
        OptionError: an option cannot be used.
        UnsupportedError: the model does not lie on a CPU.
    """
    request.check()
    if request.threads:
        torch.set_num_threads(request.threads)
    progress("building the model")
    target = _target(request)
    inputs = RandomInputs(target, request.axis)
    progress("finding MoE blocks, and the speeds of this machine")
    report = _inspect(request, target)
    regions = [block.region for block in report.blocks if block.region is not None]
    published = read_published(request.public) if request.public else {}
    rows = []
    with torch.no_grad():
        for place, tokens in enumerate(request.tokens):
            progress(f"{tokens} tokens: compiling")
            calls = _contenders(request, target.module)
            args = inputs.make(tokens, 0)
            for call in calls.values():
                call(*args[0], **args[1])
                call(*args[0], **args[1])
            progress(f"{tokens} tokens: measuring")
            times = _take_turns(calls, inputs, tokens, request.seconds)
            floors = [
                block.floors[place].floor_random_us for block in report.blocks if block.floors
            ]
            rows.append(
                Row(
                    tokens=tokens,
                    times_us={n: statistics.median(t) * 1e6 for n, t in times.items()},
                    rounds=min(map(len, times.values())),
                    floor_us=sum(floors) if floors else None,
                    public_us=_published(published, regions, tokens),
                )
            )
    notes = [f"{b.name} was not matched: {b.reason}" for b in report.blocks if b.region is None]
    dtypes = {str(p.dtype).removeprefix("torch.") for p in target.module.parameters()}
    return BenchReport(
        title=f"{type(target.module).__name__}, {', '.join(sorted(dtypes))}, {len(regions)} MoE blocks",
        machine=f"{report.machine.title}, torch {torch.__version__}",
        rows=tuple(rows),
        notes=tuple(notes),
    )


def _target(request: Request) -> Target:
    if request.shape:
        dtype = DTYPES[request.dtype or "bf16"]
        block = qwen3_block(request.shape, dtype, "grouped_mm")
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(1, 64, request.shape[2], generator=generator).to(dtype)
        return Target(block, (x,), {}, "given", "[1, T, H]", 1)
    options = TargetOptions(
        num_tokens=max(2, *request.tokens),
        experts_implementation=request.experts_implementation,
        dtype=request.dtype,
        with_weights=True,
    )
    return load_cpu_target(
        request.model,
        options,
        "moeflex bench measures",
        "For GPUs see benchmarks/h200_layer.py and h200_e2e.py.",
    )


def qwen3_block(shape: Sequence[int], dtype: torch.dtype, experts: str) -> nn.Module:
    """Hugging Face's Qwen3-MoE block on random weights.

    Args:
        shape: E, K, H, I.
        dtype: of its parameters.
        experts: which of transformers' experts functions.

    Raises:
        InspectError: transformers is missing.
    """
    try:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
    except ImportError as error:
        raise InspectError(
            f'--shape builds a block of transformers, which is missing ({error}); pip install "moeflex[hf]"'
        ) from error
    num_experts, top_k, hidden, intermediate = shape
    config = Qwen3MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        hidden_size=hidden,
        moe_intermediate_size=intermediate,
        norm_topk_prob=True,
    )
    config._experts_implementation = experts
    block = Qwen3MoeSparseMoeBlock(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            value = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(value * parameter.shape[-1] ** -0.5)
    return block.to(dtype)


def _inspect(request: Request, target: Target) -> ModelReport:
    """Blocks and floors; the model is at hand already."""
    return inspection.inspect_target(
        target,
        inspection.Request(
            target=request.model or "a block", tokens=request.tokens, device="cpu", shapes="dynamic"
        ),
    )


def _contenders(request: Request, module: nn.Module) -> dict[str, Callable[..., Any]]:
    """Freshly compiled: a static graph for each token count."""
    torch._dynamo.reset()
    known: dict[str, Callable[[], Callable[..., Any]]] = {
        "moeflex": lambda: torch.compile(module, backend="moeflex", dynamic=False),
        "inductor": lambda: torch.compile(module, dynamic=False),
        "eager": lambda: module,
    }
    return {name: known[name]() for name in CONTENDERS if name in request.contenders}


def _take_turns(
    calls: Mapping[str, Callable[..., Any]], inputs: RandomInputs, tokens: int, seconds: float
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    started = time.perf_counter()
    seed = 0
    while True:
        for name, call in calls.items():
            seed += 1
            args, kwargs = inputs.make(tokens, seed)
            start = time.perf_counter()
            call(*args, **kwargs)
            times[name].append(time.perf_counter() - start)
        rounds = len(times[name])
        over = time.perf_counter() - started > seconds
        if rounds >= MAX_ROUNDS or (rounds >= MIN_ROUNDS and over):
            return times


Key = tuple[int, int, int, int, int]


def read_published(path: str) -> dict[Key, float]:
    """Best published time by (E, K, H, I, T), one GPU, in us.

    The file has the columns experts, top_k, hidden, intermediate, tokens, latency_us, and may have tp and ep.

    Raises:
        OptionError: it cannot be read, or has other columns.
    """
    best: dict[Key, float] = {}
    try:
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if (row.get("tp") or "1", row.get("ep") or "1") != ("1", "1"):
                    continue
                e, k, h, i, t = (
                    int(row[name])
                    for name in ("experts", "top_k", "hidden", "intermediate", "tokens")
                )
                us = float(row["latency_us"])
                best[e, k, h, i, t] = min(us, best.get((e, k, h, i, t), us))
    except OSError as error:
        raise OptionError(f"--public: {path} cannot be read: {error.strerror}") from error
    except (KeyError, ValueError, TypeError) as error:
        raise OptionError(
            f"--public: {path} needs the columns experts, top_k, hidden, intermediate, tokens, latency_us ({error})"
        ) from error
    return best


def _published(
    published: Mapping[Key, float], regions: Sequence[MoERegion], tokens: int
) -> float | None:
    """Where the model is one block, or equal ones, of a published shape: the sum over its blocks."""
    found = []
    for region in regions:
        spec = region.experts
        key = (spec.num_experts, region.top_k, spec.hidden, spec.intermediate, tokens)
        found.append(published.get(key))
    known = [value for value in found if value is not None]
    return sum(known) if known and len(known) == len(found) else None
