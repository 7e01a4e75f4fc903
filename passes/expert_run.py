"""Run the experts of a block on chosen inputs, next to the reference of a spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from moe_compiler.ir import ExpertSpec, MoEPlan, RouterSpec, Score
from moe_compiler.passes import describe
from moe_compiler.passes.candidates import Candidate
from moe_compiler.passes.nodes import CASTS, VIEWS, is_float, op_name, tensor
from moe_compiler.passes.operands import Operands
from moe_compiler.passes.subgraph import (
    Runner,
    Sizes,
    Slice,
    SliceError,
    float_scalars,
)
from moe_compiler.reference import moe_layer

TOLERANCE = 1e-9
"""Relative error under which two fp64 results are the same function."""

MAX_LIMIT = 1e30
"""Larger numbers limit nothing that is finite in fp32."""

MAX_PROOF_BYTES = 6 << 30
MAX_PROOF_FLOP = 4e11


_COMPARISONS = frozenset(("lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal"))
_NO_ARITHMETIC = VIEWS | CASTS | {"getitem", "index"}


class ExpertRun:
    """The experts of a block as a function of (x, ids, weights, expert tensors).

    Args:
        part: the slice, cut at x, ids and weights.
        x, ids, weights: those nodes; `ids` or `weights` may be missing from the slice's inputs
            when it does not read them.
        dense: `weights` is [T, E], zero where not routed.
        operands: the expert weights.
        sizes: sizes of the run.
    """

    def __init__(
        self,
        part: Slice,
        *,
        x: fx.Node,
        ids: fx.Node,
        weights: fx.Node,
        dense: bool,
        operands: Operands,
        sizes: Sizes,
    ) -> None:
        self.runner = Runner(part, sizes)
        self.x, self.ids, self.weights = x, ids, weights
        self.dense = dense
        self.operands = operands
        self.sizes = sizes
        *leading, self.hidden = sizes.shape(x)
        self.num_tokens = 1
        for size in leading:
            self.num_tokens *= size
        self.top_k = sizes.shape(ids)[-1]
        self.num_runs = 0

    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the expert tensors in the run."""
        return [self.sizes.shape(n) for n in self.operands.nodes]

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        tensors: Sequence[Tensor],
        *,
        precise: bool = True,
    ) -> Tensor:
        """Run: x [T, H], ids [T, K], weights [T, K] -> [T, H]."""
        if self.dense:
            width = self.sizes.shape(self.weights)[-1]
            weights = torch.zeros(ids.shape[0], width, dtype=weights.dtype).scatter(1, ids, weights)
        given = {self.x: x, self.ids: ids, self.weights: weights}
        values: dict[fx.Node, Tensor] = {}
        for node in self.runner.part.inputs:
            found = tensor(node)
            assert found is not None
            entry = given[node].reshape(self.sizes.shape(node))
            if not (precise and found.is_floating_point()):
                entry = entry.to(found.dtype)
            values[node] = entry
        for node, entry in zip(self.operands.nodes, tensors, strict=True):
            found = tensor(node)
            assert found is not None
            values[node] = entry if precise else entry.to(found.dtype)
        self.num_runs += 1
        (out,) = self.runner(values, precise=precise)
        if out.numel() != self.num_tokens * self.hidden:
            raise SliceError(f"the result has {out.numel()} elements instead of T * H")
        return out.reshape(self.num_tokens, self.hidden)


def run_of(candidate: Candidate, sizes: Sizes, operands: Operands) -> ExpertRun:
    """The experts of a candidate at some sizes, under some assignment of roles."""
    return ExpertRun(
        candidate.part,
        x=candidate.x,
        ids=candidate.ids,
        weights=candidate.weights,
        dense=candidate.dense,
        operands=operands,
        sizes=sizes,
    )


def run_bytes(run: ExpertRun) -> int:
    """Bytes of fp64 values that a run holds; gathers decide, as weights are views of small buffers."""
    inter = run.sizes.shape(run.operands.down[0])
    matrix = inter[-1] * inter[-2]
    routes = run.num_tokens * run.top_k
    form = describe.expert_form(run.runner.part)
    if form == "gathered":
        return routes * matrix * 3 * 8
    if form == "dense":
        return run.num_tokens * run.operands.num_experts * (run.hidden + 3 * inter[-1]) * 8
    return routes * (2 * run.hidden + 3 * max(inter[-2:])) * 8 + 3 * matrix * 8


def too_large_to_prove(run: ExpertRun) -> str:
    """Why a run costs too much, or ""."""
    size = run_bytes(run)
    inter = run.sizes.shape(run.operands.down[0])
    routes = run.num_tokens * run.top_k
    if describe.expert_form(run.runner.part) == "dense":
        routes = run.num_tokens * run.operands.num_experts
    flop = 6.0 * routes * inter[-1] * inter[-2]
    if size > MAX_PROOF_BYTES or flop > MAX_PROOF_FLOP:
        return (
            f"its proof would need {size / 2**30:.1f} GiB and {flop / 1e9:.0f} GFLOP at sizes that "
            "cannot be shrunk; compile with dynamic=True or fewer tokens"
        )
    return ""


def distinct_ids(
    num_tokens: int, num_experts: int, top_k: int, generator: torch.Generator
) -> Tensor:
    """Random ids [T, K], distinct within a token."""
    return torch.rand(num_tokens, num_experts, generator=generator).topk(top_k, dim=-1).indices


def small_view(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random values of `shape` as overlapping strided views of one small buffer.

    The first axis of a weight moves by 97 elements, the second by 61, the last by 1, so that a
    whole layer of a large model costs some thousand numbers, and no two axes can be confused with
    each other.
    """
    steps = (1, 61, 97, 193, 389)[: len(shape)]
    strides = tuple(reversed(steps))
    length = 1 + sum(
        (size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size
    )
    scale = max(1, shape[-1]) ** -0.5 if len(shape) > 1 else 0.5
    buffer = torch.randn(max(1, length), generator=generator, dtype=torch.float64) * scale
    return buffer.to(dtype).as_strided(tuple(shape), strides)


def random_tensors(run: ExpertRun, generator: torch.Generator) -> list[Tensor]:
    """Fresh fp64 values for the expert tensors."""
    return [small_view(shape, torch.float64, generator) for shape in run.shapes()]


def random_case(
    run: ExpertRun, generator: torch.Generator, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Random x, ids and weights of both signs."""
    x = scale * torch.randn(run.num_tokens, run.hidden, generator=generator, dtype=torch.float64)
    ids = distinct_ids(run.num_tokens, run.operands.num_experts, run.top_k, generator)
    weights = 3 * torch.rand(ids.shape, generator=generator, dtype=torch.float64) - 1.5
    return x, ids, weights


def reference(
    spec: ExpertSpec, case: tuple[Tensor, Tensor, Tensor], tensors: Sequence[Tensor]
) -> Tensor:
    """What the spec says, in fp64."""
    x, ids, weights = case
    router = RouterSpec(score=Score.EXTERNAL, top_k=ids.shape[-1])
    plan = MoEPlan(router=router, experts=spec, out_dtype="fp64")
    with torch.no_grad():
        return moe_layer(plan, x, [ids, weights], tensors)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest value; inf when a value is not finite."""
    if ours.numel() == 0:
        return 0.0
    scale = float(theirs.abs().max())
    error = float((ours - theirs).abs().max()) / (scale or 1.0)
    return error if error == error else float("inf")


def scale_beyond_limits(constants: Sequence[float]) -> float:
    """How large x has to be for its projections to pass every limit; 0 where they do anyway."""
    largest = max((abs(c) for c in constants if abs(c) <= MAX_LIMIT), default=0.0)
    return 4 * largest if largest > 1 else 0.0


def constants_of(part: Slice) -> tuple[float, ...]:
    """Numbers that stand in the arithmetic of a slice: limits, slopes, shifts, scales, epsilons."""
    found: dict[float, None] = dict.fromkeys(float_scalars(part))
    for node in part.body:
        compares = op_name(node) in _COMPARISONS and any(map(is_float, node.all_input_nodes))
        if not (is_float(node) or compares) or op_name(node) in _NO_ARITHMETIC:
            continue
        arguments: Mapping[str, object] = node.kwargs
        for argument in (*node.args, *arguments.values()):
            if isinstance(argument, (int, float)) and not isinstance(argument, bool):
                found[float(argument)] = None
    return tuple(found)
