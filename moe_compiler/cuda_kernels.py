"""The Hopper target: where the text of `codegen` meets the builds of `runtime`."""

from __future__ import annotations

import logging

from moe_compiler.codegen import cuda_program
from moe_compiler.codegen.cuda import choose_config
from moe_compiler.layer import Device, Layer
from moe_compiler.runtime import cuda_build, cuda_launch, cuda_target

log = logging.getLogger(__name__)


class Hopper:
    """One launch a layer on GPUs of compute capability 9.0 (H100, H200, H20)."""

    NAME = "cuda sm_90a"

    def unsupported(self, layer: Layer, device: Device) -> str:
        """Why the kernels cannot compute `layer` on `device`, or ""; one sentence for the user."""
        # sm_90a code runs on 9.0 and nowhere else, newer devices included.
        if device.capability != (9, 0):
            return f"the sm_90a layer kernel runs on compute capability 9.0; this is {device.title}"
        return (
            cuda_program.unsupported(
                layer.plan,
                layer.x_dtype,
                layer.weight_dtypes,
                layer.combine_dtype,
                layer.index_dtype,
            )
            or _strides_refused(layer)
            or (_cannot_build() if device.here else "")
        )

    def prepare(self, layer: Layer, device: Device) -> None:
        """Start to build the kernels of `layer`.

        Raises:
            ToolchainError: there is no compiler.
        """
        cuda_target.prepare(
            cuda_program.make_program(
                layer.plan,
                layer.x_dtype,
                cuda_build.read_template(),
                combine_dtype=layer.combine_dtype,
                index_dtype=layer.index_dtype,
                num_tokens=layer.num_tokens,
            )
        )

    def finish(self) -> None:
        """Wait for the builds and let the built library serve the op.

        Raises:
            BuildError: a build failed; the message names its log.
        """
        from moe_compiler.runtime import op

        cuda_target.wait()
        op.load_library("CUDA", cuda_target.load_op_library)

    def workspace_bytes(self, layer: Layer, num_tokens: int) -> int:
        """Bytes that a launch with `num_tokens` tokens takes from torch's cache and gives back."""
        config = choose_config(layer.plan, num_tokens, layer.x_dtype)
        return cuda_launch.plan_workspace(config, layer.plan, num_tokens).num_bytes


def _strides_refused(layer: Layer) -> str:
    """Why the expert tensors cannot be read where they lie, or ""."""
    for strides in layer.expert_strides:
        *outer, last = strides
        if last != 1 or (len(strides) == 3 and any(stride % 8 for stride in outer)):
            return (
                "the sm_90a layer kernel reads expert tensors whose last axis is contiguous and whose "
                f"other strides are multiples of 16 bytes; got strides {strides}: make the tensor "
                "contiguous"
            )
    return ""


_warned = False


def _cannot_build() -> str:
    """Why nothing can be built here, or ""; said once as a warning."""
    global _warned
    reason = cuda_target.unavailable()
    if reason and not _warned:
        log.warning("MoE blocks on this GPU do not get the kernels of moeflex. %s", reason)
        _warned = True
    return reason
