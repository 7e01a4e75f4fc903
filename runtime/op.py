"""The op `moeflex::moe_layer`: schema, fake kernel, gradient, and who serves which device.

```
moeflex::moe_layer(Tensor x, Tensor[] router, Tensor[] experts, str plan) -> Tensor
moeflex::moe_layer_backward(Tensor grad, Tensor x, Tensor[] router, Tensor[] experts, str plan,
                            bool[] mask) -> Tensor[]
```

`plan` is `MoEPlan.key`. x [..., H]; the result is [T, H], T being the product of the leading axes
of x. The tensors of `router` and `experts` are those of `moe_compiler.reference.moe_layer`. `mask`
has one flag for each of `[x, *router, *experts]`, and the result one gradient for each true flag.

Importing this module defines the op, with the plain-torch kernels for CPU and CUDA. A compiled
library that brings its own kernel is loaded through `load_library`, which makes the plain-torch one
give way first: a dispatch key has one kernel at any time.

On CUDA, what the compiled library does not serve goes to `moeflex::moe_layer_plain`, of the same
schema: plain torch, with a warning.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_compiler.errors import UnsupportedError
from moe_compiler.ir import MoEPlan
from moe_compiler.runtime import op_backward, op_forward

log = logging.getLogger(__name__)

# Raised when a schema or the layout of a result changes: both are baked into cached graphs.
OP_VERSION = 1

_NAMESPACE = "moeflex"
_FORWARD = f"{_NAMESPACE}::moe_layer"
_BACKWARD = f"{_NAMESPACE}::moe_layer_backward"

_registry: Any = torch.library  # untyped upstream
_library = _registry.Library(_NAMESPACE, "FRAGMENT")
_lock = threading.Lock()
# The registration of the plain-torch kernel of each dispatch key, while it serves.
_plain_kernels: dict[str, Any] = {}

read_plan: Callable[[str], MoEPlan] = functools.lru_cache(maxsize=4096)(MoEPlan.from_key)


def _plain_forward(
    x: Tensor, router: Sequence[Tensor], experts: Sequence[Tensor], plan: str
) -> Tensor:
    return op_forward.forward(read_plan(plan), x, router, experts)


def _plain_cuda_forward(
    x: Tensor, router: Sequence[Tensor], experts: Sequence[Tensor], plan: str
) -> Tensor:
    _say_plain_torch(plan, str(x.device))
    return _plain_forward(x, router, experts, plan)


@functools.lru_cache(maxsize=256)
def _say_plain_torch(plan: str, device: str) -> None:
    """Once a plan: nothing faster was prepared for it."""
    log.warning(
        "moeflex::moe_layer on %s runs in plain torch, which is slow and synchronises with the host: "
        "no kernel was prepared for these dtypes, or this number of tokens, of the plan %s",
        device,
        plan,
    )


def _plain_backward(
    grad: Tensor,
    x: Tensor,
    router: Sequence[Tensor],
    experts: Sequence[Tensor],
    plan: str,
    mask: Sequence[bool],
) -> list[Tensor]:
    return op_backward.backward(read_plan(plan), grad, x, router, experts, mask)


def _fake_forward(
    x: Tensor, router: Sequence[Tensor], experts: Sequence[Tensor], plan: str
) -> Tensor:
    parsed = read_plan(plan)
    op_forward.check_tensors(parsed, x, router, experts)
    num_tokens = math.prod(x.shape[:-1])
    return x.new_empty(
        (num_tokens, parsed.experts.hidden), dtype=op_forward.output_dtype(parsed, x)
    )


def _fake_backward(
    grad: Tensor,
    x: Tensor,
    router: Sequence[Tensor],
    experts: Sequence[Tensor],
    plan: str,
    mask: Sequence[bool],
) -> list[Tensor]:
    inputs = [x, *router, *experts]
    return [torch.empty_like(t) for t, wanted in zip(inputs, mask, strict=True) if wanted]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, router, experts, plan = inputs
    ctx.num_router = len(router)
    ctx.plan = plan
    ctx.save_for_backward(x, *router, *experts)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, *rest = ctx.saved_tensors
    router, experts = rest[: ctx.num_router], rest[ctx.num_router :]
    need_x, need_router, need_experts, _ = ctx.needs_input_grad
    # Only floating-point tensors have a gradient: ids keep None, as in eager.
    need_router = [
        need and index == _differentiable_router_index(ctx.plan)
        for index, need in enumerate(need_router)
    ]
    mask = [need_x, *need_router, *need_experts]
    # An expanded gradient (of a sum, say) has stride 0, which matmuls refuse.
    grads = iter(
        torch.ops.moeflex.moe_layer_backward(grad.contiguous(), x, router, experts, ctx.plan, mask)
        if any(mask)
        else ()
    )
    found = [next(grads) if wanted else None for wanted in mask]
    return found[0], found[1 : 1 + ctx.num_router], found[1 + ctx.num_router :], None


def _differentiable_router_index(plan: str) -> int:
    """Index of the router tensor with a gradient: weights of [ids, weights], else logits."""
    return 1 if read_plan(plan).router.score == "external" else 0


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise UnsupportedError(
        "a second derivative of moeflex::moe_layer was asked for (create_graph=True, or a gradient "
        "penalty); this version has none. Compile that function with backend='inductor', or with "
        "options={'disable': ('replace',)}"
    )


def _define() -> None:
    # Strides of the inputs are kept as eager has them: an expert tensor may never be copied to
    # please a layout.
    tags = tuple(
        getattr(torch.Tag, name)
        for name in ("pt2_compliant_tag", "needs_exact_strides")
        if hasattr(torch.Tag, name)
    )
    _library.define(
        "moe_layer(Tensor x, Tensor[] router, Tensor[] experts, str plan) -> Tensor", tags=tags
    )
    _library.define(
        "moe_layer_backward(Tensor grad, Tensor x, Tensor[] router, Tensor[] experts, str plan, "
        "bool[] mask) -> Tensor[]",
        tags=tags,
    )
    _registry.register_fake(_FORWARD, _fake_forward, lib=_library)
    _registry.register_fake(_BACKWARD, _fake_backward, lib=_library)
    _registry.register_autograd(
        _FORWARD, _differentiate, setup_context=_save_for_backward, lib=_library
    )
    _registry.register_autograd(_BACKWARD, _no_second_derivative, lib=_library)
    for key in ("CPU", "CUDA"):
        _library.impl("moe_layer_backward", _plain_backward, key)
    _library.define(
        "moe_layer_plain(Tensor x, Tensor[] router, Tensor[] experts, str plan) -> Tensor",
        tags=tags,
    )
    _library.impl("moe_layer_plain", _plain_cuda_forward, "CUDA")


_PLAIN_FORWARD = {"CPU": _plain_forward, "CUDA": _plain_cuda_forward}


def _register_plain(key: str) -> None:
    library = _registry.Library(_NAMESPACE, "IMPL", key)
    library.impl("moe_layer", _PLAIN_FORWARD[key])
    _plain_kernels[key] = library


def use_plain(key: str) -> None:
    """Serve `moe_layer` under a dispatch key ("CPU", "CUDA") in plain torch; no effect when it already is."""
    with _lock:
        if key not in _plain_kernels:
            _register_plain(key)


def load_library(key: str, load: Callable[[], None]) -> None:
    """Let a compiled library serve `moe_layer` under a dispatch key.

    Args:
        key: "CPU" | "CUDA".
        load: registers the compiled kernel for the key. Called at most once in a process.

    Raises:
        Exception: what `load` raised; the plain-torch kernel serves again then.
    """
    with _lock:
        if key not in _plain_kernels:
            return
        _plain_kernels.pop(key)._destroy()
        try:
            load()
        except BaseException:
            _register_plain(key)
            raise
        log.info("moeflex::moe_layer on %s tensors is now served by the compiled target", key)


@contextlib.contextmanager
def plain_torch(key: str = "CPU") -> Iterator[None]:
    """Serve `moe_layer` under a dispatch key in plain torch inside of the block, whatever is loaded.

    For comparisons; in all threads.
    """
    library = None
    if key not in _plain_kernels:
        library = _registry.Library(_NAMESPACE, "IMPL", key)
        library.impl("moe_layer", _plain_forward)
    try:
        yield
    finally:
        if library is not None:
            library._destroy()


def served_in_plain_torch(device_type: str) -> bool:
    """Whether `moe_layer` on this kind of device runs the plain-torch kernel."""
    return device_type.upper() in _plain_kernels


_define()
for _key in _PLAIN_FORWARD:
    use_plain(_key)
