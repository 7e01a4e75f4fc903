"""What `moeflex inspect` does: build, capture, match, prove, place, and predict; nothing is compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

from moe_compiler import __version__, options, settings
from moe_compiler.codegen import floor
from moe_compiler.errors import OptionError
from moe_compiler.inspect_capture import Captured, CapturedGraph, capture_target
from moe_compiler.inspect_graph import GraphTable, block_graph
from moe_compiler.inspect_target import TRACE_TOKENS, Target, TargetOptions, load_target
from moe_compiler.ir import NoMatch
from moe_compiler.model_report import BlockReport, Machine, ModelReport, Rate, StageTime, Status
from moe_compiler.outline import build_outline
from moe_compiler.passes.dataflow import DataFlow
from moe_compiler.passes.match_moe import Match, find_regions
from moe_compiler.placement import place
from moe_compiler.reference import DTYPE_NAMES
from moe_compiler.runtime.machine_probe import probe_cpu
from moe_compiler.targets import Device

DEFAULT_TOKENS = (1, 16, 64, 256, 2048, 8192)
LEVELS = ("torch", "aten")
DEVICES = (*floor.MACHINES, "cpu")
SHAPES = ("dynamic", "static")
# What targets are chosen for, by the name of the machine.
PLACES = {
    "cpu": Device(type="cpu"),
    "h200": Device(type="cuda", capability=(9, 0), here=False),
    "a100": Device(type="cuda", capability=(8, 0), here=False),
    "l40s": Device(type="cuda", capability=(8, 9), here=False),
    "b200": Device(type="cuda", capability=(10, 0), here=False),
}

_INDUCTOR = "inductor, as the model spells it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What to inspect, and how.

    Attributes:
        target: `MODULE:FACTORY`, `FILE.py:FACTORY`, a `config.json` or its folder.
        tokens: token counts of the floors.
        phase: "prefill" | "decode".
        shapes: "dynamic": the token count is a symbol; "static": it is `tokens[0]`. The user's own inputs are always
            traced as they are.
        experts_implementation: of transformers, "" for the model's own.
        dtype: "" for the model's own.
        device: a name of `DEVICES`.
        level: "torch" | "aten".
        meta: call a factory under `torch.device("meta")`.
        bandwidth_gbps: replaces the read speed of the device; 0.0 keeps it.
        tflops: replaces the matrix rates of the device; 0.0 keeps them.
    """

    target: str
    tokens: tuple[int, ...] = DEFAULT_TOKENS
    phase: str = "prefill"
    shapes: str = "dynamic"
    experts_implementation: str = ""
    dtype: str = ""
    device: str = "h200"
    level: str = "torch"
    meta: bool = False
    bandwidth_gbps: float = 0.0
    tflops: float = 0.0

    def check(self) -> None:
        """Check the values.

        Raises:
            OptionError: one cannot be used.
        """
        for name, choices in (("level", LEVELS), ("device", DEVICES), ("shapes", SHAPES)):
            if getattr(self, name) not in choices:
                raise OptionError(
                    f"--{name} takes one of {', '.join(choices)}; got {getattr(self, name)!r}"
                )
        if not self.tokens or min(self.tokens) < 1:
            raise OptionError(
                f"--tokens takes positive counts such as 1,64,2048; got {self.tokens}"
            )


def inspect_model(
    request: Request, progress: Callable[[str], None] = lambda _: None
) -> ModelReport:
    """Inspect a model.

    Args:
        request: what and how.
        progress: called with a short sentence at the start of each stage.

    Raises:
        InspectError: the model could not be built or traced.
        OptionError: an option has an unusable value.
    """
    return _inspect(None, request, progress)


def inspect_target(
    target: Target, request: Request, progress: Callable[[str], None] = lambda _: None
) -> ModelReport:
    """Inspect a model that is built already; see `inspect_model`."""
    return _inspect(target, request, progress)


def _inspect(
    target: Target | None, request: Request, progress: Callable[[str], None]
) -> ModelReport:
    request.check()
    clock = _Clock(progress)
    with clock("machine", f"reading the speeds of {request.device}"):
        machine = machine_of(request)
    if target is None:
        with clock("build", f"building {request.target}"):
            target = load_target(request.target, _target_options(request))
    what = "dynamo" if request.level == "torch" else "torch.export"
    with clock("capture", f"tracing {type(target.module).__name__} with {what}"):
        captured = capture_target(target, level=request.level, dynamic=request.shapes == "dynamic")
    with clock("match", "finding and proving MoE blocks"):
        found = [_find(graph, progress) for graph in captured.graphs]
    return _report(request, target, machine, captured, found, clock)


def machine_of(request: Request) -> Machine:
    """The machine of the floors, with the speeds that the request replaces."""
    machine = floor.MACHINES.get(request.device)
    if machine is None:
        machine = probe_cpu(_cache_dir())
    if request.bandwidth_gbps > 0:
        machine = dataclasses.replace(
            machine, weight_bytes_per_s=request.bandwidth_gbps * 1e9, weight_source="--bandwidth"
        )
    if request.tflops > 0:
        rates = tuple(
            Rate(dtype=name, flop_per_s=request.tflops * 1e12, source="--tflops")
            for name in floor.DTYPE_BYTES
        )
        machine = dataclasses.replace(machine, rates=rates)
    return machine


def _cache_dir() -> Path:
    found = settings.get().cache_dir
    if found:
        return Path(found)
    import platformdirs

    return Path(platformdirs.user_cache_dir("moeflex"))


def _target_options(request: Request) -> TargetOptions:
    return TargetOptions(
        phase=request.phase,
        num_tokens=request.tokens[0] if request.shapes == "static" else TRACE_TOKENS,
        experts_implementation=request.experts_implementation,
        dtype=request.dtype,
        meta=request.meta,
    )


class _Clock:
    """Wall time per stage."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self.progress = progress
        self.times: list[StageTime] = []

    @contextlib.contextmanager
    def __call__(self, name: str, sentence: str) -> Iterator[None]:
        self.progress(sentence)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.times.append(StageTime(name=name, seconds=time.perf_counter() - start))


@dataclasses.dataclass(frozen=True)
class _Found:
    """The blocks of one graph, in its order."""

    blocks: tuple[Match | NoMatch, ...]
    flow: DataFlow
    num_nodes: int


def _find(graph: CapturedGraph, progress: Callable[[str], None]) -> _Found:
    found = find_regions(graph.gm, graph.example_inputs, parameters=graph.parameters)
    position = {node.name: i for i, node in enumerate(graph.gm.graph.nodes)}
    refused = list(found.refused)
    fragment = graph.gm.meta.get("capture_fragment")
    if fragment is not None:
        refused.append(fragment)
    placed: list[tuple[int, Match | NoMatch]] = [
        (position[m.output.name], m) for m in found.matches
    ]
    placed += [(position.get(r.node, len(position)), r) for r in refused]
    placed.sort(key=lambda entry: entry[0])
    progress(f"{len(found.matches)} blocks proven, {len(refused)} refused")
    return _Found(tuple(block for _, block in placed), found.flow, len(position))


def _report(
    request: Request,
    target: Target,
    machine: Machine,
    captured: Captured,
    found: Sequence[_Found],
    clock: _Clock,
) -> ModelReport:
    table = GraphTable()
    blocks: dict[tuple[str, str], BlockReport] = {}
    for part in found:
        for entry in part.blocks:
            block = _block(entry, part.flow, request, machine, table)
            # a model that is called in several graphs, or twice, shows a block once
            blocks.setdefault((block.name, "" if block.name else block.node), block)
    reports = list(blocks.values())
    reports += _unseen(target.module, reports)
    parameters = list(target.module.parameters())
    return ModelReport(
        target=request.target,
        model_class=type(target.module).__name__,
        level=request.level,
        phase=target.phase,
        input_note=_input_note(request, target),
        dtype=_main_dtype(parameters),
        num_parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        capture_notes=captured.notes,
        notes=target.notes,
        num_graphs=len(found),
        num_graph_nodes=sum(part.num_nodes for part in found),
        machine=machine,
        tokens=request.tokens,
        floor_formula=floor.FORMULA,
        blocks=tuple(reports),
        graphs=tuple(table.graphs),
        outline=build_outline(target.module, reports),
        stages=tuple(clock.times),
        peak_rss_bytes=peak_rss_bytes(),
        versions=_versions(),
    )


def _input_note(request: Request, target: Target) -> str:
    if target.token_axis is None:
        return target.input_note
    if request.shapes == "dynamic":
        return f"{target.input_note}, T dynamic"
    return f"{target.input_note}, T = {request.tokens[0]}"


def _block(
    entry: Match | NoMatch, flow: DataFlow, request: Request, machine: Machine, table: GraphTable
) -> BlockReport:
    if isinstance(entry, NoMatch):
        return BlockReport(
            name=entry.name or entry.node,
            module_class=entry.module_class,
            status=Status.REFUSED,
            reason=entry.reason,
            detail=entry.detail,
            node=entry.node,
            target=_INDUCTOR,
        )
    region = entry.region
    tensors = floor.expert_tensors(region.experts, region.weight_dtype)
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    per_expert = num_bytes // region.experts.num_experts
    placement = place(entry, options.Options(), device=PLACES[request.device])
    return BlockReport(
        name=region.name or entry.output.name,
        module_class=region.module_class,
        status=Status.MATCHED,
        router=region.router.kind,
        region=region,
        target=placement.full_title,
        tensors=tensors,
        expert_bytes=num_bytes,
        bytes_per_expert=per_expert,
        active_bytes_per_token=per_expert * region.top_k,
        floors=floor.floor_points(
            region.experts, region.top_k, region.weight_dtype, machine, request.tokens
        ),
        workspace_bytes=tuple(placement.workspace_bytes(tokens) for tokens in request.tokens),
        graph_idx=table.index_of(block_graph(entry, flow)),
    )


def _unseen(module: nn.Module, blocks: Sequence[BlockReport]) -> list[BlockReport]:
    """Modules that hold stacked experts, and that no block of any graph covers."""
    if any(not block.module_class for block in blocks if block.status is Status.MATCHED):
        return []  # a graph without module names covers modules that nobody can tell
    covered = tuple(block.name for block in blocks)
    found = []
    for name, part in module.named_modules():
        if not _holds_experts(part):
            continue
        if any(name == block or name.startswith(f"{block}.") or not block for block in covered):
            continue
        found.append(
            BlockReport(
                name=name,
                module_class=type(part).__name__,
                status=Status.UNSEEN,
                reason="holds stacked expert weights, but no captured graph has a candidate for it: it was not "
                "called with these inputs, or a graph break hides it",
                target=_INDUCTOR,
            )
        )
    return found


def _holds_experts(module: nn.Module) -> bool:
    """Whether it owns at least two three-dimensional float parameters of equal length, as stacked experts do."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return False
    lengths = [
        p.shape[0]
        for p in module.parameters(recurse=False)
        if p.ndim == 3 and p.is_floating_point() and min(p.shape) > 1
    ]
    return len(lengths) >= 2 and len(set(lengths)) == 1


def _main_dtype(parameters: Sequence[torch.Tensor]) -> str:
    sizes: dict[str, int] = {}
    for parameter in parameters:
        name = DTYPE_NAMES.get(parameter.dtype, str(parameter.dtype).removeprefix("torch."))
        sizes[name] = sizes.get(name, 0) + parameter.numel()
    return max(sizes, key=lambda name: sizes[name]) if sizes else ""


def peak_rss_bytes() -> int:
    """The largest resident size of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _versions() -> tuple[tuple[str, str], ...]:
    found = [
        ("moeflex", __version__),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
    ]
    if "transformers" in sys.modules:
        found.append(("transformers", metadata.version("transformers")))
    return tuple(found)
