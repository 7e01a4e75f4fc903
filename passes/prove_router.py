"""Cut the router of a candidate out of its graph and hand it to `match_router` as a function."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from moe_compiler.passes.candidates import Candidate
from moe_compiler.passes.crowd import larger_sizes, numbers_in, tokens_beyond
from moe_compiler.passes.gradients import stop_of_router
from moe_compiler.passes.match_router import (
    NoMatchReason,
    RouterMatch,
    crowd_reason,
    match_router,
)
from moe_compiler.passes.nodes import op_name, shape_hint, tensor
from moe_compiler.passes.operands import NoSpecError
from moe_compiler.passes.router_probe import RouterProblem
from moe_compiler.passes.shrink import candidate_sizes
from moe_compiler.passes.subgraph import Runner, Sizes, Slice, SliceError, cut, float_scalars


def router_slice(candidate: Candidate) -> Slice | str:
    """The slice from logits to (ids, weights), or the reason why there is none."""
    if candidate.logits is None:
        return "its ids do not come from router logits"
    try:
        return cut(candidate.flow, [candidate.logits], [candidate.ids, candidate.weights])
    except SliceError as error:
        return str(error)


def router_signature(candidate: Candidate) -> str:
    """Text that is equal for routers that compute the same function."""
    part = router_slice(candidate)
    return part if isinstance(part, str) else f"{part.signature()} {stop_of_router(part)}"


def router_bias(candidate: Candidate) -> fx.Node | None:
    """The selection bias [E] that the router reads, if any."""
    part = router_slice(candidate)
    return None if isinstance(part, str) or not part.weights else part.weights[0]


class _RouterFunction:
    """A router slice as a `SubgraphFunction`."""

    def __init__(self, part: Slice, sizes: Sizes) -> None:
        self.runner = Runner(part, sizes)
        self.part, self.sizes = part, sizes
        *leading, self.width = sizes.shape(part.inputs[0])
        self.num_tokens = 1
        for size in leading:
            self.num_tokens *= size

    def __call__(
        self, logits: Tensor, bias: Tensor | None, *, precise: bool
    ) -> tuple[Tensor | None, Tensor]:
        (node,) = self.part.inputs
        values = {node: self._fit(logits, node, precise)}
        for leaf in self.part.weights:
            assert bias is not None
            values[leaf] = self._fit(bias, leaf, precise)
        ids, weights = self.runner(values, precise=precise)
        rows = logits.shape[0]
        return ids.reshape(rows, -1), weights.reshape(rows, -1)

    def _fit(self, entry: Tensor, node: fx.Node, precise: bool) -> Tensor:
        found = tensor(node)
        assert found is not None
        entry = entry.reshape(self.sizes.shape(node))
        return entry.double() if precise else entry.to(found.dtype)


def prove_router(candidate: Candidate, num_experts: int) -> tuple[RouterMatch | None, str]:
    """Find and prove the router.

    Returns:
        The match and "", or the match with a note why the op may not absorb it, or None with the
        reason.
    """
    part = router_slice(candidate)
    if isinstance(part, str):
        return None, part
    assert candidate.logits is not None
    width = shape_hint(candidate.logits)[-1]
    if width != num_experts:
        return None, f"its router has {width} columns for {num_experts} experts"
    leaves = part.weights
    if len(leaves) > 1 or any(shape_hint(n)[-1] != width for n in leaves):
        shapes = [list(shape_hint(n)) for n in leaves]
        return None, f"its router reads weights of shapes {shapes}, where one bias [E] is expected"
    stop = stop_of_router(part)
    if stop:
        return None, stop
    reason = ""
    for sizes in candidate_sizes(part, x=candidate.logits, ids=candidate.ids, operands=None):
        try:
            found = match_router(_problem(candidate, part, sizes))
        except SliceError as error:
            reason = str(error)
            continue
        if isinstance(found, NoMatchReason):
            reason = found.reason
            continue
        crowded = _crowd_reason(candidate, part, sizes, found)
        if crowded:
            return None, crowded
        return found, "" if found.exact_ids else found.note
    return None, reason


def _crowd_reason(candidate: Candidate, part: Slice, sizes: Sizes, found: RouterMatch) -> str:
    """Why a router does not hold for more tokens than any number that it reads, or ""."""
    (logits,) = part.inputs
    needed = tokens_beyond(numbers_in(part, sizes.literals), logits)
    if needed <= _RouterFunction(part, sizes).num_tokens:
        return ""
    reason = "its router cannot be run on more tokens than the numbers that it reads"
    for larger in larger_sizes(part, logits, candidate.ids, needed, None):
        try:
            return crowd_reason(_problem(candidate, part, larger), found.spec)
        except SliceError as error:
            reason = str(error)
    return reason


def check_support(candidate: Candidate) -> None:
    """Dense weights [T, E] have to be zero for every expert that is not among the ids.

    Raises:
        NoSpecError: they are not, or it cannot be seen.
    """
    part = router_slice(candidate)
    if isinstance(part, str):
        raise NoSpecError(f"its weights [T, E] may be used for experts that are no ids: {part}")
    reason = ""
    for sizes in candidate_sizes(part, x=part.inputs[0], ids=candidate.ids, operands=None):
        try:
            reason = _support_reason(part, sizes)
        except SliceError as error:
            reason = str(error)
            continue
        break
    if reason:
        raise NoSpecError(f"its weights [T, E] are used for other experts than its ids: {reason}")


def _support_reason(part: Slice, sizes: Sizes) -> str:
    """Why ids and nonzero weights are not the same experts on some logits, or ""."""
    generator = torch.Generator().manual_seed(6)
    runner = Runner(part, sizes)
    values = {}
    for leaf in part.weights:
        found = tensor(leaf)
        if found is None or not found.is_floating_point():
            return f"they depend on the integers of '{leaf.name}'"
        values[leaf] = torch.rand(sizes.shape(leaf), generator=generator).to(found.dtype)
    (node,) = part.inputs
    logits = tensor(node)
    assert logits is not None
    for spread, step in ((1.0, 0.0), (3.0, 0.0), (1.0, 0.5), (0.02, 0.0), (200.0, 0.0)):
        rows = spread * torch.randn(sizes.shape(node), generator=generator)
        rows = (rows / step).round() * step if step else rows
        ids, weights = runner({**values, node: rows.to(logits.dtype)}, precise=False)
        ids, weights = ids.flatten(0, -2).long(), weights.flatten(0, -2)
        if ids.shape[-1] > 1 and bool((ids.sort(-1).values.diff(dim=-1) == 0).any()):
            return "an expert is chosen twice for one token"
        if bool(weights.scatter(-1, ids, 0.0).any()):
            return "they are not zero elsewhere"
    return ""


def _problem(candidate: Candidate, part: Slice, sizes: Sizes) -> RouterProblem:
    function = _RouterFunction(part, sizes)
    logits, weights = tensor(part.inputs[0]), tensor(candidate.weights)
    assert logits is not None
    assert weights is not None
    bias = tensor(part.weights[0]) if part.weights else None
    return RouterProblem(
        run=function,
        num_experts=function.width,
        top_k=candidate.top_k,
        num_tokens=function.num_tokens,
        has_bias=bias is not None,
        dense=candidate.dense,
        logits_dtype=logits.dtype,
        bias_dtype=bias.dtype if bias is not None else torch.float32,
        weights_dtype=weights.dtype,
        ops=tuple(op_name(n) for n in part.body),
        constants=_numbers(part, float),
        int_constants=tuple(int(c) for c in _numbers(part, int)),
    )


def _numbers(part: Slice, kind: type) -> tuple[float, ...]:
    found: dict[float, None] = dict.fromkeys(float_scalars(part) if kind is float else ())

    def visit(argument: object) -> None:
        if isinstance(argument, (list, tuple)):
            for entry in argument:
                visit(entry)
        elif type(argument) in (int, float) and (kind is float or type(argument) is int):
            found[argument] = None  # type: ignore[index]

    for node in part.body:
        visit(tuple(node.args))
        visit(tuple(node.kwargs.values()))
    return tuple(found)
