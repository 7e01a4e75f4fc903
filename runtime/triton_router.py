"""The router of a layer in one launch: logits -> ids and combine weights, with Triton.

```
missing()                          # why Triton cannot be used here, or ""
unsupported(spec, logits dtype, bias dtype)
route(spec, logits, bias)          # ids [T, K], weights [T, K]; in a traced graph, a kernel that Inductor sees
```

It means what `moe_compiler.reference.route` means on a CUDA device. The rule of ties:

* which experts: the K largest selection scores; among equal ones the lowest index, NaN above
  +inf, 0.0 above -0.0. torch.topk on CUDA selects the same set (observed; its documentation leaves
  it open). torch.topk on a CPU leaves the choice to a partial sort, and may select others.
* order of the slots: descending score, then ascending index. torch.topk on CUDA leaves the order of
  equal scores to a sort that is not stable. The order decides which rounding the sum over k gets,
  nothing else.

`torch.max`, which the sparsemixer uses, takes the lowest index on both.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from moe_compiler.errors import UnsupportedError
from moe_compiler.ir import GroupScore, RouterSpec, Score
from moe_compiler.reference import DTYPES
from moe_compiler.runtime.triton_launch import launchable

MAX_EXPERTS = 512
MAX_TOP_K = 32
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def missing() -> str:
    """Why Triton cannot be used in this process, or ""."""
    if importlib.util.find_spec("triton") is None:
        return (
            "Triton is not installed; PyTorch's CUDA wheels bring it, `pip install triton` adds it"
        )
    return ""


def unsupported(
    spec: RouterSpec, logits: torch.dtype, bias: torch.dtype | None, *, here: bool = True
) -> str:
    """Why the kernel cannot compute this router, or ""; one sentence for the user.

    `here`: it shall run on this machine, so that a Triton that is missing counts.
    """
    if here and missing():
        return missing()
    if spec.score is Score.EXTERNAL:
        return "an external router has nothing to compute: ids and weights come from the graph"
    if not 1 <= spec.top_k <= min(spec.num_experts, MAX_TOP_K) or spec.num_experts > MAX_EXPERTS:
        return (
            f"the router kernel takes up to {MAX_EXPERTS} experts and K up to {MAX_TOP_K}; this "
            f"router has {spec.num_experts} and {spec.top_k}"
        )
    for name, dtype in (("logits", logits), ("bias", bias)):
        if dtype is not None and dtype not in _FLOATS:
            return f"the router kernel takes bf16, fp16 and fp32; the {name} are {dtype}"
    return ""


def score_dtype(spec: RouterSpec, logits: torch.dtype) -> torch.dtype:
    """The dtype of scores and weights."""
    return DTYPES[spec.score_dtype] if spec.score_dtype else logits


def route(
    spec: RouterSpec,
    logits: Tensor,
    bias: Tensor | None = None,
    *,
    counts: Tensor | None = None,
    index_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]:
    """Select experts and combine weights.

    Args:
        spec: the router.
        logits: [T, E] bf16, fp16 or fp32, any strides.
        bias: [E], when `spec.has_bias`.
        counts: [E] int32, zeroed by the caller: the number of routes of every expert is added.
        index_dtype: dtype of the ids.

    Returns:
        ids [T, K] and weights [T, K] in the score dtype.

    Raises:
        UnsupportedError: `unsupported` has a reason, or the bias is missing.
    """
    reason = unsupported(spec, logits.dtype, bias.dtype if bias is not None else None)
    if reason or (spec.has_bias and bias is None):
        raise UnsupportedError(reason or "this router needs its selection bias [E]; got none")
    from moe_compiler.runtime.triton_router_kernel import moeflex_route

    num_tokens, dtype = logits.shape[0], score_dtype(spec, logits.dtype)
    ids = torch.empty((num_tokens, spec.top_k), dtype=index_dtype, device=logits.device)
    weights = torch.empty((num_tokens, spec.top_k), dtype=dtype, device=logits.device)
    if isinstance(num_tokens, int) and num_tokens == 0:
        return ids, weights
    constants = _constants(spec)
    wide = bias is not None and torch.promote_types(dtype, bias.dtype) is torch.float32
    launchable(moeflex_route)[(at_least_one(num_tokens),)](
        logits,
        # A pointer that is not read where there is no bias, or no counts.
        bias.contiguous() if bias is not None else logits,
        ids,
        weights,
        counts if counts is not None else ids,
        num_tokens,
        logits.stride(0),
        logits.stride(1),
        WIDE_CHOICE=wide,
        HAS_COUNTS=counts is not None,
        **constants,
        num_warps=1,
    )
    return ids, weights


def at_least_one(size: Any) -> Any:
    """Size of a grid axis: the number itself, or max(number, 1) while it is symbolic."""
    sym_max: Any = torch.sym_max  # untyped upstream
    return size if isinstance(size, int) else sym_max(size, 1)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


@functools.lru_cache(maxsize=256)
def _constants(spec: RouterSpec) -> dict[str, Any]:
    """Constants of the kernel that the router alone decides."""
    return {
        "SCORE": spec.score.value,
        "HAS_BIAS": spec.has_bias,
        "NUM_GROUPS": spec.num_groups,
        "KEPT_GROUPS": spec.top_k_groups,
        "GROUP_TOP2": spec.group_score is GroupScore.TOP2_SUM,
        "ZERO_FILL": spec.group_fill == 0.0,
        "NORMALIZE": spec.normalize.value,
        "EPS": spec.eps,
        "EPS_CLAMPS": spec.eps_clamps,
        "SCALE": spec.scale,
        "TWICE_JITTER": 2 * spec.jitter_eps,
        "E": spec.num_experts,
        "K": spec.top_k,
        "GROUPS": _power_of_two(spec.num_groups),
        "SIZE": _power_of_two(spec.num_experts // spec.num_groups),
        "SLOTS": _power_of_two(spec.top_k),
    }
