"""One cell of the coverage table: trace a tiny model one way, match it, compare."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import nn

from moe_compiler.ir import MoERegion
from moe_compiler.passes.match_moe import find_regions
from moe_compiler.runtime import capture
from tests.models import expected, zoo

LENGTH = 9  # tokens of a prefill sequence; state-space layers unroll over it
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Cell:
    """How a family is traced.

    Attributes:
        family: key of `zoo.FAMILIES`.
        implementation: `experts_implementation`, "" for families outside of that interface.
        phase: one of `zoo.PHASES`.
        dynamic: token counts are symbols.
        dtype: "fp32" | "bf16".
        level: "torch" (dynamo) | "aten" (torch.export).
    """

    family: str
    implementation: str
    phase: str
    dynamic: bool
    dtype: str
    level: str

    def __str__(self) -> str:
        shapes = "dynamic" if self.dynamic else "static"
        parts = (self.family, self.implementation or "own", self.phase, shapes, self.dtype)
        return "-".join((*parts, self.level))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a cell gave.

    Attributes:
        regions: proven blocks.
        reasons: blocks that were left alone, `name: reason`.
        ways: how the graph was captured.
        num_graphs: graphs.
        problems: what is not as expected; empty when all is well.
    """

    regions: tuple[MoERegion, ...]
    reasons: tuple[str, ...]
    ways: tuple[str, ...]
    num_graphs: int
    problems: tuple[str, ...]


def _exports(cell: Cell) -> bool:
    """Whether torch.export can trace a cell: no cache, no loop over hit experts or over a symbol."""
    if cell.phase != "prefill" or cell.family not in expected.EXPECTED:
        return False
    return not (cell.dynamic and zoo.FAMILIES[cell.family].unrolled)


def cells(families: tuple[str, ...]) -> Iterator[Cell]:
    """Every cell of some families; ATen for prefill only, since torch.export takes no cache."""
    for family in families:
        axes = (zoo.FAMILIES[family].implementations, zoo.PHASES, (False, True), DTYPES)
        for implementation, phase, dynamic, dtype in itertools.product(*axes):
            for level in ("torch", "aten"):
                cell = Cell(family, implementation, phase, dynamic, dtype, level)
                if level == "torch" or _exports(cell):
                    yield cell


def default_cells() -> Iterator[Cell]:
    """Two cells a family: every value of every axis occurs many times, every family in both dtypes."""
    for i, (family, entry) in enumerate(zoo.FAMILIES.items()):
        if family not in expected.EXPECTED:
            continue
        count = len(entry.implementations)
        dtypes = tuple(DTYPES) if i % 2 else tuple(DTYPES)[::-1]
        first, second = entry.implementations[i % count], entry.implementations[(i + 1) % count]
        level = "aten" if i % 4 == 0 else "torch"
        phase = "prefill" if level == "aten" else zoo.PHASES[i % 3]
        yield Cell(family, first, phase, bool(i // 2 % 2), dtypes[0], level)
        yield Cell(family, second, zoo.PHASES[(i + 1) % 3], not i // 2 % 2, dtypes[1], "torch")


# phase, dynamic, dtype, level of the published table; eager experts trace to the same graph as grouped_mm
_TABLE = {
    "grouped_mm": (
        ("prefill", False, "bf16", "torch"),
        ("decode_static_cache", True, "fp32", "torch"),
    ),
    "batched_mm": (
        ("prefill", True, "fp32", "aten"),
        ("decode_dynamic_cache", False, "bf16", "torch"),
    ),
    "eager": (("decode_dynamic_cache", True, "fp32", "torch"),),
}
_TABLE[""] = _TABLE["grouped_mm"]


def table_cells(families: tuple[str, ...]) -> Iterator[Cell]:
    """The cells of the published table: `cells` thinned out to what differs most."""
    for family in families:
        for implementation in zoo.FAMILIES[family].implementations:
            for values in _TABLE[implementation]:
                cell = Cell(family, implementation, *values)
                if cell.level == "aten" and not _exports(cell):
                    cell = dataclasses.replace(cell, level="torch")
                yield cell


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits


def run(cell: Cell) -> Outcome:
    """Trace and match one cell."""
    torch._dynamo.reset()
    model = zoo.build(cell.family, cell.implementation, DTYPES[cell.dtype])
    regions: list[MoERegion] = []
    reasons: list[str] = []
    prefix = ""
    if cell.level == "aten":
        prefix = "model."
        shapes = {"ids": {1: torch.export.Dim.DYNAMIC}} if cell.dynamic else None
        program = capture.capture_export(
            _Logits(model).eval(), zoo.prefill(length=LENGTH)[0], dynamic_shapes=shapes
        )
        signature = program.graph_signature
        constant = {*signature.inputs_to_parameters, *signature.inputs_to_buffers}
        constant.update(signature.inputs_to_lifted_tensor_constants)
        nodes = program.graph_module.graph.nodes
        parameters = [n for n in nodes if n.op == "placeholder" and n.name in constant]
        found = [(program.graph_module, find_regions(program.graph_module, parameters=parameters))]
        ways = program.capture_ways
    else:
        args, kwargs = zoo.inputs(model, cell.phase, LENGTH)
        graphs = capture.capture_graphs(model, args, kwargs, dynamic=cell.dynamic)
        found = [(gm, find_regions(gm, inputs)) for gm, inputs in graphs]
        ways = tuple(dict.fromkeys(way for gm, _ in graphs for way in gm.meta["capture_ways"]))
    for gm, result in found:
        regions += [match.region for match in result.matches]
        refused = list(result.refused)
        fragment = capture.fragment_reason(gm)
        refused += [fragment] if fragment is not None else []
        reasons += [f"{r.name or r.node}: {r.reason}" for r in refused]
    problems = _problems(cell, regions, prefix) if cell.family in expected.EXPECTED else []
    return Outcome(tuple(regions), tuple(reasons), tuple(ways), len(found), tuple(problems))


def _problems(cell: Cell, regions: list[MoERegion], prefix: str) -> list[str]:
    names = tuple(region.name.removeprefix(prefix) for region in regions)
    blocks = zoo.FAMILIES[cell.family].blocks
    prefill = cell.phase == "prefill"
    problems = [] if names == blocks else [f"proven {names} instead of {blocks}"]
    for region in regions:
        problems += [f"{region.name}: {text}" for text in expected.differences(cell.family, region)]
        # a decode step under `dynamic` may keep its batch as a symbol or not
        if bool(region.num_tokens) == cell.dynamic and not (cell.dynamic and not prefill):
            problems.append(f"{region.name}: num_tokens {region.num_tokens}")
    return problems
