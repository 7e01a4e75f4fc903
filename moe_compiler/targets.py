"""Which target computes a layer on a device: the one table of the targets, and the rule.

A target is an object with the four members of `layer.Target`. `choose_target` asks those of the
device's kind in order and takes the first that has nothing against the layer; `moeflex inspect`
shows the reasons of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from moe_compiler import cpu_kernels
from moe_compiler.cuda_kernels import Hopper
from moe_compiler.layer import Device, Layer, Target
from moe_compiler.triton_kernels import Triton

__all__ = [
    "CPU",
    "PLAIN",
    "TARGETS",
    "Choice",
    "Device",
    "Layer",
    "Target",
    "choose_target",
    "device_of",
]

CPU = "cpu"
PLAIN = "plain torch"


class _Cpu:
    """The compiled CPU kernel."""

    NAME = CPU

    def unsupported(self, layer: Layer, device: Device) -> str:
        del device
        return cpu_kernels.unsupported(layer.plan, layer.x_dtype, layer.weight_dtypes) or ""

    def prepare(self, layer: Layer, device: Device) -> None:
        cpu_kernels.prepare(layer.plan, layer.x_dtype, layer.weight_dtypes)

    def finish(self) -> None:
        cpu_kernels.finish()


# The targets of each kind of device, best first.
TARGETS: dict[str, tuple[Target, ...]] = {
    "cpu": (_Cpu(),),
    "cuda": (Hopper(), Triton()),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The target of a layer.

    Attributes:
        target: it; None when the layer stays with Inductor.
        reason: why no target, or why not one that would have been better; "" for the best.
    """

    target: Target | None
    reason: str = ""


def choose_target(device: Device, layer: Layer, *, only: str = "auto") -> Choice:
    """The first target of the device's kind that takes the layer; with `only`, that one or none."""
    targets = [t for t in TARGETS.get(device.type, ()) if only in ("auto", t.NAME)]
    if not targets and only != "auto":
        reason = (
            f"options={{'target': {only!r}}} was asked for, which does not run on {device.title}"
        )
        return Choice(target=None, reason=reason)
    if not targets:
        return Choice(target=None, reason=f"no {device.type.upper()} target in this version")
    reasons: list[str] = []
    for target in targets:
        reason = target.unsupported(layer, device)
        if not reason:
            return Choice(target=target, reason="; ".join(reasons))
        reasons.append(reason)
    return Choice(target=None, reason="; ".join(dict.fromkeys(reasons)))


def device_of(devices: Iterable[torch.device]) -> Device | None:
    """The one kind of device of these; None when they differ.

    Two GPUs of different capability count as two kinds: a layer's tensors lie on one.
    """
    found = {(device.type, device.index) for device in devices}
    if len({kind for kind, _ in found}) != 1 or len(found) != 1:
        return None
    kind, index = found.pop()
    if kind != "cuda" or not torch.cuda.is_available():
        return Device(type=kind)
    return Device(type=kind, capability=torch.cuda.get_device_capability(index))
