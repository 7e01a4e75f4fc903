"""The assertions of the test suite on results; the tolerances themselves stand in `moe_compiler/deviation.py`.

A promise of identity is tested with `torch.equal`. Everything else is compared with what the same
dtype does in eager mode, never with a number of its own: see `assert_close_to_fp32`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_compiler.deviation import EPS, relative_error


def assert_same_kind(ours: Tensor, eager: Tensor) -> None:
    """Same shape, dtype, device and the same non-finite places."""
    assert ours.shape == eager.shape, f"shape {tuple(ours.shape)}, eager has {tuple(eager.shape)}"
    assert ours.dtype == eager.dtype, f"dtype {ours.dtype}, eager has {eager.dtype}"
    assert ours.device == eager.device, f"device {ours.device}, eager has {eager.device}"
    assert torch.equal(ours.isfinite(), eager.isfinite()), "inf or nan in other places than eager"


def assert_close_to_fp32(ours: Tensor, same_dtype_eager: Tensor, fp32_reference: Tensor) -> None:
    """Our error may be twice the error that eager makes in the same dtype, and no more.

    Args:
        ours: the result under test.
        same_dtype_eager: the plain model's result in the dtype of `ours`.
        fp32_reference: the plain model's result in fp32 or wider, on the same (rounded) inputs.
    """
    assert_same_kind(ours, same_dtype_eager)
    error = relative_error(ours, fp32_reference)
    allowed = 2 * relative_error(same_dtype_eager, fp32_reference) + EPS[ours.dtype]
    assert error <= allowed, (
        f"relative error {error:.3g}, allowed {allowed:.3g} (twice eager's own)"
    )


def assert_most_rows_close_to_fp32(
    ours: Tensor, same_dtype_eager: Tensor, fp32_reference: Tensor, share: float = 0.75
) -> None:
    """`assert_close_to_fp32` for the best `share` of the rows (all axes but the last).

    For whole models in a half type: rounding sends a few tokens to other experts than fp32 does, in
    eager as in ours, and not the same ones.
    """
    assert_same_kind(ours, same_dtype_eager)
    scale = fp32_reference.abs().max().double()

    def error(value: Tensor) -> float:
        rows = (value.double() - fp32_reference.double()).abs().amax(-1).flatten()
        return (rows.quantile(share) / scale).item()

    allowed = 2 * error(same_dtype_eager) + EPS[ours.dtype]
    found = error(ours)
    assert found <= allowed, f"relative error {found:.3g} of most rows, allowed {allowed:.3g}"


def assert_close_to_eager(ours: Tensor, eager: Tensor) -> None:
    """For results whose eager form is already fp32 or wider, or where no wider form exists."""
    assert_close_to_fp32(ours, eager, eager)
