"""The forward pass of `moeflex::moe_layer` in plain torch: routes sorted by expert.

It means what `moe_compiler.reference.moe_layer` means, and is tested against it. It serves the op
wherever no compiled target is loaded. One host synchronisation a call (the number of routes of
every expert).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_compiler.errors import PlanError
from moe_compiler.ir import ExpertSpec, MoEPlan, Score, WeightPosition
from moe_compiler.reference import DTYPES, expert_tensors, route, run_expert

# A low-precision matmul on a CPU without AVX-512 is several times slower than fp32; below this many
# rows the cost of widening an expert's weights is larger than the gain.
_MIN_ROWS_TO_WIDEN = 8

# Under `batch_invariant` every matmul has exactly this many rows, so that a row meets the same
# instructions whatever else is in the batch.
_INVARIANT_ROWS = 32


class Routes(NamedTuple):
    """Valid routes, sorted by expert; equal experts keep the order of (token, k).

    Attributes:
        order: [n] int64, index t * K + k of a route in the flattened [T, K].
        num_routes: routes of every expert, E entries.
    """

    order: Tensor
    num_routes: list[int]

    def by_expert(self) -> Iterator[tuple[int, Tensor]]:
        """Pairs (expert, its slice of `order`) of the experts that have routes."""
        start = 0
        for expert, count in enumerate(self.num_routes):
            if count:
                yield expert, self.order[start : start + count]
                start += count


def sort_routes(ids: Tensor, num_experts: int) -> Routes:
    """Sort the routes of ids [T, K] by expert; an id outside of [0, E) is dropped."""
    flat = ids.reshape(-1)
    key = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = torch.bincount(key, minlength=num_experts + 1)[:num_experts].tolist()
    return Routes(torch.argsort(key, stable=True), counts)


def routing(plan: MoEPlan, router: Sequence[Tensor], num_tokens: int) -> tuple[Tensor, Tensor]:
    """Ids [T, K] int64 and weights [T, K] of the op's router tensors."""
    if plan.router.score is Score.EXTERNAL:
        # The number of columns is taken from the tensor: T may be zero, where -1 says nothing.
        ids, weights = (t.reshape(num_tokens, t.shape[-1]) for t in router)
        return ids.long(), weights
    logits = router[0].reshape(num_tokens, router[0].shape[-1])
    return route(plan.router, logits, router[1] if plan.router.has_bias else None)


def wide_dtype(x: Tensor, experts: Sequence[Tensor]) -> torch.dtype:
    """The dtype of the sums: fp32, or fp64 where something is fp64."""
    return torch.promote_types(torch.promote_types(x.dtype, experts[0].dtype), torch.float32)


def check_tensors(
    plan: MoEPlan, x: Tensor, router: Sequence[Tensor], experts: Sequence[Tensor]
) -> None:
    """Check that the tensors fit the plan.

    Raises:
        PlanError: a count or a shape does not fit.
    """
    spec = plan.experts
    if x.dim() == 0 or x.shape[-1] != spec.hidden:
        raise PlanError(f"x must end in H = {spec.hidden}; got shape {tuple(x.shape)}")
    num_router = 2 if plan.router.score is Score.EXTERNAL or plan.router.has_bias else 1
    if len(router) != num_router:
        raise PlanError(
            f"router {plan.router.kind!r} takes {num_router} tensors; got {len(router)}"
        )
    if len(experts) != spec.num_tensors:
        raise PlanError(
            f"the plan takes {spec.num_tensors} expert tensors {spec.tensor_roles}; "
            f"got {len(experts)}"
        )
    repeat = 1 if spec.stacked else spec.num_experts
    for i, tensor in enumerate(experts):
        role = spec.tensor_roles[i // repeat]
        if tuple(tensor.shape) != spec.tensor_shape(role):
            raise PlanError(
                f"expert tensor {role!r} must have shape {spec.tensor_shape(role)}; "
                f"got {tuple(tensor.shape)}"
            )


def output_dtype(plan: MoEPlan, x: Tensor) -> torch.dtype:
    """The dtype of the result."""
    return DTYPES[plan.out_dtype] if plan.out_dtype else x.dtype


def forward(
    plan: MoEPlan, x: Tensor, router: Sequence[Tensor], experts: Sequence[Tensor]
) -> Tensor:
    """The whole layer: x [..., H] -> [T, H] in the plan's out dtype.

    See `moe_compiler.reference.moe_layer` for the tensors. Low-precision experts with many rows are
    computed in fp32 on a CPU, so a result may be nearer to the exact one than that of the
    reference.

    Raises:
        PlanError: the tensors do not fit the plan.
    """
    check_tensors(plan, x, router, experts)
    spec = plan.experts
    num_tokens = x.numel() // spec.hidden
    rows = x.reshape(num_tokens, spec.hidden)
    ids, weights = routing(plan, router, num_tokens)
    wide = wide_dtype(x, experts)
    num_routes_per_token = ids.shape[1]
    flat_weights = weights.reshape(-1)
    parts = torch.zeros(ids.numel(), spec.hidden, dtype=wide, device=x.device)
    for expert, order in sort_routes(ids, spec.num_experts).by_expert():
        tensors = expert_tensors(spec, experts, expert)
        x_rows = rows[torch.div(order, num_routes_per_token, rounding_mode="floor")]
        weight = flat_weights[order].unsqueeze(-1)
        parts[order] = _run_rows(plan, spec, x_rows, weight, tensors, wide)
    # Sum in the order of k, whatever the reduction of the backend would choose.
    by_slot = parts.view(num_tokens, num_routes_per_token, spec.hidden)
    total = by_slot.new_zeros(num_tokens, spec.hidden)
    for slot in range(num_routes_per_token):
        total += by_slot[:, slot]
    return total.to(output_dtype(plan, x))


def _run_rows(
    plan: MoEPlan,
    spec: ExpertSpec,
    x: Tensor,
    weight: Tensor,
    tensors: dict[str, Tensor],
    wide: torch.dtype,
) -> Tensor:
    """One expert on its rows x [n, H], weight [n, 1] -> [n, H] in the wide dtype."""
    compute = torch.promote_types(x.dtype, next(iter(tensors.values())).dtype)
    gemm_dtype = next(iter(tensors.values())).dtype if plan.round_gemms else None
    if plan.round_gemms:
        compute = wide
    narrow = compute in (torch.bfloat16, torch.float16)
    if narrow and x.device.type == "cpu" and (plan.batch_invariant or len(x) >= _MIN_ROWS_TO_WIDEN):
        compute = wide
    tensors = {role: tensor.to(compute) for role, tensor in tensors.items()}
    x = x.to(compute)
    weight = weight.to(wide if spec.weight_position is WeightPosition.OUTPUT else compute)
    if not plan.batch_invariant:
        return run_expert(spec, x, weight, tensors, gemm_dtype).to(wide)
    tiles = []
    for start in range(0, len(x), _INVARIANT_ROWS):
        tile, tile_weight = (
            x[start : start + _INVARIANT_ROWS],
            weight[start : start + _INVARIANT_ROWS],
        )
        missing = _INVARIANT_ROWS - len(tile)
        padded = torch.nn.functional.pad(tile, (0, 0, 0, missing))
        padded_weight = torch.nn.functional.pad(tile_weight, (0, 0, 0, missing))
        out = run_expert(spec, padded, padded_weight, tensors, gemm_dtype)
        tiles.append(out.to(wide)[: len(tile)])
    return torch.cat(tiles)
