"""Which target computes a proven region, and the builds that this needs.

The policy, by the device of the region's tensors:

* CPU with a C++ compiler: the compiled target, where it takes the plan; else Inductor, with the
  target's reason.
* CPU without one: the op in plain torch. Inductor has no compiler then either, so the whole graph
  runs as plain torch, and the sorted loop of the op is as fast as the other spellings there, and
  far faster than gathered weights.
* any other device: the first target of `targets.TARGETS` that takes the layer; else Inductor, with
  the reasons of all.

A region that casts its GEMMs down (explicitly, or by autocast) keeps those casts: the op gets the
cast tensors and rounds where the graph does. One that rounds further inside stays with Inductor.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from moe_compiler import triton_kernels
from moe_compiler.ir import MoEPlan, MoERegion, RouterSpec, Score
from moe_compiler.options import Options
from moe_compiler.reference import DTYPE_NAMES, DTYPES
from moe_compiler.runtime import cpu_target
from moe_compiler.targets import PLAIN, Device, Layer, Target, choose_target, device_of

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What computes a region.

    Attributes:
        target: `NAME` of the target, or "plain torch"; "" when the region stays with Inductor.
        layer: what the target computes; None when there is no target.
        device: where; None when there is no target.
        builder: the target itself; None where nothing is to be built.
        reason: why there is no target, or why not a better one; "" for the best.
        router: computed by `moeflex::route` before the layer; None where it stays in the graph or
            runs inside the op.
    """

    target: str
    layer: Layer | None = None
    device: Device | None = None
    builder: Target | None = None
    reason: str = ""
    router: RouterSpec | None = None

    @property
    def plan(self) -> MoEPlan | None:
        """The plan of the op; None when there is no target."""
        return None if self.layer is None else self.layer.plan

    def workspace_bytes(self, num_tokens: int) -> int:
        """Bytes that a launch with `num_tokens` tokens needs besides its tensors, as far as the target says."""
        count = getattr(self.builder, "workspace_bytes", None)
        return 0 if count is None else int(count(self.layer, num_tokens))

    @property
    def layer_op(self) -> str:
        """Name of the op that computes the layer."""
        return "triton_layer" if self.target == triton_kernels.Triton.NAME else "moe_layer"

    @property
    def absorb_router(self) -> bool:
        """Whether the router runs inside the op."""
        return self.plan is not None and self.plan.router.score is not Score.EXTERNAL

    @property
    def title(self) -> str:
        """Short text for reports."""
        if not self.target:
            return f"inductor: {self.reason}"
        return f"{self.target} ({self.reason})" if self.reason else self.target

    @property
    def full_title(self) -> str:
        """`title`, and what computes the router where that is a kernel of its own."""
        return self.title + (", router by a Triton kernel" if self.router is not None else "")


def plans_for(region: MoERegion, options: Options) -> list[MoEPlan]:
    """The plans that compute a region, best first: router inside the op, then outside.

    The router stays in the graph where its ids, weights or scores are used elsewhere: they exist
    then in any case, and what the layer uses is exactly what the model recorded.
    """
    external = MoEPlan(
        router=RouterSpec(
            score=Score.EXTERNAL,
            top_k=region.router.top_k,
            num_experts=region.experts.num_experts,
        ),
        experts=region.experts,
        out_dtype=region.out_dtype,
        batch_invariant=options.batch_invariant,
        round_gemms=bool(region.gemm_dtype),
    )
    absorb = (
        options.absorb_router == "auto"
        and region.router.score is not Score.EXTERNAL
        and not region.router_note
        and not set(region.escaping) - {"logits"}
    )
    if not absorb:
        return [external]
    return [dataclasses.replace(external, router=region.router), external]


def place(match: Any, options: Options, *, device: Device | None = None) -> Placement:
    """Choose the target of a match of `passes.match_moe`.

    Args:
        match: the match.
        options: of this compilation.
        device: the device to choose for, None for that of the match's tensors; `inspect` traces
            models on the meta device and asks for another.
    """
    if "build" in options.disable:
        return Placement(target="", reason="the stage 'build' is disabled")
    tensors = [_value(node) for node in (match.x, *match.experts)]
    device = device or device_of(tensor.device for tensor in tensors)
    if device is None:
        kinds = sorted({str(tensor.device) for tensor in tensors})
        return Placement(target="", reason=f"its tensors lie on {' and '.join(kinds)}")
    reason = _narrowing(match)
    if reason:
        return Placement(target="", reason=reason)
    plans = plans_for(match.region, options)
    if device.type == "cpu" and cpu_compiler_missing():
        return Placement(target=PLAIN, layer=_layer(match, plans[0], None), device=device)
    for plan in plans:
        router = _router_before(match, plan, options, device)
        layer = _layer(match, plan, router)
        choice = choose_target(device, layer, only=options.target)
        if choice.target is not None:
            return Placement(
                target=choice.target.NAME,
                layer=layer,
                device=device,
                builder=choice.target,
                reason=choice.reason,
                router=router,
            )
    return Placement(target="", reason=choice.reason)


def _router_before(
    match: Any, plan: MoEPlan, options: Options, device: Device
) -> RouterSpec | None:
    """The router of a match, where the router kernel computes it."""
    spec: RouterSpec = match.region.router
    held = plan.router.score is not Score.EXTERNAL
    if held or len(plans_for(match.region, options)) == 1:
        return None
    bias = None if match.router_bias is None else _value(match.router_bias).dtype
    reason = triton_kernels.router_refused(spec, _value(match.logits).dtype, bias, device)
    if reason:
        log.debug("%s: the router stays in the graph: %s", match.region.name, reason)
    return None if reason else spec


def _layer(match: Any, plan: MoEPlan, router: RouterSpec | None) -> Layer:
    """What the op is asked to compute for a match under a plan, behind `moeflex::route` or the graph."""
    x_dtype, *weight_dtypes = (
        _op_dtype(_value(node).dtype, match.region.gemm_dtype) for node in (match.x, *match.experts)
    )
    in_graph = router is None and plan.router.score is Score.EXTERNAL
    combine = _value(match.weights if in_graph else match.logits).dtype
    if router is not None:
        combine = DTYPES.get(router.score_dtype, combine)
    index = _value(match.ids).dtype if in_graph else torch.int64
    return Layer(
        plan=plan,
        x_dtype=x_dtype,
        weight_dtypes=tuple(weight_dtypes),
        combine_dtype=DTYPE_NAMES.get(combine, str(combine)),
        index_dtype=str(index).removeprefix("torch."),
        num_tokens=match.region.num_tokens,
        expert_strides=tuple(tuple(_value(node).stride()) for node in match.experts),
    )


def _narrowing(match: Any) -> str:
    """Why the op would round elsewhere than the block, or ""."""
    compute = functools.reduce(
        torch.promote_types, (_value(node).dtype for node in (match.x, *match.experts))
    )
    # Rounding of the GEMMs alone is in the plan.
    compute = DTYPES.get(match.region.gemm_dtype, compute)
    for node in match.body:
        value = _value(node)
        if node is match.output or not isinstance(value, torch.Tensor):
            continue
        if value.is_floating_point() and torch.finfo(value.dtype).eps > torch.finfo(compute).eps:
            return (
                f"the block rounds to {value.dtype} at '{node.name}' (a cast, or autocast) while "
                f"its inputs are {compute}; the op computes in one dtype"
            )
    return ""


def _op_dtype(dtype: torch.dtype, gemm_dtype: str) -> str:
    """Name of the dtype in which the op takes a tensor: cast down where the GEMMs are."""
    narrow = DTYPES.get(gemm_dtype, dtype)
    taken = narrow if narrow.itemsize < dtype.itemsize else dtype
    return DTYPE_NAMES.get(taken, str(taken))


def _value(node: fx.Node) -> Any:
    """The fake value of a node, under the name that its graph uses."""
    return node.meta.get("example_value", node.meta.get("val"))


def cpu_compiler_missing() -> str:
    """Why the CPU target cannot be built here, or ""; a reason is logged once as a warning."""
    reason = cpu_target.unavailable() or ""
    if reason:
        warn_no_compiler(reason)
    return reason


_warned = False


def warn_no_compiler(reason: str) -> None:
    """Say once in this process that compiled code is out of reach."""
    global _warned
    if not _warned:
        log.warning(
            "without a C++ compiler, MoE blocks on the CPU and what Inductor would generate run in "
            "plain torch, several times slower. %s",
            reason,
        )
    _warned = True


class Builds:
    """The builds that a graph's placements need; they run in the background until `finish`."""

    def __init__(self, placements: Iterable[Placement]) -> None:
        self._builders: dict[str, Target] = {}
        for placement in placements:
            if placement.builder is None or placement.layer is None or placement.device is None:
                continue
            self._builders[placement.target] = placement.builder
            if placement.router is not None:
                triton_kernels.define_ops()
            placement.builder.prepare(placement.layer, placement.device)

    def finish(self) -> None:
        """Wait for the builds and let the built libraries serve the op.

        Raises:
            BuildError: a build failed; the message names its log.
        """
        for builder in self._builders.values():
            builder.finish()
