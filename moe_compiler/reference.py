"""The slow, obvious meaning of a plan, in plain torch and differentiable.

Everything fast is compared with this file; `passes` proves regions against it. It computes in the
dtype of its inputs, so a caller who wants a precise answer upcasts first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_compiler.errors import PlanError
from moe_compiler.ir import (
    ActivationKind,
    ActivationSpec,
    ExpertSpec,
    GateLayout,
    GroupScore,
    MoEPlan,
    Normalize,
    Orientation,
    RouterSpec,
    Score,
    WeightPosition,
)

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def route(spec: RouterSpec, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Select experts and combine weights.

    Args:
        spec: the router; not EXTERNAL.
        logits: [T, E].
        bias: [E], when `spec.has_bias`.

    Returns:
        ids [T, K] int64 and weights [T, K] in the score dtype. Ties are broken as `torch.topk`
        breaks them.

    Raises:
        PlanError: the spec is EXTERNAL, or the bias is missing.
    """
    if spec.score is Score.EXTERNAL:
        raise PlanError("an external router has no reference: ids and weights come from the graph")
    if spec.has_bias and bias is None:
        raise PlanError("this router needs its selection bias [E]; got none")
    if spec.score_dtype and logits.dtype is not torch.float64:
        logits = logits.to(DTYPES[spec.score_dtype])
    if spec.score is Score.SPARSEMIXER:
        return _sparsemixer(spec, logits)
    scores = score_logits(spec.score, logits)
    ids = selection_scores(spec, scores, bias).topk(spec.top_k, dim=-1).indices
    return ids, combine_weights(spec, scores, ids)


def score_logits(score: Score, logits: Tensor) -> Tensor:
    """Scores [T, E] of logits [T, E]; not for SPARSEMIXER."""
    if score is Score.SOFTMAX:
        return logits.softmax(-1)
    if score is Score.SIGMOID:
        return logits.sigmoid()
    if score is Score.SQRTSOFTPLUS:
        return F.softplus(logits).sqrt()
    return logits


def selection_scores(spec: RouterSpec, scores: Tensor, bias: Tensor | None = None) -> Tensor:
    """What the top-k looks at [T, E]: scores [T, E] plus the bias [E], after the group limit."""
    choice = scores if bias is None else scores + bias
    return _limit_groups(spec, choice) if spec.num_groups > 1 else choice


def combine_weights(spec: RouterSpec, scores: Tensor, ids: Tensor) -> Tensor:
    """Combine weights [T, K] of the experts ids [T, K], from the unbiased scores [T, E]."""
    weights = scores.gather(-1, ids)
    if spec.normalize is Normalize.SOFTMAX:
        weights = weights.softmax(-1)
    elif spec.normalize in (Normalize.SIGMOID, Normalize.SIGMOID_SUM):
        weights = weights.sigmoid()
    if spec.normalize in (Normalize.SUM, Normalize.SIGMOID_SUM):
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total.clamp(min=spec.eps) if spec.eps_clamps else total + spec.eps)
    return weights if spec.scale == 1.0 else weights * spec.scale


def group_scores(spec: RouterSpec, choice: Tensor) -> Tensor:
    """Score of every group [T, num_groups], from the selection scores [T, E]."""
    grouped = _in_groups(spec, choice)
    if spec.group_score is GroupScore.MAX:
        return grouped.amax(-1)
    return grouped.topk(2, dim=-1).values.sum(-1)


def _in_groups(spec: RouterSpec, choice: Tensor) -> Tensor:
    # The last axis is named, not inferred: with no tokens it could not be.
    num_tokens, num_experts = choice.shape
    return choice.reshape(num_tokens, spec.num_groups, num_experts // spec.num_groups)


def _limit_groups(spec: RouterSpec, choice: Tensor) -> Tensor:
    of_groups = group_scores(spec, choice)
    kept = of_groups.topk(spec.top_k_groups, dim=-1, sorted=False).indices
    keep = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, kept, True)
    grouped = _in_groups(spec, choice)
    return grouped.masked_fill(~keep.unsqueeze(-1), spec.group_fill).reshape(choice.shape)


def _sparsemixer(spec: RouterSpec, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Top-K by repeated masked softmax. Source: Phi-3.5-MoE's router at inference."""
    ids, weights = [], []
    remaining = logits
    for _ in range(spec.top_k):
        best, chosen = remaining.max(dim=-1, keepdim=True)
        factor = logits.abs().clamp(min=best)
        far = (best - logits) / factor > 2 * spec.jitter_eps
        probabilities = remaining.masked_fill(far, float("-inf")).softmax(-1)
        ids.append(chosen)
        weights.append(probabilities.gather(-1, chosen))
        remaining = remaining.scatter(-1, chosen, float("-inf"))
    return torch.cat(ids, -1), torch.cat(weights, -1)


def activate(spec: ActivationSpec, gate: Tensor, up: Tensor | None) -> Tensor:
    """f(clamp(gate)) * (clamp(up) + up_shift); f(clamp(gate)) without an up projection."""
    if spec.gate_min != float("-inf") or spec.gate_max != float("inf"):
        gate = gate.clamp(spec.gate_min, spec.gate_max)
    if up is not None and (spec.up_min != float("-inf") or spec.up_max != float("inf")):
        up = up.clamp(spec.up_min, spec.up_max)
    kind = spec.kind
    if kind is ActivationKind.SILU:
        value = F.silu(gate) if spec.alpha == 1.0 else gate * torch.sigmoid(spec.alpha * gate)
    elif kind is ActivationKind.GELU:
        value = F.gelu(gate)
    elif kind is ActivationKind.GELU_TANH:
        value = F.gelu(gate, approximate="tanh")
    elif kind is ActivationKind.RELU:
        value = F.relu(gate)
    elif kind is ActivationKind.RELU2:
        value = F.relu(gate).square()
    elif kind is ActivationKind.SIGMOID:
        value = gate.sigmoid()
    else:
        value = gate
    return value if up is None else value * (up + spec.up_shift if spec.up_shift else up)


def expert_tensors(spec: ExpertSpec, tensors: Sequence[Tensor], expert: int) -> dict[str, Tensor]:
    """The tensors of one expert by role, without the E axis."""
    if spec.stacked:
        return {
            role: tensor[expert] for role, tensor in zip(spec.tensor_roles, tensors, strict=True)
        }
    count = spec.num_experts
    return {role: tensors[i * count + expert] for i, role in enumerate(spec.tensor_roles)}


def run_expert(
    spec: ExpertSpec,
    x: Tensor,
    weight: Tensor,
    tensors: Mapping[str, Tensor],
    gemm_dtype: torch.dtype | None = None,
) -> Tensor:
    """One expert on its rows: x [n, H], weight [n, 1] -> [n, H], the combine weight applied.

    With `gemm_dtype`, operands and results of both GEMMs are rounded to it.
    """
    if spec.weight_position is WeightPosition.INPUT:
        x = x * weight
    gate, up = _project(spec, _rounded(x, gemm_dtype), tensors)
    gate, up = _rounded(gate, gemm_dtype), None if up is None else _rounded(up, gemm_dtype)
    hidden = activate(spec.activation, gate, up)
    if spec.weight_position is WeightPosition.HIDDEN:
        hidden = hidden * weight
    y = _linear(_rounded(hidden, gemm_dtype), tensors["w2"], spec.w2_orientation)
    if spec.has_b2:
        y = y + tensors["b2"]
    y = _rounded(y, gemm_dtype)
    return y * weight if spec.weight_position is WeightPosition.OUTPUT else y


def _rounded(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype).to(x.dtype)


def _linear(x: Tensor, weight: Tensor, orientation: Orientation) -> Tensor:
    return x @ (weight.t() if orientation is Orientation.OUT_IN else weight)


def _project(
    spec: ExpertSpec, x: Tensor, tensors: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    layout = spec.gate_layout
    if layout in (GateLayout.NONE, GateLayout.SEPARATE):
        gate = _linear(x, tensors["w1"], spec.w13_orientation)
        gate = gate + tensors["b1"] if spec.has_b13 else gate
        if layout is GateLayout.NONE:
            return gate, None
        up = _linear(x, tensors["w3"], spec.w13_orientation)
        return gate, up + tensors["b3"] if spec.has_b13 else up
    both = _linear(x, tensors["w13"], spec.w13_orientation)
    both = both + tensors["b13"] if spec.has_b13 else both
    if layout in (GateLayout.CONCAT, GateLayout.CONCAT_UP_FIRST):
        first, second = both.chunk(2, dim=-1)
    else:
        first, second = both[..., ::2], both[..., 1::2]
    swapped = layout in (GateLayout.CONCAT_UP_FIRST, GateLayout.INTERLEAVED_UP_FIRST)
    return (second, first) if swapped else (first, second)


def moe_layer(
    plan: MoEPlan, x: Tensor, router: Sequence[Tensor], experts: Sequence[Tensor]
) -> Tensor:
    """The whole block: what `moeflex::moe_layer` computes.

    Args:
        plan: the plan.
        x: [..., H].
        router: `[ids, weights]` when the router is EXTERNAL, otherwise `[logits]` or
            `[logits, bias]`; leading axes are flattened to T.
        experts: as `ExpertSpec.tensor_roles` says.

    Returns:
        [T, H] in `plan.out_dtype`. A route whose id is not in [0, E) contributes nothing.
        Sums over k are accumulated in fp32 or wider, in the order of k.
    """
    spec = plan.experts
    rows = x.reshape(-1, spec.hidden)
    # The last axis is named, not inferred: with no tokens it could not be.
    first = router[0].reshape(rows.shape[0], router[0].shape[-1])
    if plan.router.score is Score.EXTERNAL:
        ids, weights = first, router[1].reshape(rows.shape[0], router[1].shape[-1])
    else:
        ids, weights = route(plan.router, first, router[1] if plan.router.has_bias else None)
    ids = ids.long()
    compute = torch.promote_types(rows.dtype, experts[0].dtype)
    wide = torch.promote_types(compute, torch.float32)
    gemm_dtype = experts[0].dtype if plan.round_gemms else None
    compute = wide if plan.round_gemms else compute
    parts = torch.zeros(*ids.shape, spec.hidden, dtype=wide, device=rows.device)
    for expert in range(spec.num_experts):
        token, slot = torch.where(ids == expert)
        if token.numel() == 0:
            continue
        tensors = {role: t.to(compute) for role, t in expert_tensors(spec, experts, expert).items()}
        weight = weights[token, slot].unsqueeze(-1).to(wide)
        if spec.weight_position is not WeightPosition.OUTPUT:
            weight = weight.to(compute)
        y = run_expert(spec, rows[token].to(compute), weight, tensors, gemm_dtype)
        parts = parts.index_put((token, slot), y.to(wide))
    out_dtype = DTYPES[plan.out_dtype] if plan.out_dtype else x.dtype
    return parts.sum(1).to(out_dtype)
