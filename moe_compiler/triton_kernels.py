"""The Triton target, and the Triton router that every CUDA target may have before it."""

from __future__ import annotations

import torch

from moe_compiler.codegen import triton as codegen
from moe_compiler.ir import RouterSpec
from moe_compiler.layer import Device, Layer
from moe_compiler.runtime import triton_router

_COMBINE_DTYPES = ("bf16", "fp16", "fp32")
_INDEX_DTYPES = ("int64", "int32")


class Triton:
    """Four launches a layer on GPUs of compute capability 8.0 and newer."""

    NAME = "triton"

    def unsupported(self, layer: Layer, device: Device) -> str:
        """Why the kernels cannot compute `layer` on `device`, or ""; one sentence for the user."""
        if device.capability < codegen.OLDEST and (device.here or device.capability != (0, 0)):
            return f"the Triton layer needs compute capability 8.0 or newer; this is {device.title}"
        reason = codegen.unsupported(layer.plan, layer.x_dtype, layer.weight_dtypes)
        if not reason and layer.combine_dtype not in _COMBINE_DTYPES:
            reason = (
                f"the Triton layer takes combine weights in {', '.join(_COMBINE_DTYPES)}; got "
                f"{layer.combine_dtype}"
            )
        if not reason and layer.index_dtype not in _INDEX_DTYPES:
            reason = f"the Triton layer takes int64 or int32 ids; got {layer.index_dtype}"
        return reason or (triton_router.missing() if device.here else "")

    def prepare(self, layer: Layer, device: Device) -> None:
        """Define the op; Inductor builds its kernels with those of the rest of the graph."""
        del layer, device
        define_ops()

    def finish(self) -> None:
        """Nothing is left to build."""


def define_ops() -> None:
    """Define `moeflex::route` and `moeflex::triton_layer`."""
    from moe_compiler.runtime import triton_ops

    triton_ops.use_configs(codegen.choose_config)


def router_refused(
    spec: RouterSpec, logits: torch.dtype, bias: torch.dtype | None, device: Device
) -> str:
    """Why the router stays in the graph on `device`, or ""; one sentence for the user."""
    if device.type != "cuda":
        return f"the router kernel runs on GPUs; this is {device.title}"
    if device.capability < codegen.OLDEST and (device.here or device.capability != (0, 0)):
        return f"the router kernel needs compute capability 8.0 or newer; this is {device.title}"
    return triton_router.unsupported(spec, logits, bias, here=device.here)
