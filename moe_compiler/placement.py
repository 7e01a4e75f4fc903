"""Which target computes a proven region, and the builds that this needs.

The policy, by the device of the region's tensors:

* CPU with a C++ compiler: the compiled target, where it takes the plan; else Inductor, with the
  target's reason.
* CPU without one: the op in plain torch. Inductor has no compiler then either, so the whole graph
  runs as plain torch, and the sorted loop of the op is as fast as the other spellings there, and
  far faster than gathered weights.
* any other device: Inductor. This version has no target for it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from moe_compiler.errors import BuildError
from moe_compiler.ir import MoEPlan, MoERegion, RouterSpec, Score
from moe_compiler.options import Options

log = logging.getLogger(__name__)

CPU = "cpu"
PLAIN = "plain torch"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What computes a region.

    Attributes:
        target: "cpu" or "plain torch"; "" when the region stays with Inductor.
        plan: the plan of the op; None when there is no target.
        absorb_router: whether the router runs inside the op.
        reason: why there is no target, or "".
    """

    target: str
    plan: MoEPlan | None = None
    absorb_router: bool = False
    reason: str = ""

    @property
    def title(self) -> str:
        """Short text for reports."""
        return self.target or f"inductor: {self.reason}"


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
    )
    absorb = (
        options.absorb_router == "auto"
        and region.router.score is not Score.EXTERNAL
        and not set(region.escaping) - {"logits"}
    )
    if not absorb:
        return [external]
    return [dataclasses.replace(external, router=region.router), external]


def place(region: MoERegion, device_type: str, options: Options) -> Placement:
    """Choose the target of a region whose tensors are on `device_type`."""
    if device_type != "cpu":
        title = device_type.upper() if device_type else "mixed-device"
        return Placement(target="", reason=f"no {title} target in this version")
    plans = plans_for(region, options)
    if "build" in options.disable or cpu_compiler_missing():
        plan = plans[0]
        return Placement(target=PLAIN, plan=plan, absorb_router=_absorbs(plan))
    from moe_compiler.runtime import cpu_target

    reason = ""
    for plan in plans:
        reason = cpu_target.unsupported(plan, region.x_dtype, _weight_dtypes(region)) or ""
        if not reason:
            return Placement(target=CPU, plan=plan, absorb_router=_absorbs(plan))
    return Placement(target="", reason=reason)


def _absorbs(plan: MoEPlan) -> bool:
    return plan.router.score is not Score.EXTERNAL


def _weight_dtypes(region: MoERegion) -> tuple[str, ...]:
    return (region.weight_dtype,) * len(region.experts.tensor_roles)


def cpu_compiler_missing() -> str:
    """Why the CPU target cannot be built here, or ""; a reason is logged once as a warning."""
    try:
        from moe_compiler.runtime import cpu_target
    except ImportError as error:
        reason = f"this installation has no CPU target ({error})"
    else:
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
            "no usable C++ compiler: on the CPU, MoE blocks and what Inductor would generate run "
            "in plain torch, several times slower. Install one (Debian/Ubuntu: apt-get install "
            "g++), or set CXX to one. (%s)",
            reason,
        )
    _warned = True


class Builds:
    """The builds that a graph's placements need; they run in the background until `finish`."""

    def __init__(self, regions: Sequence[MoERegion], placements: Sequence[Placement]) -> None:
        self._needed = False
        for region, placement in zip(regions, placements, strict=True):
            if placement.target == CPU:
                from moe_compiler.runtime import cpu_target

                assert placement.plan is not None
                self._needed = True
                cpu_target.prepare(placement.plan, region.x_dtype, _weight_dtypes(region))

    def finish(self) -> None:
        """Wait for the builds and let the built library serve the op.

        Raises:
            BuildError: a build failed; the message names its log.
        """
        if not self._needed:
            return
        from moe_compiler.runtime import cpu_target, op

        try:
            cpu_target.wait()
            op.load_cpu_library(cpu_target.load_op_library)
        except BuildError:
            raise
        except (OSError, RuntimeError) as error:
            raise BuildError(f"the CPU target was built and cannot be loaded: {error}") from error


def device_type_of(nodes: Iterable[fx.Node]) -> str:
    """The device type of the tensors of these nodes; "" when there is more than one."""
    values = [node.meta.get("example_value", node.meta.get("val")) for node in nodes]
    kinds = {value.device.type for value in values if isinstance(value, torch.Tensor)}
    return kinds.pop() if len(kinds) == 1 else ""
