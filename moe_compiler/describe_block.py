"""A proven block in words: the same in the terminal, in the picture and on the page."""

from __future__ import annotations

from moe_compiler.ir import (
    GateLayout,
    MoERegion,
    Orientation,
    Proof,
    RouterSpec,
    Score,
    WeightPosition,
)

_GATES = {
    GateLayout.NONE: "not gated",
    GateLayout.CONCAT: "[gate | up]",
    GateLayout.CONCAT_UP_FIRST: "[up | gate]",
    GateLayout.INTERLEAVED: "gate, up interleaved",
    GateLayout.INTERLEAVED_UP_FIRST: "up, gate interleaved",
    GateLayout.SEPARATE: "gate and up separate",
}
_WEIGHT_POSITIONS = {
    WeightPosition.OUTPUT: "on the output",
    WeightPosition.HIDDEN: "before the down projection",
    WeightPosition.INPUT: "on the input",
}
_FORMS = {
    "grouped": "grouped GEMM",
    "gathered": "gathered weights",
    "loop": "loop over experts",
    "dense": "dense over all experts",
}


def experts_text(region: MoERegion) -> str:
    """`E128 K8 H4096 I1536 bf16 silu`."""
    spec = region.experts
    dtypes = region.weight_dtype
    if region.x_dtype != region.weight_dtype:
        dtypes += f" (x {region.x_dtype})"
    return f"E{spec.num_experts} K{region.top_k} H{spec.hidden} I{spec.intermediate} {dtypes} {spec.activation.name}"


def layout_text(region: MoERegion) -> str:
    """`[gate | up], out x in, stacked, biases`."""
    spec = region.experts
    orientations = {spec.w13_orientation, spec.w2_orientation}
    if len(orientations) == 1:
        orientation = _orientation(orientations.pop())
    else:
        orientation = (
            f"{_orientation(spec.w13_orientation)}, down {_orientation(spec.w2_orientation)}"
        )
    parts = [
        _GATES[spec.gate_layout],
        orientation,
        "stacked" if spec.stacked else "one tensor per expert",
    ]
    biases = [name for name, has in (("up", spec.has_b13), ("down", spec.has_b2)) if has]
    if biases:
        parts.append(f"{' and '.join(biases)} bias")
    return ", ".join(parts)


def _orientation(value: Orientation) -> str:
    return "out x in" if value is Orientation.OUT_IN else "in x out"


def form_text(region: MoERegion) -> str:
    """How the graph spells the experts, and where the combine weight enters if not on the output."""
    text = _FORMS.get(region.form, region.form)
    if region.experts.weight_position is not WeightPosition.OUTPUT:
        text += f", weight {weight_text(region)}"
    return text + (", weights [T, E]" if region.dense_weights else "")


def weight_text(region: MoERegion) -> str:
    """Where the combine weight enters."""
    return _WEIGHT_POSITIONS[region.experts.weight_position]


def shared_text(region: MoERegion) -> str:
    """`gated, I 5632`, or `none`."""
    if not region.shared_expert:
        return "none"
    size = f", I {region.shared_intermediate}" if region.shared_intermediate else ""
    return region.shared_expert + size


def proof_text(proof: Proof) -> str:
    """`error 2e-16, 24 runs`."""
    return f"error {proof.max_error:.0e}, {proof.num_runs} runs in {proof.precision}"


def router_steps(router: RouterSpec) -> tuple[str, ...]:
    """The router, one sentence per step."""
    if router.score is Score.EXTERNAL:
        return ("ids and weights come from the graph as they stand",)
    steps = [
        f"{router.score} of the logits"
        + (f" in {router.score_dtype}" if router.score_dtype else "")
    ]
    if router.has_bias:
        steps.append("a bias [E] is added for the selection only")
    if router.num_groups > 1:
        how = "the sum of its two best" if router.group_score == "top2_sum" else "its best expert"
        steps.append(
            f"the best {router.top_k_groups} of {router.num_groups} groups stay, each scored by {how}"
        )
    steps.append(f"the best {router.top_k} of {router.num_experts} experts")
    if router.normalize != "none":
        steps.append(f"selected scores normalised by {router.normalize.value.replace('_', ' ')}")
    if router.scale != 1.0:
        steps.append(f"times {router.scale:g}")
    return tuple(steps)
