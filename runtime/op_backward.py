"""The gradient of `moeflex::moe_layer` in plain torch.

Only x, the router tensors and the expert tensors are kept by the forward pass; hidden activations
are computed again here, one expert at a time, and every sum is fp32 or wider. Nothing of size T * K
* E or E * I * T exists.

With z = x' @ W13^T, h = f(z), o = h @ W2^T + b2 and the combine weight w of a route, for its row g
of the gradient:

```
u = g @ W2                      [n, I]
dw = u . h (+ g . b2)           OUTPUT; u . h for HIDDEN; dx' . x for INPUT
dh = u * w                      OUTPUT, HIDDEN; u for INPUT
dW2 = (g * w)^T @ h             OUTPUT, HIDDEN; g^T @ h for INPUT
dz = f'(z) dh,  dW13 = dz^T @ x',  dx' = dz @ W13
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_compiler.ir import (
    ActivationKind,
    ActivationSpec,
    ExpertSpec,
    GateLayout,
    MoEPlan,
    Normalize,
    Orientation,
    RouterSpec,
    Score,
    WeightPosition,
)
from moe_compiler.reference import DTYPES, activate, expert_tensors, score_logits
from moe_compiler.runtime.op_forward import check_tensors, routing, sort_routes, wide_dtype


@dataclasses.dataclass(slots=True)
class _Row:
    """Gradients of one expert's rows: `x` [n, H] and `weight` [n]."""

    x: Tensor
    weight: Tensor


def backward(
    plan: MoEPlan,
    grad: Tensor,
    x: Tensor,
    router: Sequence[Tensor],
    experts: Sequence[Tensor],
    mask: Sequence[bool],
) -> list[Tensor]:
    """Gradients of the tensors that `mask` names, in the order x, router, experts.

    Args:
        plan: the plan of the forward call.
        grad: [T, H], any strides.
        x: input of the forward call.
        router: input of the forward call.
        experts: input of the forward call.
        mask: one flag for each of `[x, *router, *experts]`.

    Returns:
        One tensor for each true flag, with shape, dtype and layout of its input. Ids and the
        selection bias have no
        gradient: theirs are zeros.
    """
    check_tensors(plan, x, router, experts)
    spec = plan.experts
    wide = wide_dtype(x, experts)
    num_tokens = x.numel() // spec.hidden
    rows = x.reshape(num_tokens, spec.hidden)
    grad = grad.reshape(num_tokens, spec.hidden)
    ids, weights = routing(plan, router, num_tokens)
    num_slots = ids.shape[1]
    flat_weights = weights.reshape(-1).to(wide)
    want_x, want_router = mask[0], any(mask[1 : 1 + len(router)])
    expert_mask = mask[1 + len(router) :]
    expert_grads = [
        torch.zeros_like(t) if m else None for t, m in zip(experts, expert_mask, strict=True)
    ]
    x_grad = torch.zeros(num_tokens, spec.hidden, dtype=wide, device=x.device)
    weight_grad = torch.zeros(ids.numel(), dtype=wide, device=x.device)
    for expert, order in sort_routes(ids, spec.num_experts).by_expert():
        token = torch.div(order, num_slots, rounding_mode="floor")
        row = _expert_backward(
            spec,
            grad[token].to(wide),
            rows[token].to(wide),
            flat_weights[order].unsqueeze(-1),
            {role: t.to(wide) for role, t in expert_tensors(spec, experts, expert).items()},
            _slots(spec, expert_grads, expert),
            need_rows=want_x or (want_router and spec.weight_position is WeightPosition.INPUT),
        )
        weight_grad[order] = row.weight
        if want_x:
            x_grad.index_add_(0, token, row.x)
    grads = [torch.empty_like(x).copy_(x_grad.view(x.shape)) if want_x else None]
    grads += _router_grads(
        plan, router, ids, weight_grad.view(ids.shape), mask[1 : 1 + len(router)]
    )
    grads += expert_grads
    return [g for g in grads if g is not None]


def _slots(spec: ExpertSpec, grads: Sequence[Tensor | None], expert: int) -> dict[str, Tensor]:
    """Where the gradients of one expert's tensors go, by role; absent where none is wanted."""
    count = spec.num_experts
    slots = {}
    for i, role in enumerate(spec.tensor_roles):
        whole = grads[i] if spec.stacked else grads[i * count + expert]
        if whole is not None:
            slots[role] = whole[expert] if spec.stacked else whole
    return slots


def _expert_backward(
    spec: ExpertSpec,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    tensors: Mapping[str, Tensor],
    slots: Mapping[str, Tensor],
    *,
    need_rows: bool,
) -> _Row:
    """Gradients of one expert's rows; those of its tensors are written into `slots`.

    grad [n, H], x [n, H], weight [n, 1], all in the wide dtype.
    """
    on_input = spec.weight_position is WeightPosition.INPUT
    x_in = x * weight if on_input else x
    gate, up = _split_gate_up(spec, x_in, tensors)
    hidden = activate(spec.activation, gate, up)
    back = _times(grad, tensors["w2"], spec.w2_orientation)
    weight_grad = (back * hidden).sum(-1)
    if spec.has_b2 and spec.weight_position is WeightPosition.OUTPUT:
        weight_grad = weight_grad + grad @ tensors["b2"]
    scaled = grad if on_input else grad * weight
    _store(slots, "w2", scaled, hidden, spec.w2_orientation)
    if "b2" in slots:
        b2_grad = scaled if spec.weight_position is WeightPosition.OUTPUT else grad
        slots["b2"].copy_(b2_grad.sum(0))
    hidden_grad = back if on_input else back * weight
    pieces = _join_gate_up(spec, *activate_backward(spec.activation, gate, up, hidden_grad))
    x_grad = torch.zeros_like(x)
    for weight_role, bias_role, piece in pieces:
        _store(slots, weight_role, piece, x_in, spec.w13_orientation)
        if bias_role in slots:
            slots[bias_role].copy_(piece.sum(0))
        if need_rows:
            x_grad += _times(piece, tensors[weight_role], spec.w13_orientation)
    if on_input:
        weight_grad, x_grad = (x_grad * x).sum(-1), x_grad * weight
    return _Row(x_grad, weight_grad)


def _times(grad: Tensor, weight: Tensor, orientation: Orientation) -> Tensor:
    """Gradient of the input of y = x @ W^T (OUT_IN) or y = x @ W (IN_OUT)."""
    return grad @ (weight if orientation is Orientation.OUT_IN else weight.t())


def _store(
    slots: Mapping[str, Tensor], role: str, grad: Tensor, x: Tensor, orientation: Orientation
) -> None:
    """Write the gradient of a weight: grad^T @ x (OUT_IN) or x^T @ grad (IN_OUT)."""
    if role in slots:
        out_in = orientation is Orientation.OUT_IN
        slots[role].copy_(grad.t() @ x if out_in else x.t() @ grad)


def _project(x: Tensor, weight: Tensor, bias: Tensor | None, orientation: Orientation) -> Tensor:
    y = x @ (weight.t() if orientation is Orientation.OUT_IN else weight)
    return y if bias is None else y + bias


def _split_gate_up(
    spec: ExpertSpec, x: Tensor, tensors: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    layout, orientation = spec.gate_layout, spec.w13_orientation
    if layout in (GateLayout.NONE, GateLayout.SEPARATE):
        gate = _project(x, tensors["w1"], tensors.get("b1"), orientation)
        if layout is GateLayout.NONE:
            return gate, None
        return gate, _project(x, tensors["w3"], tensors.get("b3"), orientation)
    both = _project(x, tensors["w13"], tensors.get("b13"), orientation)
    if layout in (GateLayout.CONCAT, GateLayout.CONCAT_UP_FIRST):
        first, second = both.chunk(2, dim=-1)
    else:
        first, second = both[..., ::2], both[..., 1::2]
    swapped = layout in (GateLayout.CONCAT_UP_FIRST, GateLayout.INTERLEAVED_UP_FIRST)
    return (second, first) if swapped else (first, second)


def _join_gate_up(
    spec: ExpertSpec, gate: Tensor, up: Tensor | None
) -> list[tuple[str, str, Tensor]]:
    """Triples (weight role, bias role, gradient of that projection)."""
    layout = spec.gate_layout
    if up is None:
        return [("w1", "b1", gate)]
    if layout is GateLayout.SEPARATE:
        return [("w1", "b1", gate), ("w3", "b3", up)]
    swapped = layout in (GateLayout.CONCAT_UP_FIRST, GateLayout.INTERLEAVED_UP_FIRST)
    first, second = (up, gate) if swapped else (gate, up)
    if layout in (GateLayout.CONCAT, GateLayout.CONCAT_UP_FIRST):
        return [("w13", "b13", torch.cat((first, second), -1))]
    return [("w13", "b13", torch.stack((first, second), -1).flatten(-2))]


def activate_backward(
    spec: ActivationSpec, gate: Tensor, up: Tensor | None, grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of gate and up of `reference.activate`; at its bounds a clamp lets them pass."""
    clamped = gate.clamp(spec.gate_min, spec.gate_max)
    slope = _slope(spec, clamped) * ((gate >= spec.gate_min) & (gate <= spec.gate_max))
    if up is None:
        return grad * slope, None
    other = up.clamp(spec.up_min, spec.up_max) + spec.up_shift
    value = activate(spec, gate, None)
    inside = (up >= spec.up_min) & (up <= spec.up_max)
    return grad * other * slope, grad * value * inside


def _slope(spec: ActivationSpec, z: Tensor) -> Tensor:
    """f'(z)."""
    kind = spec.kind
    if kind is ActivationKind.SILU:
        sigmoid = torch.sigmoid(spec.alpha * z)
        return sigmoid * (1 + spec.alpha * z * (1 - sigmoid))
    if kind in (ActivationKind.GELU, ActivationKind.GELU_TANH):
        approximate = "none" if kind is ActivationKind.GELU else "tanh"
        slope: Tensor = torch.ops.aten.gelu_backward(torch.ones_like(z), z, approximate=approximate)
        return slope
    if kind is ActivationKind.RELU:
        return (z > 0).to(z.dtype)
    if kind is ActivationKind.RELU2:
        return 2 * F.relu(z)
    if kind is ActivationKind.SIGMOID:
        sigmoid = torch.sigmoid(z)
        return sigmoid * (1 - sigmoid)
    return torch.ones_like(z)


def _router_grads(
    plan: MoEPlan,
    router: Sequence[Tensor],
    ids: Tensor,
    weight_grad: Tensor,
    mask: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of the router tensors; weight_grad [T, K] in the wide dtype."""
    grads: list[Tensor | None] = [
        torch.zeros_like(t) if m else None for t, m in zip(router, mask, strict=True)
    ]
    source = 1 if plan.router.score is Score.EXTERNAL else 0
    target = grads[source]
    if target is not None:
        if plan.router.score is not Score.EXTERNAL:
            logits = router[0].reshape(len(ids), router[0].shape[-1])
            weight_grad = route_backward(plan.router, logits, ids, weight_grad)
        target.copy_(weight_grad.view(target.shape))
    return grads


def route_backward(spec: RouterSpec, logits: Tensor, ids: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the logits [T, E] of `reference.route`, from that of its weights [T, K].

    The selection itself has no gradient. Computed in the score dtype or wider.
    """
    wide = torch.promote_types(logits.dtype, DTYPES.get(spec.score_dtype, torch.float32))
    logits, grad = logits.to(wide), grad.to(wide)
    if spec.scale != 1.0:
        grad = grad * spec.scale
    if spec.score is Score.SPARSEMIXER:
        return _sparsemixer_backward(spec, logits, ids, grad)
    scores = score_logits(spec.score, logits)
    grad = _normalize_backward(spec, scores.gather(-1, ids), grad)
    score_grad = torch.zeros_like(logits).scatter_add_(-1, ids, grad)
    if spec.score is Score.SOFTMAX:
        return scores * (score_grad - (scores * score_grad).sum(-1, keepdim=True))
    if spec.score is Score.SIGMOID:
        return score_grad * scores * (1 - scores)
    if spec.score is Score.SQRTSOFTPLUS:
        return score_grad * torch.sigmoid(logits) / (2 * scores)
    return score_grad


def _normalize_backward(spec: RouterSpec, chosen: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the chosen scores [T, K] before they were normalised."""
    if spec.normalize is Normalize.SOFTMAX:
        weights = chosen.softmax(-1)
        return weights * (grad - (weights * grad).sum(-1, keepdim=True))
    sigmoids = spec.normalize in (Normalize.SIGMOID, Normalize.SIGMOID_SUM)
    weights = chosen.sigmoid() if sigmoids else chosen
    if spec.normalize in (Normalize.SUM, Normalize.SIGMOID_SUM):
        total = weights.sum(-1, keepdim=True)
        divisor = total.clamp(min=spec.eps) if spec.eps_clamps else total + spec.eps
        through = (grad * weights).sum(-1, keepdim=True) / divisor.square()
        if spec.eps_clamps:
            through = through * (total >= spec.eps)
        grad = grad / divisor - through
    return grad * weights * (1 - weights) if sigmoids else grad


def _sparsemixer_backward(spec: RouterSpec, logits: Tensor, ids: Tensor, grad: Tensor) -> Tensor:
    """Each slot is a softmax over what the threshold and the earlier slots left."""
    total = torch.zeros_like(logits)
    remaining = logits
    for slot in range(spec.top_k):
        chosen = ids[:, slot : slot + 1]
        best = remaining.gather(-1, chosen)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * spec.jitter_eps
        probabilities = remaining.masked_fill(far, float("-inf")).softmax(-1)
        weighted = probabilities.gather(-1, chosen) * grad[:, slot : slot + 1]
        total -= probabilities * weighted
        total.scatter_add_(-1, chosen, weighted)
        remaining = remaining.scatter(-1, chosen, float("-inf"))
    return total
