"""Find which weights play which role in the experts of a block, and what the experts compute.

Roles come from data flow: a weight is an up projection when no other expert GEMM lies before it, a down projection
otherwise. Everything else (orientation, where gate and up lie, the activation and its limits, where the combine
weight enters) is found by running the block on inputs that make it visible.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx

from moe_compiler.ir import (
    ActivationKind,
    ActivationSpec,
    ExpertSpec,
    GateLayout,
    MoEPlan,
    Orientation,
    RouterSpec,
    Score,
    WeightPosition,
)
from moe_compiler.passes.dataflow import (
    CASTS,
    CONTRACTIONS,
    VIEWS,
    is_float,
    op_name,
    tensor,
)
from moe_compiler.passes.subgraph import (
    Runner,
    Sizes,
    Slice,
    SliceError,
    float_scalars,
    small_view,
)
from moe_compiler.reference import activate, moe_layer

TOLERANCE = 1e-9
"""Relative error under which two fp64 results are the same function."""


class NoSpec(Exception):
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
        NoSpec: the weights do not form experts; the text says why.
    """
    gemms = _find_gemms(part)
    ups = [g for g in gemms if g.upstream == 0]
    downs = [g for g in gemms if g.upstream != 0]
    if not ups or not downs:
        raise NoSpec("there is no pair of up and down projections with weights of their own")
    weights = {g.weight for g in gemms}
    dtypes = {t.dtype for g in gemms if (t := tensor(g.node)) is not None}
    gemm_dtype = dtypes.pop() if len(dtypes) == 1 else None
    if all(_ndim(w) == 3 for w in weights):
        return dataclasses.replace(_stacked(part, ups, downs), gemm_dtype=gemm_dtype)
    if all(_ndim(w) == 2 for w in weights):
        return dataclasses.replace(_listed(part, ups, downs), gemm_dtype=gemm_dtype)
    shapes = sorted({str(tuple(_shape(w))) for w in weights})
    raise NoSpec(
        f"its GEMMs read weights of shapes {', '.join(shapes)}: neither [E, .., ..] nor one matrix an expert"
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
            found = flow.weight_leaf(operand)
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
        raise NoSpec(
            f"its stacked weights disagree on the number of experts: {sorted(num_experts)}"
        )
    if len(up) > 2 or len(down) != 1:
        raise NoSpec(
            f"it has {len(up)} up and {len(down)} down projections; one or two and one can be expressed"
        )
    known = {*up, *down}
    before_down = part.flow.ancestors(
        (g.node for g in downs), first=min(part.flow.position[n] for n in part.body)
    )
    up_bias, down_bias = [], []
    for leaf in part.weights:
        if leaf in known:
            continue
        if _ndim(leaf) != 2 or _shape(leaf)[0] != _shape(up[0])[0]:
            raise NoSpec(
                f"it reads a parameter of shape {list(_shape(leaf))} ('{leaf.name}') that is no expert weight or bias"
            )
        (up_bias if _consumer(part, leaf) in before_down else down_bias).append((leaf,))
    if len(up_bias) not in (0, len(up)) or len(down_bias) > 1:
        raise NoSpec(
            f"it has {len(up_bias)} up and {len(down_bias)} down biases for {len(up)} up projections"
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
                if (found := flow.weight_leaf(a)) is not None
            }
            if weight in reads and not (set(up) - {weight}) & reads:
                ordered.append((bias,))
    if len(ordered) != len(up):
        raise NoSpec("its two up biases cannot be told apart")
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
        raise NoSpec(
            f"its {len(experts)} down projections follow {sorted(widths)} up projections each"
        )
    shapes = {tuple(_shape(g.weight) for g in (*before, down)) for before, down in experts}
    if len(shapes) != 1:
        raise NoSpec(f"its experts are not equal: weight shapes {sorted(map(str, shapes))}")
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
            raise NoSpec(
                f"it reads a parameter of shape {list(_shape(leaf))} ('{leaf.name}') that is no expert weight or bias"
            )
        follows[consumer] = leaf

    def bias_of(gemm: _Gemm) -> fx.Node | None:
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

    up = [tuple(bias_of(before[i]) for before, _ in experts) for i in range(count)]
    down = tuple(bias_of(gemm) for _, gemm in experts)
    used = {b for group in (*up, down) for b in group if b is not None}
    if set(rest) - used:
        raise NoSpec("it reads 1-d parameters that are no bias of an expert")
    if any((None in group) != (group[0] is None) for group in (*up, down)):
        raise NoSpec("some of its experts have a bias and some have none")
    has_up = [group[0] is not None for group in up]
    if any(has_up) != all(has_up):
        raise NoSpec("only one of its two up projections has a bias")
    up_groups = tuple(up) if all(has_up) else ()
    return up_groups, (down if down[0] is not None else ())  # type: ignore[return-value]


# ---- running the block on chosen inputs


class ExpertRun:
    """The experts of a block as a function of (x, ids, weights, expert tensors).

    Args:
        part: the slice, cut at x, ids and weights.
        x, ids, weights: those nodes; `ids` or `weights` may be missing from the slice's inputs when it does not
            read them.
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
        self.peak_bytes = 0

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


def distinct_ids(
    num_tokens: int, num_experts: int, top_k: int, generator: torch.Generator
) -> Tensor:
    """Random ids [T, K], distinct within a token."""
    return torch.rand(num_tokens, num_experts, generator=generator).topk(top_k, dim=-1).indices


def identify(run: ExpertRun, constants: Sequence[float], seed: int = 0) -> ExpertSpec:
    """Find what the experts compute.

    Args:
        run: the experts.
        constants: numbers in the slice that may be limits, slopes or shifts of the activation.

    Raises:
        NoSpec: nothing that an `ExpertSpec` can say agrees; the text says how far it got.
        SliceError: the slice cannot be run.
    """
    generator = torch.Generator().manual_seed(seed)
    partial = list(_shape_hypotheses(run))
    if not partial:
        raise NoSpec(
            f"its weight shapes {[list(s) for s in run.shapes()]} fit no expert with hidden size {run.hidden}"
        )
    spec_and_layout = _find_activation(run, partial, constants, generator)
    return _find_position(run, spec_and_layout, generator)


@dataclasses.dataclass(frozen=True)
class _Hypothesis:
    up: Orientation
    down: Orientation
    intermediate: int
    layouts: tuple[GateLayout, ...]


def _shape_hypotheses(run: ExpertRun) -> Iterator[_Hypothesis]:
    operands = run.operands
    up_shape = run.sizes.shape(operands.up[0][0])[-2:]
    down_shape = run.sizes.shape(operands.down[0])[-2:]
    for up, down in itertools.product(Orientation, Orientation):
        wide, hidden_in = up_shape if up is Orientation.OUT_IN else up_shape[::-1]
        hidden_out, inter = down_shape if down is Orientation.OUT_IN else down_shape[::-1]
        if hidden_in != run.hidden or hidden_out != run.hidden:
            continue
        if len(operands.up) == 2:
            if wide == inter:
                yield _Hypothesis(up, down, inter, (GateLayout.SEPARATE,))
        elif wide == inter:
            yield _Hypothesis(up, down, inter, (GateLayout.NONE,))
        elif wide == 2 * inter:
            yield _Hypothesis(
                up,
                down,
                inter,
                (
                    GateLayout.CONCAT,
                    GateLayout.INTERLEAVED,
                    GateLayout.CONCAT_UP_FIRST,
                    GateLayout.INTERLEAVED_UP_FIRST,
                ),
            )


def _make_spec(
    run: ExpertRun,
    hypothesis: _Hypothesis,
    layout: GateLayout,
    activation: ActivationSpec,
    position: WeightPosition = WeightPosition.OUTPUT,
) -> ExpertSpec:
    return ExpertSpec(
        num_experts=run.operands.num_experts,
        hidden=run.hidden,
        intermediate=hypothesis.intermediate,
        gate_layout=layout,
        w13_orientation=hypothesis.up,
        w2_orientation=hypothesis.down,
        stacked=run.operands.stacked,
        has_b13=bool(run.operands.up_bias),
        has_b2=bool(run.operands.down_bias),
        activation=activation,
        weight_position=position,
    )


def random_tensors(run: ExpertRun, generator: torch.Generator) -> list[Tensor]:
    """Fresh fp64 values for the expert tensors."""
    return [small_view(shape, torch.float64, generator) for shape in run.shapes()]


def _find_activation(
    run: ExpertRun,
    hypotheses: Sequence[_Hypothesis],
    constants: Sequence[float],
    generator: torch.Generator,
) -> list[tuple[_Hypothesis, GateLayout, ActivationSpec, bool]]:
    """Make the activation visible: the down projection is the identity, one route has weight 1, biases are 0."""
    tensors = random_tensors(run, generator)
    roles = _roles(run)
    for i, role in enumerate(roles):
        if role == "bias":
            tensors[i] = torch.zeros_like(tensors[i])
        elif role == "down":
            rows, columns = tensors[i].shape[-2:]
            tensors[i] = torch.eye(rows, columns, dtype=torch.float64).expand(tensors[i].shape)
    x = 4 * torch.randn(run.num_tokens, run.hidden, generator=generator, dtype=torch.float64)
    ids = distinct_ids(run.num_tokens, run.operands.num_experts, run.top_k, generator)
    weights = torch.zeros(run.num_tokens, run.top_k, dtype=torch.float64)
    weights[:, 0] = 1.0
    seen = run(x, ids, weights, tensors)
    found = []
    for hypothesis in hypotheses:
        width = min(hypothesis.intermediate, run.hidden)
        projected = _projections(run, hypothesis, x, ids[:, 0], tensors)
        for layout, gate, up, swapped in _layouts(hypothesis, projected):
            gate, up = gate[:, :width], None if up is None else up[:, :width]
            activation = _match_activation(seen[:, :width], gate, up, constants)
            if activation is not None:
                found.append((hypothesis, layout, activation, swapped))
    if not found:
        raise NoSpec(
            "its activation is none of "
            + ", ".join(kind.value for kind in ActivationKind)
            + " with the limits and slopes found in the graph"
        )
    return found


def _roles(run: ExpertRun) -> list[str]:
    operands = run.operands
    each = 1 if operands.stacked else operands.num_experts
    names = ["up"] * len(operands.up) + ["bias"] * len(operands.up_bias) + ["down"]
    names += ["bias"] if operands.down_bias else []
    return [name for name in names for _ in range(each)]


def _projections(
    run: ExpertRun, hypothesis: _Hypothesis, x: Tensor, expert: Tensor, tensors: Sequence[Tensor]
) -> list[Tensor]:
    operands = run.operands
    each = 1 if operands.stacked else operands.num_experts
    results = []
    for group in range(len(operands.up)):
        rows = []
        for token, e in enumerate(expert.tolist()):
            matrix = tensors[group][e] if operands.stacked else tensors[group * each + e]
            rows.append(
                matrix @ x[token] if hypothesis.up is Orientation.OUT_IN else x[token] @ matrix
            )
        results.append(torch.stack(rows))
    return results


def _layouts(
    hypothesis: _Hypothesis, projected: Sequence[Tensor]
) -> Iterator[tuple[GateLayout, Tensor, Tensor | None, bool]]:
    for layout in hypothesis.layouts:
        if layout is GateLayout.NONE:
            yield layout, projected[0], None, False
        elif layout is GateLayout.SEPARATE:
            yield layout, projected[0], projected[1], False
            yield layout, projected[1], projected[0], True
        else:
            both, inter = projected[0], hypothesis.intermediate
            concat = layout in (GateLayout.CONCAT, GateLayout.CONCAT_UP_FIRST)
            first, second = (
                (both[:, :inter], both[:, inter:]) if concat else (both[:, ::2], both[:, 1::2])
            )
            up_first = layout in (GateLayout.CONCAT_UP_FIRST, GateLayout.INTERLEAVED_UP_FIRST)
            yield layout, *((second, first) if up_first else (first, second)), False


def _match_activation(
    seen: Tensor, gate: Tensor, up: Tensor | None, constants: Sequence[float]
) -> ActivationSpec | None:
    # a few points rule out almost every candidate
    few = slice(0, 1), slice(0, 24)
    few_up = None if up is None else up[few]
    for candidate in _activation_candidates(up is not None, constants):
        if relative_error(activate(candidate, gate[few], few_up), seen[few]) < TOLERANCE:
            if relative_error(activate(candidate, gate, up), seen) < TOLERANCE:
                return candidate
    return None


def _activation_candidates(gated: bool, constants: Sequence[float]) -> Iterator[ActivationSpec]:
    for kind in ActivationKind:
        yield ActivationSpec(kind=kind)
    limits = sorted({abs(c) for c in constants if 0 < abs(c) < 1e6})[:6]
    infinity = float("inf")
    clamps = [(-infinity, infinity)]
    clamps += [pair for c in limits for pair in ((-infinity, c), (-c, c), (-c, infinity))]
    up_clamps = clamps if gated else clamps[:1]
    shifts = [0.0, *limits] if gated else [0.0]
    for kind in ActivationKind:
        slopes = [1.0, *(c for c in limits if c != 1.0)] if kind is ActivationKind.SILU else [1.0]
        for slope, gate, up, shift in itertools.product(slopes, clamps, up_clamps, shifts):
            yield ActivationSpec(
                kind=kind,
                alpha=slope,
                gate_min=gate[0],
                gate_max=gate[1],
                up_min=up[0],
                up_max=up[1],
                up_shift=shift,
            )


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest value; inf when a value is not finite."""
    if ours.numel() == 0:
        return 0.0
    scale = float(theirs.abs().max())
    error = float((ours - theirs).abs().max()) / (scale or 1.0)
    return error if error == error else float("inf")


def _find_position(
    run: ExpertRun,
    found: Sequence[tuple[_Hypothesis, GateLayout, ActivationSpec, bool]],
    generator: torch.Generator,
) -> ExpertSpec:
    tensors = random_tensors(run, generator)
    case = random_case(run, generator, scale=1.0)
    seen = run(*case, tensors)
    best = float("inf")
    for hypothesis, layout, activation, swapped in found:
        for position in WeightPosition:
            spec = _make_spec(run, hypothesis, layout, activation, position)
            expected = reference(spec, case, in_role_order(run.operands, tensors, swapped))
            error = relative_error(expected, seen)
            if error < TOLERANCE:
                if swapped:
                    raise _Swapped(spec)
                return spec
            best = min(best, error)
    raise NoSpec(
        "its activation is known, and still no place of the combine weight and no orientation agrees "
        f"(smallest relative error {best:.1e})"
    )


class _Swapped(Exception):
    """The second of two separate up projections is the gate; carries the spec with the roles exchanged."""

    def __init__(self, spec: ExpertSpec) -> None:
        super().__init__()
        self.spec = spec


def identify_operands(
    make_run: Callable[[Operands], ExpertRun], operands: Operands, constants: Sequence[float]
) -> tuple[ExpertSpec, Operands, ExpertRun]:
    """`identify`, with the operands put into role order (gate first) where they are separate."""
    run = make_run(operands)
    try:
        return identify(run, constants), operands, run
    except _Swapped as swapped:
        exchanged = dataclasses.replace(
            operands, up=operands.up[::-1], up_bias=operands.up_bias[::-1]
        )
        again = make_run(exchanged)
        again.num_runs = run.num_runs
        return swapped.spec, exchanged, again


def in_role_order(operands: Operands, tensors: Sequence[Tensor], swapped: bool) -> list[Tensor]:
    """Exchange gate and up tensors (and their biases) when `swapped`."""
    if not swapped:
        return list(tensors)
    each = 1 if operands.stacked else operands.num_experts
    chunks = [list(tensors[i : i + each]) for i in range(0, len(tensors), each)]
    chunks[0], chunks[1] = chunks[1], chunks[0]
    if operands.up_bias:
        chunks[2], chunks[3] = chunks[3], chunks[2]
    return list(itertools.chain.from_iterable(chunks))


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


def constants_of(part: Slice) -> tuple[float, ...]:
    """Numbers that stand in the arithmetic of a slice: limits, slopes, shifts, scales, epsilons."""
    found: dict[float, None] = dict.fromkeys(float_scalars(part))
    for node in part.body:
        if not is_float(node) or op_name(node) in VIEWS | CASTS | {"getitem", "index"}:
            continue
        arguments: Mapping[str, object] = node.kwargs
        for argument in (*node.args, *arguments.values()):
            if isinstance(argument, (int, float)) and not isinstance(argument, bool):
                found[float(argument)] = None
    return tuple(found)
