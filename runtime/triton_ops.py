"""Two ops whose kernels are Triton's: the router alone, and a layer without its router.

```
moeflex::route(Tensor logits, Tensor? bias, str router) -> (Tensor ids, Tensor weights)
moeflex::triton_layer(Tensor x, Tensor ids, Tensor weights, Tensor[] experts, str plan) -> Tensor
```

`router` is `RouterSpec.key`, `plan` is `MoEPlan.key` of a plan with an external router; leading
axes are flattened to T.
Both are `torch.library.triton_op`s: AOT autograd replaces them by their launches, so that Inductor's
wrapper, CUDA graphs and AOTInductor see plain Triton kernels, and no Python runs on the hot path.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op

from moe_compiler.ir import MoEPlan, RouterSpec
from moe_compiler.reference import DTYPE_NAMES
from moe_compiler.runtime import op, triton_layer, triton_router
from moe_compiler.runtime.op_backward import route_backward

read_router: Callable[[str], RouterSpec] = functools.lru_cache(maxsize=4096)(RouterSpec.from_key)

ConfigChoice = Callable[[MoEPlan, int, str, tuple[int, int]], triton_layer.Config]

_choose_config: ConfigChoice | None = None
# What a dynamic number of tokens is taken for where no example says more.
_TYPICAL_TOKENS = 64


def use_configs(choose: ConfigChoice) -> None:
    """Say how tile sizes are chosen: `codegen.triton.choose_config`; before the first layer."""
    global _choose_config
    _choose_config = choose


@triton_op("moeflex::route", mutates_args={})
def route(logits: Tensor, bias: Tensor | None, router: str) -> tuple[Tensor, Tensor]:
    """Ids [T, K] int64 and weights [T, K] of logits [..., E]; see `triton_router.route`."""
    rows = _rows(logits)
    return triton_router.route(read_router(router), rows, None if bias is None else bias.flatten())


@triton_op("moeflex::triton_layer", mutates_args={})
def layer(x: Tensor, ids: Tensor, weights: Tensor, experts: Sequence[Tensor], plan: str) -> Tensor:
    """The experts of a layer, x [..., H] -> [T, H]; see `triton_layer.layer`."""
    assert _choose_config is not None, "use_configs was not called"
    parsed = op.read_plan(plan)
    rows = _rows(x)
    config = _choose_config(parsed, _typical(rows.shape[0]), DTYPE_NAMES[x.dtype], _capability(x))
    return triton_layer.layer(parsed, config, rows, _rows(ids), _rows(weights), experts)


def _rows(x: Tensor) -> Tensor:
    """[..., N] as [T, N]; the sizes are named, for with no tokens -1 says nothing."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _typical(num_tokens: Any) -> int:
    """The number of tokens, or that of the example which a symbol was made for."""
    if isinstance(num_tokens, int):
        return num_tokens
    hint = getattr(getattr(num_tokens, "node", None), "hint", None)
    return hint if isinstance(hint, int) else _TYPICAL_TOKENS


def _capability(x: Tensor) -> tuple[int, int]:
    # Elsewhere Triton's interpreter runs, to which every tile size is the same.
    return torch.cuda.get_device_capability(x.device) if x.device.type == "cuda" else (0, 0)


def _save_route(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, ctx.router = inputs
    ctx.mark_non_differentiable(output[0])
    ctx.save_for_backward(logits, output[0])


def _differentiate_route(ctx: Any, _: Any, grad: Tensor) -> tuple[Any, ...]:
    logits, ids = ctx.saved_tensors
    found = route_backward(read_router(ctx.router), _rows(logits), ids, grad)
    return found.to(logits.dtype).view_as(logits), None, None


def _save_layer(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x, ids, weights, experts, ctx.plan = inputs
    ctx.save_for_backward(x, ids, weights, *experts)


def _differentiate_layer(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, ids, weights, *experts = ctx.saved_tensors
    need_x, _, need_weights, need_experts, _ = ctx.needs_input_grad
    mask = [need_x, False, need_weights, *need_experts]
    # An expanded gradient (of a sum, say) has stride 0, which matmuls refuse.
    grads = iter(
        torch.ops.moeflex.moe_layer_backward(
            grad.contiguous(), x, [ids, weights], experts, ctx.plan, mask
        )
        if any(mask)
        else ()
    )
    found = [next(grads) if wanted else None for wanted in mask]
    return found[0], None, found[2], found[3:], None


route.register_autograd(_differentiate_route, setup_context=_save_route)
layer.register_autograd(_differentiate_layer, setup_context=_save_layer)
