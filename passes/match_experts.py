"""Find what the experts of a block compute.

Orientation, where gate and up lie, the activation and its limits, and where the combine weight
enters are found by running the block on inputs that make them visible; never from shapes alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from moe_compiler.ir import (
    ActivationKind,
    ActivationSpec,
    ExpertSpec,
    GateLayout,
    Orientation,
    WeightPosition,
)
from moe_compiler.passes.expert_run import (
    TOLERANCE,
    ExpertRun,
    distinct_ids,
    random_case,
    random_tensors,
    reference,
    relative_error,
    scale_beyond_limits,
)
from moe_compiler.passes.explain import explain_mismatch
from moe_compiler.passes.operands import NoSpecError, Operands
from moe_compiler.reference import activate


def identify(run: ExpertRun, constants: Sequence[float], seed: int = 0) -> tuple[ExpertSpec, bool]:
    """Find what the experts compute.

    Args:
        run: the experts.
        constants: numbers in the slice that may be limits, slopes or shifts of the activation.
        seed: of the random inputs.

    Returns:
        The spec, and whether the second of two separate up projections is the gate.

    Raises:
        NoSpecError: nothing that an `ExpertSpec` can say agrees; the text says how far it got.
        SliceError: the slice cannot be run.
    """
    generator = torch.Generator().manual_seed(seed)
    partial = list(_shape_hypotheses(run))
    if not partial:
        raise NoSpecError(
            f"its weight shapes {[list(s) for s in run.shapes()]} fit no expert with hidden size "
            f"{run.hidden}"
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


def _find_activation(
    run: ExpertRun,
    hypotheses: Sequence[_Hypothesis],
    constants: Sequence[float],
    generator: torch.Generator,
) -> list[tuple[_Hypothesis, GateLayout, ActivationSpec, bool]]:
    """Make the activation visible.

    The down projection is the identity, one route a token has weight 1, biases are 0.
    """
    tensors = random_tensors(run, generator)
    roles = _roles(run)
    for i, role in enumerate(roles):
        if role == "bias":
            tensors[i] = torch.zeros_like(tensors[i])
        elif role == "down":
            rows, columns = tensors[i].shape[-2:]
            tensors[i] = torch.eye(rows, columns, dtype=torch.float64).expand(tensors[i].shape)
    noise = torch.randn(run.num_tokens, run.hidden, generator=generator, dtype=torch.float64)
    ids = distinct_ids(run.num_tokens, run.operands.num_experts, run.top_k, generator)
    weights = torch.zeros(run.num_tokens, run.top_k, dtype=torch.float64)
    weights[:, 0] = 1.0
    x = 4 * noise
    seen = run(x, ids, weights, tensors)
    projected = [_projections(run, h, x, ids[:, 0], tensors) for h in hypotheses]
    beyond = scale_beyond_limits(constants)
    far_seen = run(beyond * noise, ids, weights, tensors) if beyond else seen
    # projections are linear in x
    far = max(beyond, 4.0) / 4

    def search(
        constants: Sequence[float],
    ) -> list[tuple[_Hypothesis, GateLayout, ActivationSpec, bool]]:
        found = []
        for hypothesis, projections in zip(hypotheses, projected, strict=True):
            width = min(hypothesis.intermediate, run.hidden)
            for layout, gate, up, swapped in _layouts(hypothesis, projections):
                gate, up = gate[:, :width], None if up is None else up[:, :width]
                fitting = _match_activation(seen[:, :width], gate, up, constants)
                gate, up = far * gate, None if up is None else far * up
                for activation in fitting:
                    ours = activate(activation, gate, up)
                    if not relative_error(ours, far_seen[:, :width]) < TOLERANCE:
                        continue
                    found.append((hypothesis, layout, activation, swapped))
                    break
        return found

    found = search(())
    if not found:
        # limits, slopes and shifts multiply the candidates: first see that these are experts at all
        reason = explain_mismatch(run)
        if reason:
            raise NoSpecError(reason)
        found = search(constants)
    if not found:
        raise NoSpecError(
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
) -> Iterator[ActivationSpec]:
    """The candidates whose values are those that were seen."""
    limits = sorted({abs(c) for c in constants if 0 < abs(c) < 1e6})[:6]
    gates = _gate_sides(limits)
    ups = [gates[0]] if up is None else _up_sides(limits)
    # a few points rule out almost every pair of a gate's side and an up side, all pairs at once
    few = slice(0, 1), slice(0, 24)
    values = torch.stack([activate(side, gate[few], None) for side in gates])[:, None]
    if up is not None:
        ones = torch.ones_like(up[few])
        values = values * torch.stack([activate(side, ones, up[few]) for side in ups])
    errors = (values - seen[few]).abs().amax((-2, -1))  # [len(gates), len(ups)]
    for i, j in (errors <= TOLERANCE * seen[few].abs().max()).nonzero().tolist():
        candidate: ActivationSpec = dataclasses.replace(
            gates[i], up_min=ups[j].up_min, up_max=ups[j].up_max, up_shift=ups[j].up_shift
        )
        if relative_error(activate(candidate, gate, up), seen) < TOLERANCE:
            yield candidate


def _clamps(limits: Sequence[float]) -> list[tuple[float, float]]:
    infinity = float("inf")
    return [
        (-infinity, infinity),
        *(pair for c in limits for pair in ((-infinity, c), (-c, c), (-c, infinity))),
    ]


def _gate_sides(limits: Sequence[float]) -> list[ActivationSpec]:
    """Every function of the gate, with every slope and clamp."""
    sides = []
    for kind in ActivationKind:
        slopes = [1.0, *(c for c in limits if c != 1.0)] if kind is ActivationKind.SILU else [1.0]
        sides += [
            ActivationSpec(kind=kind, alpha=slope, gate_min=low, gate_max=high)
            for slope, (low, high) in itertools.product(slopes, _clamps(limits))
        ]
    return sides


def _up_sides(limits: Sequence[float]) -> list[ActivationSpec]:
    """Every clamp and shift of the up projection; the gate as it is."""
    return [
        ActivationSpec(kind=ActivationKind.IDENTITY, up_min=low, up_max=high, up_shift=shift)
        for (low, high), shift in itertools.product(_clamps(limits), [0.0, *limits])
    ]


def _find_position(
    run: ExpertRun,
    found: Sequence[tuple[_Hypothesis, GateLayout, ActivationSpec, bool]],
    generator: torch.Generator,
) -> tuple[ExpertSpec, bool]:
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
                return spec, swapped
            best = min(best, error)
    raise NoSpecError(
        "its activation is known, and still no place of the combine weight and no orientation "
        f"agrees (smallest relative error {best:.1e})"
    )


def identify_operands(
    make_run: Callable[[Operands], ExpertRun], operands: Operands, constants: Sequence[float]
) -> tuple[ExpertSpec, Operands, ExpertRun]:
    """`identify`, with the operands put into role order (gate first) where they are separate."""
    run = make_run(operands)
    spec, swapped = identify(run, constants)
    if not swapped:
        return spec, operands, run
    exchanged = operands.exchanged()
    again = make_run(exchanged)
    again.num_runs = run.num_runs
    return spec, exchanged, again


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
