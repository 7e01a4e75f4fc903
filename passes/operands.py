"""Find which weights play which role in the experts of a block.

Roles come from data flow: a weight is an up projection when no other expert GEMM lies before it,
a down projection otherwise.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from moe_compiler.passes.nodes import CASTS, CONTRACTIONS, VIEWS, op_name, tensor
from moe_compiler.passes.subgraph import Slice


class NoSpecError(Exception):
    """The experts compute something that no `ExpertSpec` says; the text is the reason."""


@dataclasses.dataclass(frozen=True)
class Operands:
    """Graph nodes of the expert weights; each group has one node when stacked, E nodes otherwise.

    Attributes:
        up: one group (gate and up together, or not gated) or two groups (separate).
        up_bias: none, or as many groups as `up`.
        down: the down projection.
        down_bias: its bias, or empty.
        num_experts: E.
        stacked: one tensor with a leading E axis for a role.
        gemm_dtype: dtype of the GEMM results in the graph; None when they differ.
    """

    up: tuple[tuple[fx.Node, ...], ...]
    up_bias: tuple[tuple[fx.Node, ...], ...]
    down: tuple[fx.Node, ...]
    down_bias: tuple[fx.Node, ...]
    num_experts: int
    stacked: bool
    gemm_dtype: torch.dtype | None = None

    @property
    def groups(self) -> tuple[tuple[fx.Node, ...], ...]:
        """All groups in the order of `ExpertSpec.tensor_roles`."""
        return self.up + self.up_bias + (self.down,) + ((self.down_bias,) if self.down_bias else ())

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All weights in the order in which the op takes them."""
        return tuple(itertools.chain.from_iterable(self.groups))

    def exchanged(self) -> Operands:
        """The two separate up projections (and their biases) in the other order."""
        return dataclasses.replace(self, up=self.up[::-1], up_bias=self.up_bias[::-1])


@dataclasses.dataclass(frozen=True)
class _Gemm:
    node: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    upstream: int  # bit set of the GEMMs before this one
    index: int


def find_operands(part: Slice) -> Operands:
    """Assign a role to every weight of the expert slice.

    Raises:
        NoSpecError: the weights do not form experts; the text says why.
    """
    gemms = _find_gemms(part)
    ups = [g for g in gemms if g.upstream == 0]
    downs = [g for g in gemms if g.upstream != 0]
    if not ups or not downs:
        raise NoSpecError("there is no pair of up and down projections with weights of their own")
    weights = {g.weight for g in gemms}
    dtypes = {t.dtype for g in gemms if (t := tensor(g.node)) is not None}
    gemm_dtype = dtypes.pop() if len(dtypes) == 1 else None
    if all(_ndim(w) == 3 for w in weights):
        return dataclasses.replace(_stacked(part, ups, downs), gemm_dtype=gemm_dtype)
    if all(_ndim(w) == 2 for w in weights):
        return dataclasses.replace(_listed(part, ups, downs), gemm_dtype=gemm_dtype)
    shapes = sorted({str(tuple(_shape(w))) for w in weights})
    raise NoSpecError(
        f"its GEMMs read weights of shapes {', '.join(shapes)}: neither [E, .., ..] nor one matrix "
        "an expert"
    )


def _find_gemms(part: Slice) -> list[_Gemm]:
    flow, leaves = part.flow, set(part.weights)
    upstream: dict[fx.Node, int] = {}
    gemms: list[_Gemm] = []
    for node in part.body:
        before = 0
        for read in flow.data_inputs[node]:
            before |= upstream.get(read, 0)
        upstream[node] = before
        if op_name(node) not in CONTRACTIONS:
            continue
        matrix, bias = None, None
        for operand in flow.inputs[node]:
            found = part.weight_leaf(operand)
            if found is None or found[0] not in leaves:
                continue
            if _ndim(found[0]) == 1:
                bias = found[0]
            elif _ndim(found[0]) >= 2:
                matrix = found[0]
        if matrix is not None:
            gemms.append(_Gemm(node, matrix, bias, before, len(gemms)))
            upstream[node] = before | 1 << gemms[-1].index
    return gemms


def _ndim(node: fx.Node) -> int:
    found = tensor(node)
    return -1 if found is None else found.ndim


def _shape(node: fx.Node) -> tuple[int, ...]:
    found = tensor(node)
    assert found is not None
    return tuple(found.shape)


def _stacked(part: Slice, ups: list[_Gemm], downs: list[_Gemm]) -> Operands:
    up = tuple(dict.fromkeys(g.weight for g in ups))
    down = tuple(dict.fromkeys(g.weight for g in downs))
    num_experts = {_shape(w)[0] for w in up + down}
    if len(num_experts) != 1:
        raise NoSpecError(
            f"its stacked weights disagree on the number of experts: {sorted(num_experts)}"
        )
    if len(up) > 2 or len(down) != 1:
        raise NoSpecError(
            f"it has {len(up)} up and {len(down)} down projections; one or two and one can be "
            "expressed"
        )
    known = {*up, *down}
    before_down = part.flow.ancestors(
        (g.node for g in downs), first=min(part.flow.position[n] for n in part.body)
    )
    up_bias: list[tuple[fx.Node]] = []
    down_bias: list[tuple[fx.Node]] = []
    for leaf in part.weights:
        if leaf in known:
            continue
        if _ndim(leaf) != 2 or _shape(leaf)[0] != _shape(up[0])[0]:
            raise _stray(leaf)
        (up_bias if _consumer(part, leaf) in before_down else down_bias).append((leaf,))
    if len(up_bias) not in (0, len(up)) or len(down_bias) > 1:
        raise NoSpecError(
            f"it has {len(up_bias)} up and {len(down_bias)} down biases for {len(up)} up "
            "projections"
        )
    if len(up_bias) == 2:
        up_bias = _biases_in_order(part, up, up_bias)
    return Operands(
        up=tuple((w,) for w in up),
        up_bias=tuple(up_bias),
        down=down,
        down_bias=down_bias[0] if down_bias else (),
        num_experts=num_experts.pop(),
        stacked=True,
    )


def _stray(leaf: fx.Node) -> NoSpecError:
    return NoSpecError(
        f"it reads a parameter of shape {list(_shape(leaf))} ('{leaf.name}') that is no expert "
        "weight or bias"
    )


def _consumer(part: Slice, leaf: fx.Node) -> fx.Node | None:
    """The first arithmetic on a bias, past the views and gathers."""
    body = set(part.body)
    stack = [leaf]
    while stack:
        for user in part.flow.users[stack.pop()]:
            if user not in body:
                continue
            if op_name(user) not in VIEWS | CASTS | {
                "getitem",
                "index",
                "index_select",
                "embedding",
                "repeat_interleave",
            }:
                return user
            stack.append(user)
    return None


def _biases_in_order(
    part: Slice, up: Sequence[fx.Node], biases: list[tuple[fx.Node]]
) -> list[tuple[fx.Node]]:
    """Pair each bias with the projection that its sum continues."""
    flow = part.flow
    ordered: list[tuple[fx.Node]] = []
    for weight in up:
        for (bias,) in biases:
            consumer = _consumer(part, bias)
            sources = (
                flow.ancestors([consumer], first=flow.position[part.body[0]]) if consumer else set()
            )
            reads = {
                found[0]
                for n in sources
                if op_name(n) in CONTRACTIONS
                for a in flow.inputs[n]
                if (found := part.weight_leaf(a)) is not None
            }
            if weight in reads and not (set(up) - {weight}) & reads:
                ordered.append((bias,))
    if len(ordered) != len(up):
        raise NoSpecError("its two up biases cannot be told apart")
    return ordered


def _listed(part: Slice, ups: list[_Gemm], downs: list[_Gemm]) -> Operands:
    """One matrix an expert: each down projection with the up projections before it is one expert."""
    by_index = {g.index: g for g in ups}
    experts: list[tuple[list[_Gemm], _Gemm]] = []
    for down in downs:
        before = [by_index[i] for i in by_index if down.upstream >> i & 1]
        experts.append((before, down))
    widths = {len(before) for before, _ in experts}
    if len(widths) != 1 or not 1 <= max(widths) <= 2:
        raise NoSpecError(
            f"its {len(experts)} down projections follow {sorted(widths)} up projections each"
        )
    shapes = {tuple(_shape(g.weight) for g in (*before, down)) for before, down in experts}
    if len(shapes) != 1:
        raise NoSpecError(f"its experts are not equal: weight shapes {sorted(map(str, shapes))}")
    count = widths.pop()
    up = tuple(tuple(before[i].weight for before, _ in experts) for i in range(count))
    down_weights = tuple(down.weight for _, down in experts)
    rest = [w for w in part.weights if w not in {*itertools.chain(*up), *down_weights}]
    up_bias, down_bias = _listed_biases(part, experts, rest, count)
    return Operands(
        up=up,
        up_bias=up_bias,
        down=down_weights,
        down_bias=down_bias,
        num_experts=len(experts),
        stacked=False,
    )


def _listed_biases(
    part: Slice, experts: Sequence[tuple[list[_Gemm], _Gemm]], rest: list[fx.Node], count: int
) -> tuple[tuple[tuple[fx.Node, ...], ...], tuple[fx.Node, ...]]:
    """Biases are operands of the GEMM itself, or 1-d weights added to its result."""
    follows: dict[fx.Node, fx.Node] = {}
    for leaf in rest:
        consumer = _consumer(part, leaf)
        if _ndim(leaf) != 1 or consumer is None:
            raise _stray(leaf)
        follows[consumer] = leaf
    up = [
        [_bias_of(part, before[i], follows) for before, _ in experts]  # one group a projection
        for i in range(count)
    ]
    down = [_bias_of(part, gemm, follows) for _, gemm in experts]
    if set(rest) - {bias for group in (*up, down) for bias in group}:
        raise NoSpecError("it reads 1-d parameters that are no bias of an expert")
    *up_groups, down_group = (_all_or_none(group) for group in (*up, down))
    if len({bool(group) for group in up_groups}) > 1:
        raise NoSpecError("only one of its two up projections has a bias")
    return tuple(group for group in up_groups if group), down_group


def _bias_of(part: Slice, gemm: _Gemm, follows: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
    """The bias of a GEMM; `follows` maps the addition of a bias to the bias."""
    if gemm.bias is not None:
        return gemm.bias
    node = gemm.node
    for _ in range(4):  # views between the GEMM and the addition
        users = part.flow.data_users[node]
        for user in users:
            if user in follows:
                return follows[user]
        if len(users) != 1:
            return None
        node = users[0]
    return None


def _all_or_none(group: Sequence[fx.Node | None]) -> tuple[fx.Node, ...]:
    """The biases of one projection in expert order; () when no expert has one."""
    found = tuple(bias for bias in group if bias is not None)
    if len(found) not in (0, len(group)):
        raise NoSpecError("some of its experts have a bias and some have none")
    return found
