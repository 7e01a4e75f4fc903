"""What a target is asked, and what it answers: the face between placement and the targets."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from moe_compiler.ir import MoEPlan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A kind of device, as far as the choice of a target depends on it.

    Attributes:
        type: "cpu", "cuda", or another of torch's device types.
        capability: compute capability of a CUDA device, e.g. (9, 0); (0, 0) elsewhere, and where
            the driver cannot be asked.
        here: it is in this machine; False where one is only asked about (`moeflex inspect`), so
            that compilers that are missing here do not count.
    """

    type: str
    capability: tuple[int, int] = (0, 0)
    here: bool = True

    @property
    def title(self) -> str:
        """Short text for reasons: `cpu`, `sm_90`."""
        if self.type != "cuda" or self.capability == (0, 0):
            return self.type
        return f"sm_{self.capability[0]}{self.capability[1]}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What a target is asked to compute.

    Attributes:
        plan: the plan.
        x_dtype: "bf16" | "fp16" | "fp32" | "fp64".
        weight_dtypes: one for each expert tensor.
        combine_dtype: of the combine weights (of the logits, where the plan holds a router).
        index_dtype: of the ids, e.g. "int64".
        num_tokens: T where the graph knows it, 0 where it is dynamic.
        expert_strides: of each expert tensor, in elements; empty where they are not known.
    """

    plan: MoEPlan
    x_dtype: str
    weight_dtypes: tuple[str, ...]
    combine_dtype: str = "fp32"
    index_dtype: str = "int64"
    num_tokens: int = 0
    expert_strides: tuple[tuple[int, ...], ...] = ()


class Target(Protocol):
    """What computes layers on some devices.

    A target whose launches need memory besides their tensors also has `workspace_bytes(layer,
    num_tokens) -> int`, for `moeflex inspect`.
    """

    @property
    def NAME(self) -> str:
        """Short name for reports."""

    def unsupported(self, layer: Layer, device: Device) -> str:
        """Why the target cannot compute `layer` on `device`, or ""; one sentence for the user."""

    def prepare(self, layer: Layer, device: Device) -> None:
        """Start the builds that `layer` needs; quick."""

    def finish(self) -> None:
        """Wait for the builds and let what was built serve the op.

        Raises:
            BuildError: a build failed; the message names its log.
        """
