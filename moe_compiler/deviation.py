"""How far a result may be from what eager gives: the rule of the tests and of `moeflex verify`.

A promise of identity is checked bit for bit. Everything else is compared with what the same dtype does in eager mode:
our error against fp32 may be twice eager's own, and a little more.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

EPS = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}
"""What is allowed beyond twice eager's own error, relative to the largest value of the reference: one unit in the last
place of the half types; sums of some thousand terms in another order for the wide ones."""


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Largest absolute difference over the largest absolute value of the reference, in fp64.

    0.0 for empty tensors. Places where the reference is not finite do not count.
    """
    if reference.numel() == 0:
        return 0.0
    return (_differences(value, reference).max() / _scale(reference)).item()


def _differences(value: Tensor, reference: Tensor) -> Tensor:
    value, reference = value.detach().double(), reference.detach().double()
    zero = torch.zeros((), dtype=torch.float64)
    return torch.where(reference.isfinite(), value - reference, zero).abs()


def _scale(reference: Tensor) -> Tensor:
    reference = reference.detach().double()
    zero = torch.zeros((), dtype=torch.float64)
    scale = torch.where(reference.isfinite(), reference, zero).abs().max()
    return scale.clamp_min(torch.finfo(torch.float32).tiny)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """How far one tensor is from the reference.

    Attributes:
        error: largest difference over the largest value of the reference; infinite where the kinds differ.
        allowed: what the rule allows.
        index: where the largest difference is.
        value: what is there.
        reference: what should be there.
        note: what else is wrong ("inf or nan in other places than eager"), "" for nothing.
    """

    error: float
    allowed: float
    index: tuple[int, ...] = ()
    value: float = 0.0
    reference: float = 0.0
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the rule holds."""
        return not self.note and self.error <= self.allowed

    @property
    def share(self) -> float:
        """The error as a share of what is allowed; infinite where the kinds differ."""
        return float("inf") if self.note else self.error / self.allowed


def compare(ours: Tensor, eager: Tensor, exact: Tensor, *, share: float = 1.0) -> Deviation:
    """Compare a result with eager's by the rule.

    Args:
        ours: the result.
        eager: the plain model's result in the same dtype.
        exact: the plain model's result in fp32 or wider.
        share: of the rows (all axes but the last) that the rule is for, the best ones. Below 1 for whole models in a
            half type: rounding sends a few tokens to other experts than fp32 does, in eager as in ours, and not the
            same ones.
    """
    note = _difference_in_kind(ours, eager)
    if note:
        return Deviation(error=float("inf"), allowed=0.0, note=note)
    if ours.numel() == 0:
        return Deviation(error=0.0, allowed=EPS.get(ours.dtype, 0.0))
    if not ours.dtype.is_floating_point:
        differs = (ours != eager).double()
        return _worst(differs, ours, eager, float(differs.mean()), 0.0)
    found = _differences(ours, exact)
    scale = _scale(exact)
    allowed = 2 * _of_rows(_differences(eager, exact), share) / scale + EPS[ours.dtype]
    return _worst(found, ours, exact, (_of_rows(found, share) / scale).item(), float(allowed))


def _difference_in_kind(ours: Tensor, eager: Tensor) -> str:
    if ours.shape != eager.shape or ours.dtype != eager.dtype:
        return (
            f"{list(ours.shape)} {ours.dtype} instead of {list(eager.shape)} {eager.dtype}".replace(
                "torch.", ""
            )
        )
    if ours.dtype.is_floating_point and not torch.equal(ours.isfinite(), eager.isfinite()):
        return "inf or nan in other places than eager"
    return ""


def _of_rows(differences: Tensor, share: float) -> Tensor:
    if share >= 1.0 or differences.ndim == 0:
        return differences.max()
    return differences.amax(-1).flatten().quantile(share)


def _worst(
    differences: Tensor, ours: Tensor, exact: Tensor, error: float, allowed: float
) -> Deviation:
    place = int(differences.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), differences.shape))
    return Deviation(
        error=error,
        allowed=allowed,
        index=index,
        value=float(ours[index]),
        reference=float(exact[index]),
    )
