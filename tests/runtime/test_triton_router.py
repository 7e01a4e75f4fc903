"""The Triton router against the reference: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from moe_compiler import reference
from moe_compiler.errors import UnsupportedError
from moe_compiler.ir import RouterSpec, Score
from moe_compiler.runtime import triton_router
from tests.runtime.triton_cases import DEEPSEEK_V3, ROUTERS
from tests.tolerances import assert_close_to_fp32

pytestmark = pytest.mark.skipif(
    bool(triton_router.missing()), reason=triton_router.missing() or "Triton is here"
)

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# The interpreter needs a millisecond an operation and token.
NUM_TOKENS = 1000 if CUDA else 7


class _TopK(NamedTuple):
    values: Tensor
    indices: Tensor


def stable_topk(self: Tensor, k: int, dim: int = -1, **_: Any) -> _TopK:
    """Top-k with the lowest index first among equal values."""
    values, indices = self.sort(dim=dim, descending=True, stable=True)
    return _TopK(values.narrow(dim, 0, k), indices.narrow(dim, 0, k))


def route_lowest_first(
    spec: RouterSpec, logits: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    with mock.patch.object(torch.Tensor, "topk", stable_topk):
        return reference.route(spec, logits, bias)


def make_bias(spec: RouterSpec, dtype: torch.dtype = torch.float32) -> Tensor | None:
    return torch.randn(spec.num_experts).mul(0.2).to(DEVICE, dtype) if spec.has_bias else None


def make_logits(spec: RouterSpec, num_tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_tokens, spec.num_experts).mul(2).to(DEVICE, dtype)


def assert_same_route(
    ours: tuple[Tensor, Tensor],
    eager: tuple[Tensor, Tensor],
    fp32: tuple[Tensor, Tensor],
) -> None:
    """The same experts in the same order; weights within the rule, in the dtype of eager."""
    assert torch.equal(ours[0], eager[0])
    assert_close_to_fp32(ours[1].cpu(), eager[1].cpu(), fp32[1].cpu())


@pytest.mark.parametrize("name", ROUTERS)
def test_random_logits(name: str) -> None:
    spec = ROUTERS[name]
    logits, bias = make_logits(spec, NUM_TOKENS), make_bias(spec)
    eager = reference.route(spec, logits, bias)
    wide = reference.route(spec, logits.double(), None if bias is None else bias.double())
    assert_same_route(triton_router.route(spec, logits, bias), eager, wide)


@pytest.mark.parametrize("name", ROUTERS)
def test_ties_take_the_lowest_index(name: str) -> None:
    """Coarse logits, so that scores, groups and biased scores tie in every row."""
    spec = ROUTERS[name]
    # No negative zero: torch.sort takes both zeros for equal.
    logits = make_logits(spec, NUM_TOKENS).div(4).round() + 0.0
    logits[0] = 1.0
    bias = make_bias(spec)
    bias = None if bias is None else bias.mul(4).round().div(4) + 0.0
    eager = route_lowest_first(spec, logits, bias)
    assert_same_route(triton_router.route(spec, logits, bias), eager, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROUTERS)
def test_ties_select_what_torch_selects(name: str) -> None:
    """The set of experts is that of torch.topk on CUDA, where the order of equal ones is open."""
    spec = ROUTERS[name]
    logits = make_logits(spec, 5000).div(4).round()
    bias = make_bias(spec)
    bias = None if bias is None else bias.mul(4).round().div(4)
    ids, _ = triton_router.route(spec, logits, bias)
    eager, _ = reference.route(spec, logits, bias)
    assert torch.equal(ids.sort(-1).values, eager.sort(-1).values)


@pytest.mark.parametrize("logits_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("score_dtype", ["", "fp32"])
def test_half_precision(
    logits_dtype: torch.dtype, bias_dtype: torch.dtype, score_dtype: str
) -> None:
    """Each step rounds where eager rounds: half of the choices tie at bf16."""
    for name in ("qwen3", "mixtral", "deepseek-v3", "sqrtsoftplus", "sparsemixer"):
        spec = dataclasses.replace(ROUTERS[name], score_dtype=score_dtype)
        logits, bias = make_logits(spec, NUM_TOKENS, logits_dtype), make_bias(spec, bias_dtype)
        eager = route_lowest_first(spec, logits, bias)
        ids, weights = triton_router.route(spec, logits, bias)
        # The sum of a softmax may differ in its last bit, and so round a score to its neighbour.
        same = (ids == eager[0]).all(-1)
        assert same.double().mean() > 0.99
        wide = reference.combine_weights(
            spec,
            reference.score_logits(spec.score, logits.double()),
            ids,
        )
        if spec.score is Score.SPARSEMIXER:
            wide = reference.route(dataclasses.replace(spec, score_dtype="fp64"), logits)[1]
        assert_close_to_fp32(weights[same].cpu(), eager[1][same].cpu(), wide[same].cpu())


def test_not_a_number_and_infinity() -> None:
    spec = ROUTERS["mixtral"]
    logits = make_logits(spec, 5)
    logits[0, 3] = float("nan")
    logits[1] = float("nan")
    logits[2, 5] = float("inf")
    logits[3] = float("-inf")
    logits[4, 1:3] = float("nan")
    for name in ("softmax", "identity", "sigmoid"):
        probed = dataclasses.replace(spec, score=Score(name))
        eager = route_lowest_first(probed, logits, None)
        assert_same_route(triton_router.route(probed, logits), eager, eager)
    mixer = dataclasses.replace(ROUTERS["sparsemixer"], num_experts=8)
    eager = reference.route(mixer, logits[:3])
    ids, weights = triton_router.route(mixer, logits[:3])
    assert torch.equal(ids, eager[0])
    assert torch.equal(weights.isnan(), eager[1].isnan())


def test_ids_and_counts() -> None:
    spec = ROUTERS["olmoe"]
    logits = make_logits(spec, NUM_TOKENS)
    counts = torch.zeros(spec.num_experts, dtype=torch.int32, device=DEVICE)
    ids, _ = triton_router.route(spec, logits, counts=counts, index_dtype=torch.int32)
    assert ids.dtype is torch.int32
    expected = torch.bincount(ids.flatten(), minlength=spec.num_experts)
    assert torch.equal(counts.long(), expected)
    assert triton_router.route(spec, logits)[0].dtype is torch.int64


def test_strides_and_no_tokens() -> None:
    spec = ROUTERS["qwen3"]
    wide = torch.randn(NUM_TOKENS, 2 * spec.num_experts, device=DEVICE)
    for logits in (wide[:, ::2], wide[:, : spec.num_experts], wide.t()[::2].t()):
        eager = reference.route(spec, logits)
        assert_same_route(triton_router.route(spec, logits), eager, eager)
    ids, weights = triton_router.route(spec, wide[:0, ::2])
    assert ids.shape == weights.shape == (0, spec.top_k)


def test_refusals_say_why() -> None:
    spec = ROUTERS["qwen3"]
    logits = make_logits(spec, 2)
    with pytest.raises(UnsupportedError, match="float64"):
        triton_router.route(spec, logits.double())
    with pytest.raises(UnsupportedError, match="up to 512 experts"):
        triton_router.route(dataclasses.replace(spec, num_experts=1024), logits)
    with pytest.raises(UnsupportedError, match="external"):
        triton_router.route(RouterSpec(score=Score.EXTERNAL, top_k=2, num_experts=8), logits)
    with pytest.raises(UnsupportedError, match="selection bias"):
        triton_router.route(DEEPSEEK_V3, make_logits(DEEPSEEK_V3, 2))
