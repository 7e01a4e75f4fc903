"""Operators of a graph in a spelling that runs on a CPU in every dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _grouped_mm(
    x: Tensor,
    weight: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: Any = None,
) -> Tensor:
    """Grouped GEMM: x [S, in] with row offsets, weight [E, in, out]; rows past the end are NaN."""
    if x.ndim != 2 or weight.ndim != 3 or offs is None or bias is not None:
        raise NotImplementedError("a grouped GEMM of this form has no reference")
    out = torch.full((x.shape[0], weight.shape[-1]), float("nan"), dtype=x.dtype)
    start = 0
    for expert, end in enumerate(offs.tolist()):
        if end > start:
            out[start:end] = x[start:end] @ weight[expert]
            start = end
    return out


def _histc(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`torch.histc` of integers, as models traced for other devices spell it."""
    return torch.histc(x.double(), *args, **kwargs).to(x.dtype)


# Operators that a CPU lacks in some dtype, or refuses at the strides and sizes of a small run.
NOT_ON_A_CPU = frozenset(("grouped_mm_fallback", "grouped_mm", "_grouped_mm", "histc"))

REPLACED: dict[str, Callable[..., Any]] = {
    "histc": _histc,
    "_grouped_mm": _grouped_mm,
    "grouped_mm": _grouped_mm,
    "grouped_mm_fallback": _grouped_mm,
}
