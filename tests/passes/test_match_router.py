"""Routers of every family, written anew, are recognised; look-alikes are refused."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_compiler.ir import GroupScore, Normalize, RouterSpec, Score
from moe_compiler.passes.match_router import (
    NoMatchReason,
    RouterMatch,
    RouterProblem,
    match_router,
)
from moe_compiler.reference import route

NEG_INF = float("-inf")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# A router in these tests: (logits, bias, wide, low) -> ids or None, weights. `wide` is what
# `float32` in the source becomes, `low` the dtype of the hidden states; both are fp64 in a precise
# run.
Router = Callable[
    [Tensor, "Tensor | None", torch.dtype, torch.dtype], "tuple[Tensor | None, Tensor]"
]


def problem(
    router: Router,
    num_experts: int,
    top_k: int,
    *,
    dtype: torch.dtype = FP32,
    weights_dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
    num_tokens: int = 64,
    dense: bool = False,
    ops: tuple[str, ...] = (),
    constants: tuple[float, ...] = (),
    int_constants: tuple[int, ...] = (),
) -> RouterProblem:
    def run(logits: Tensor, bias: Tensor | None, *, precise: bool) -> tuple[Tensor | None, Tensor]:
        assert logits.shape == (num_tokens, num_experts)
        assert logits.dtype == (torch.float64 if precise else dtype)
        wide = torch.float64 if precise else FP32
        return router(logits, bias, wide, torch.float64 if precise else dtype)

    return RouterProblem(
        run=run,
        num_experts=num_experts,
        top_k=top_k,
        num_tokens=num_tokens,
        has_bias=bias_dtype is not None,
        dense=dense,
        logits_dtype=dtype,
        bias_dtype=bias_dtype or FP32,
        weights_dtype=weights_dtype or dtype,
        ops=ops,
        constants=constants,
        int_constants=int_constants,
    )


def matched(found: RouterMatch | NoMatchReason) -> RouterMatch:
    assert isinstance(found, RouterMatch), found
    return found


def refused(found: RouterMatch | NoMatchReason) -> str:
    assert isinstance(found, NoMatchReason), found
    return found.reason


# Routers of model families, in our own words


def softmax_router(top_k: int, *, renormalize: bool) -> Router:
    def run(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype):
        best = torch.softmax(logits, -1, dtype=wide).topk(top_k)
        weights = best.values
        if renormalize:
            weights /= weights.sum(-1, keepdim=True)
        return best.indices, weights.to(low)

    return run


def topk_then_softmax(top_k: int, *, upcast: bool, divide: float = 1.0) -> Router:
    def run(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype):
        best = (logits.to(wide) if upcast else logits).topk(top_k)
        return best.indices, (best.values.softmax(-1) / divide).to(low)

    return run


def grouped_router(
    top_k: int,
    num_groups: int,
    kept: int,
    *,
    score: str = "sigmoid",
    best_two: bool = True,
    fill: float = NEG_INF,
    renormalize: bool = True,
    scale: float = 1.0,
    upcast: bool = True,
) -> Router:
    def run(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype):
        logits = logits.to(wide) if upcast else logits
        scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
        choice = scores if bias is None else scores + bias
        size = choice.shape[-1] // num_groups
        by_group = choice.unflatten(-1, (num_groups, size))
        rank = by_group.topk(2, -1).values.sum(-1) if best_two else by_group.amax(-1)
        winners = F.one_hot(rank.topk(kept, -1, sorted=False).indices, num_groups).sum(1) > 0
        choice = choice.masked_fill(~winners.repeat_interleave(size, -1), fill)
        ids = choice.topk(top_k, -1, sorted=False).indices
        weights = scores.gather(1, ids)
        if renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * scale

    return run


def biased_router(
    top_k: int,
    score: Callable[[Tensor], Tensor],
    *,
    eps: float = 0.0,
    clamp: float = 0.0,
    renormalize: bool = True,
    scale: float = 1.0,
    upcast: bool = True,
) -> Router:
    def run(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype):
        scores = score(logits.to(wide) if upcast else logits)
        ids = (scores if bias is None else scores + bias).topk(top_k, sorted=False).indices
        weights = scores.gather(-1, ids)
        if renormalize:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total.clamp(min=clamp) if clamp else total + eps)
        return ids, (weights * scale).to(low)

    return run


def softplus_root(logits: Tensor) -> Tensor:
    return F.softplus(logits).sqrt()


def raw_logits(top_k: int) -> Router:
    def run(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype):
        best = logits.topk(top_k)
        return best.indices, best.values

    return run


def sigmoid_after(top_k: int, *, renormalize: bool) -> Router:
    def run(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype):
        ids = (logits if bias is None else logits + bias).topk(top_k).indices
        weights = logits.gather(-1, ids).sigmoid()
        return ids, weights / weights.sum(-1, keepdim=True) if renormalize else weights

    return run


def sparsemixer(top_k: int, jitter: float) -> Router:
    def run(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype):
        left, ids, weights = logits, [], []
        for _ in range(top_k):
            top, winner = left.max(-1, keepdim=True)
            far = (top - logits) / logits.abs().clamp(min=top) > 2 * jitter
            gates = left.masked_fill(far, NEG_INF).softmax(-1)
            ids.append(winner)
            weights.append(gates.gather(-1, winner))
            left = left.scatter(-1, winner, NEG_INF)
        return torch.cat(ids, -1), torch.cat(weights, -1)

    return run


def expected(score: Score, normalize: Normalize, **fields: object) -> dict[str, object]:
    return {"score": score, "normalize": normalize, **fields}


SOFTMAX_SUM = expected(Score.SOFTMAX, Normalize.SUM, has_bias=False, eps=0.0, scale=1.0)
TOPK_SOFTMAX = expected(Score.IDENTITY, Normalize.SOFTMAX, has_bias=False, scale=1.0)
DEEPSEEK_V3 = expected(
    Score.SIGMOID,
    Normalize.SUM,
    has_bias=True,
    num_groups=8,
    top_k_groups=4,
    group_score=GroupScore.TOP2_SUM,
    group_fill=NEG_INF,
    eps=1e-20,
    eps_clamps=False,
    scale=2.5,
)
SM_TOPK, TOPK_SM, SIG_TOPK = ("softmax", "topk"), ("topk", "softmax"), ("sigmoid", "topk")

FAMILIES: dict[str, tuple[RouterProblem, dict[str, object]]] = {
    "qwen3_moe": (
        problem(softmax_router(8, renormalize=True), 128, 8, dtype=BF16, ops=SM_TOPK),
        SOFTMAX_SUM,
    ),
    "qwen3_moe fp32": (
        problem(softmax_router(8, renormalize=True), 128, 8, ops=SM_TOPK),
        SOFTMAX_SUM,
    ),
    "mixtral": (
        problem(softmax_router(2, renormalize=True), 8, 2, dtype=FP16, ops=SM_TOPK),
        SOFTMAX_SUM,
    ),
    "olmoe, jamba": (
        problem(softmax_router(8, renormalize=False), 64, 8, dtype=BF16),
        expected(Score.SOFTMAX, Normalize.NONE, scale=1.0),
    ),
    "gpt_oss": (
        problem(topk_then_softmax(4, upcast=False), 32, 4, dtype=BF16, ops=TOPK_SM),
        TOPK_SOFTMAX,
    ),
    "granitemoe, jetmoe, aria": (
        problem(topk_then_softmax(8, upcast=True), 40, 8, dtype=BF16, ops=TOPK_SM),
        TOPK_SOFTMAX,
    ),
    "openai_privacy_filter": (
        problem(topk_then_softmax(4, upcast=True, divide=4.0), 128, 4, ops=TOPK_SM),
        TOPK_SOFTMAX | {"scale": 0.25},
    ),
    "deepseek_v3": (
        problem(
            grouped_router(8, 8, 4, scale=2.5),
            256,
            8,
            bias_dtype=FP32,
            constants=(1e-20, 2.5),
            int_constants=(8, 32, 2, 4, 256, 1, -1),
        ),
        DEEPSEEK_V3,
    ),
    "deepseek_v3, literals unknown": (
        problem(grouped_router(8, 8, 4, scale=2.5), 256, 8, bias_dtype=FP32),
        DEEPSEEK_V3,
    ),
    "axk2 (lost groups become 0)": (
        problem(grouped_router(4, 4, 2, scale=2.5, fill=0.0), 32, 4, bias_dtype=FP32),
        DEEPSEEK_V3 | {"num_groups": 4, "top_k_groups": 2, "group_fill": 0.0},
    ),
    "deepseek_v2": (
        problem(
            grouped_router(
                6, 8, 3, score="softmax", best_two=False, fill=0.0, renormalize=False, scale=16.0
            ),
            160,
            6,
        ),
        expected(
            Score.SOFTMAX,
            Normalize.NONE,
            num_groups=8,
            top_k_groups=3,
            group_score=GroupScore.MAX,
            scale=16.0,
        ),
    ),
    "mistral4": (
        problem(
            grouped_router(4, 8, 4, score="softmax", fill=0.0, upcast=False), 128, 4, dtype=BF16
        ),
        expected(
            Score.SOFTMAX,
            Normalize.SUM,
            num_groups=8,
            top_k_groups=4,
            group_score=GroupScore.TOP2_SUM,
            score_dtype="",
        ),
    ),
    "minimax_m2": (
        problem(biased_router(8, torch.sigmoid), 96, 8, dtype=BF16, bias_dtype=BF16),
        expected(Score.SIGMOID, Normalize.SUM, has_bias=True, eps=0.0, score_dtype="fp32"),
    ),
    "lfm2_moe": (
        problem(
            biased_router(4, torch.sigmoid, eps=1e-6, upcast=False),
            32,
            4,
            dtype=BF16,
            bias_dtype=FP32,
        ),
        expected(Score.SIGMOID, Normalize.SUM, has_bias=True, eps=1e-6, score_dtype=""),
    ),
    "ernie4_5_moe": (
        problem(
            biased_router(6, lambda x: x.softmax(-1), clamp=1e-12),
            64,
            6,
            dtype=BF16,
            bias_dtype=FP32,
            weights_dtype=BF16,
        ),
        expected(Score.SOFTMAX, Normalize.SUM, has_bias=True, eps=1e-12, eps_clamps=True),
    ),
    "longcat_flash": (
        problem(
            biased_router(12, lambda x: x.softmax(-1), renormalize=False, scale=6.0),
            96,
            12,
            bias_dtype=FP32,
        ),
        expected(Score.SOFTMAX, Normalize.NONE, has_bias=True, scale=6.0),
    ),
    "deepseek_v4": (
        problem(
            biased_router(6, softplus_root, eps=1e-20, scale=1.5, upcast=False),
            96,
            6,
            dtype=BF16,
            bias_dtype=FP32,
        ),
        expected(Score.SQRTSOFTPLUS, Normalize.SUM, has_bias=True, eps=1e-20, scale=1.5),
    ),
    "flint": (
        problem(biased_router(4, torch.sigmoid), 24, 4, ops=SIG_TOPK),
        expected(Score.SIGMOID, Normalize.SUM, has_bias=False, eps=0.0),
    ),
    "cohere2_moe": (
        problem(sigmoid_after(8, renormalize=True), 64, 8, dtype=BF16),
        expected(Score.IDENTITY, Normalize.SIGMOID_SUM, has_bias=False),
    ),
    "kolibri1": (
        problem(sigmoid_after(4, renormalize=True), 48, 4, bias_dtype=FP32),
        expected(Score.IDENTITY, Normalize.SIGMOID_SUM, has_bias=True),
    ),
    "llama4, sparse form": (
        problem(sigmoid_after(1, renormalize=False), 128, 1, dtype=BF16),
        expected(Score.IDENTITY, Normalize.SIGMOID),
    ),
    "phimoe": (
        problem(sparsemixer(2, 0.01), 16, 2, dtype=BF16, constants=(0.02,)),
        expected(Score.SPARSEMIXER, Normalize.NONE, jitter_eps=0.01),
    ),
    "phimoe, literals unknown": (
        problem(sparsemixer(2, 0.03), 16, 2),
        expected(Score.SPARSEMIXER, Normalize.NONE, jitter_eps=0.03),
    ),
    "raw logits": (
        problem(raw_logits(2), 8, 2),
        expected(Score.IDENTITY, Normalize.NONE),
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    given, fields = FAMILIES[name]
    match = matched(match_router(given))
    assert {field: getattr(match.spec, field) for field in fields} == fields
    assert match.exact_ids
    assert match.same_ties
    assert match.note == ""
    assert match.max_error < 1e-9
    assert (match.spec.num_experts, match.spec.top_k) == (given.num_experts, given.top_k)
    assert 5 <= match.num_runs <= 60


@pytest.mark.parametrize("num_tokens", [1, 3, 7, 16, 400])
def test_any_number_of_tokens(num_tokens: int) -> None:
    router = grouped_router(4, 4, 2, scale=2.5)
    given = problem(router, 32, 4, bias_dtype=FP32, num_tokens=num_tokens)
    match = matched(match_router(given))
    assert match.spec.kind == "sigmoid+bias>groups 2/4>top4>sum*2.5"
    assert match.exact_ids


@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(1, 1), (2, 1), (3, 3), (7, 2), (60, 1), (512, 8)]
)
@pytest.mark.parametrize("renormalize", [True, False])
def test_sizes(num_experts: int, top_k: int, renormalize: bool) -> None:
    given = problem(
        softmax_router(top_k, renormalize=renormalize), num_experts, top_k, dtype=BF16, ops=SM_TOPK
    )
    match = matched(match_router(given))
    assert match.exact_ids
    assert_equal_routing(match.spec, softmax_router(top_k, renormalize=renormalize), None)


def test_winners_above_255_are_not_folded() -> None:
    def folded(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype):
        ids, weights = softmax_router(2, renormalize=True)(logits, bias, wide, low)
        assert ids is not None
        return ids % 256, weights

    reason = refused(match_router(problem(folded, 512, 2)))
    assert "top 2" in reason or "renumbered" in reason or "twice" in reason


# Dense weights [T, E]


def scattered(router: Router) -> Router:
    """Gates in a zero matrix."""

    def run(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype):
        ids, weights = router(logits, bias, wide, low)
        assert ids is not None
        return None, torch.zeros_like(logits, dtype=weights.dtype).scatter(1, ids, weights)

    return run


def masked_sum(router: Router) -> Router:
    """`(w * (ids == e)).sum(-1)` for every expert e."""

    def run(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype):
        ids, weights = router(logits, bias, wide, low)
        assert ids is not None
        experts = [(weights * (ids == e)).sum(-1) for e in range(logits.shape[-1])]
        return None, torch.stack(experts, -1)

    return run


def llama4(top_k: int) -> Router:
    def run(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype):
        best = logits.topk(top_k, dim=1)
        kept = torch.full_like(logits, NEG_INF).scatter_(1, best.indices, best.values)
        return None, kept.to(wide).sigmoid().to(low)

    return run


DENSE: dict[str, tuple[Router, int, str]] = {
    "llama4": (llama4(1), 1, "identity>top1>sigmoid"),
    "llama4, three experts": (llama4(3), 3, "identity>top3>sigmoid"),
    "scattered softmax": (scattered(softmax_router(2, renormalize=False)), 2, "softmax>top2"),
    "masked sum": (masked_sum(softmax_router(3, renormalize=True)), 3, "softmax>top3>sum"),
}


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_dense_weights(name: str, dtype: torch.dtype) -> None:
    router, top_k, kind = DENSE[name]
    ops = SM_TOPK if kind.startswith("softmax") else ()
    given = problem(router, 16, top_k, dtype=dtype, dense=True, ops=ops)
    match = matched(match_router(given))
    assert match.spec.kind == kind
    assert match.exact_ids


def test_dense_weights_must_be_zero_elsewhere() -> None:
    def leaky(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype):
        _, dense = scattered(softmax_router(2, renormalize=True))(logits, bias, wide, low)
        return None, dense + 1e-12

    reason = refused(match_router(problem(leaky, 16, 2, dense=True)))
    assert reason == "dense weights have 16 to 16 nonzero entries a token, 2 are needed"


# Rounding and ties


def test_order_of_softmax_and_topk_is_told_apart_by_underflow() -> None:
    before = problem(softmax_router(4, renormalize=True), 32, 4)
    after = problem(topk_then_softmax(4, upcast=True), 32, 4)
    # The hint is wrong in both; what the routers do decides.
    wrong_before = dataclasses.replace(before, ops=TOPK_SM)
    wrong_after = dataclasses.replace(after, ops=SM_TOPK)
    assert matched(match_router(wrong_before)).spec.score is Score.SOFTMAX
    assert matched(match_router(wrong_after)).spec.score is Score.IDENTITY


@pytest.mark.parametrize("upcast", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_score_dtype(dtype: torch.dtype, upcast: bool) -> None:
    router = biased_router(4, torch.sigmoid, upcast=upcast)
    given = problem(router, 32, 4, dtype=dtype, bias_dtype=FP32)
    match = matched(match_router(given))
    assert match.exact_ids
    assert match.spec.score_dtype == ("fp32" if upcast else "")


def test_rounding_that_no_spec_has_is_reported() -> None:
    def rounded(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype):
        coarse = logits if logits.dtype is torch.float64 else logits.bfloat16().to(logits.dtype)
        best = coarse.topk(4)
        return best.indices, best.values.softmax(-1)

    match = matched(match_router(problem(rounded, 32, 4)))
    assert match.spec.kind in ("identity>top4>softmax", "softmax>top4>sum")
    assert not match.exact_ids
    assert not match.same_ties
    assert match.note.startswith("proven in exact arithmetic; with scores in fp32, ")


def test_other_tie_breaking_is_reported_but_exact() -> None:
    def by_sort(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype):
        ids = logits.flip(-1).argsort(dim=-1, descending=True, stable=True)[:, :4]
        ids = logits.shape[-1] - 1 - ids
        return ids, logits.gather(-1, ids).softmax(-1)

    match = matched(match_router(problem(by_sort, 24, 4, dtype=BF16)))
    assert match.exact_ids
    assert not match.same_ties
    assert match.note.startswith("tied scores are broken otherwise than by torch.topk")


# Neighbours


def random_spec(source: random.Random) -> tuple[RouterSpec, torch.dtype]:
    num_experts = source.choice([4, 6, 8, 12, 16, 24, 32, 60, 64, 128])
    top_k = min(source.choice([1, 2, 3, 4, 6, 8]), num_experts)
    score = source.choice([s for s in Score if s is not Score.EXTERNAL])
    if score is Score.SPARSEMIXER:
        jitter = source.choice([0.01, 0.05, 0.1])
        return RouterSpec(
            score=score, top_k=min(top_k, 3), num_experts=num_experts, jitter_eps=jitter
        ), FP32
    fields: dict[str, object] = {"has_bias": source.random() < 0.5}
    shapes = [
        (groups, kept)
        for groups in range(2, num_experts // 2 + 1)
        if num_experts % groups == 0
        for kept in range(1, groups)
        if kept * (num_experts // groups) >= top_k
    ]
    if shapes and source.random() < 0.5:
        fields["num_groups"], fields["top_k_groups"] = source.choice(shapes)
        fields["group_score"] = source.choice(list(GroupScore))
        fields["group_fill"] = source.choice([0.0, NEG_INF])
    plain = [Normalize.NONE, Normalize.SOFTMAX, Normalize.SIGMOID, Normalize.SIGMOID_SUM]
    identity = score is Score.IDENTITY
    normalize = source.choice(plain if identity else [Normalize.NONE, Normalize.SUM])
    if normalize in (Normalize.SUM, Normalize.SIGMOID_SUM):
        fields["eps"] = source.choice([0.0, 1e-20, 1e-12, 1e-6, 1e-3])
        fields["eps_clamps"] = source.random() < 0.3
    fields["scale"] = source.choice([1.0, 2.5, 1.8, 1 / 3])
    dtype = source.choice([FP32, BF16, FP16])
    fields["score_dtype"] = "fp32" if dtype is FP32 else source.choice(["fp32", ""])
    spec = RouterSpec(
        score=score,
        top_k=top_k,
        num_experts=num_experts,
        normalize=normalize,
        **fields,  # type: ignore[arg-type]
    )
    return spec, dtype


def of_spec(spec: RouterSpec) -> Router:
    def run(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype):
        return route(spec, logits, bias if spec.has_bias else None)

    return run


def literals(spec: RouterSpec) -> dict[str, tuple[float, ...] | tuple[int, ...]]:
    return {
        "constants": (spec.eps, spec.scale, 2 * spec.jitter_eps),
        "int_constants": (spec.num_groups, spec.top_k_groups, spec.top_k, 2, 1),
    }


def assert_equal_routing(spec: RouterSpec, router: Router, bias: Tensor | None) -> None:
    """The same dense weights in fp64, on logits that the matcher has not seen."""
    generator = torch.Generator().manual_seed(123)
    for spread, offset in ((1.0, 0.0), (5.0, 2.0), (0.1, -9.0), (0.1, -25.0)):
        shape = (64, spec.num_experts)
        logits = spread * torch.randn(shape, generator=generator, dtype=torch.float64) + offset
        ids, weights = route(spec, logits, bias if spec.has_bias else None)
        other_ids, other_weights = router(logits, bias, torch.float64, torch.float64)
        assert other_ids is not None
        dense = torch.zeros_like(logits).scatter(1, ids, weights)
        other = torch.zeros_like(logits).scatter(1, other_ids, other_weights)
        torch.testing.assert_close(dense, other, rtol=1e-8, atol=1e-300)


@pytest.mark.parametrize("seed", range(8))
def test_random_specs_are_found_again(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(12):
        spec, dtype = random_spec(source)
        router = of_spec(spec)
        given = problem(
            router,
            spec.num_experts,
            spec.top_k,
            dtype=dtype,
            weights_dtype=FP32 if spec.score_dtype else dtype,
            bias_dtype=FP32 if spec.has_bias else None,
            num_tokens=source.choice([4, 16, 64]),
            **literals(spec),  # type: ignore[arg-type]
        )
        match = matched(match_router(given))
        assert match.exact_ids, (spec, match)
        bias = None
        if spec.has_bias:
            bias = torch.randn(spec.num_experts, dtype=torch.float64)
        if spec.group_fill == 0.0 and bias is not None:
            bias = bias.abs() + 30  # otherwise experts of lost groups tie at 0
        assert_equal_routing(match.spec, router, bias)


BASE = RouterSpec(
    score=Score.SIGMOID,
    top_k=4,
    num_experts=32,
    has_bias=True,
    num_groups=8,
    top_k_groups=3,
    group_score=GroupScore.TOP2_SUM,
    group_fill=NEG_INF,
    normalize=Normalize.SUM,
    eps=1e-12,
    scale=2.5,
)
NEIGHBOURS: list[dict[str, object]] = [
    {},
    {"score": Score.SOFTMAX},
    {"score": Score.SQRTSOFTPLUS},
    {"score": Score.IDENTITY, "normalize": Normalize.SIGMOID_SUM},
    {"num_groups": 4},
    {"num_groups": 16, "top_k_groups": 3},
    {"num_groups": 1, "top_k_groups": 1, "group_score": GroupScore.MAX, "group_fill": 0.0},
    {"top_k_groups": 2},
    {"top_k_groups": 7},
    {"group_score": GroupScore.MAX},
    {"group_fill": 0.0},
    {"normalize": Normalize.NONE, "eps": 0.0},
    {"eps": 0.0},
    {"eps": 1e-11},
    {"eps_clamps": True},
    {"scale": 2.5000001},
    {"top_k": 3},
]


@pytest.mark.parametrize("change", NEIGHBOURS, ids=str)
def test_neighbours_are_told_apart(change: dict[str, object]) -> None:
    spec = dataclasses.replace(BASE, **change)  # type: ignore[arg-type]
    given = problem(of_spec(spec), 32, spec.top_k, bias_dtype=FP32)
    assert matched(match_router(given)).spec == spec


def test_unused_bias_is_no_bias() -> None:
    router = softmax_router(2, renormalize=True)
    match = matched(match_router(problem(router, 16, 2, bias_dtype=FP32, ops=SM_TOPK)))
    assert match.spec.kind == "softmax>top2>sum"


def test_one_norm_is_a_sum() -> None:
    def one_norm(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype):
        best = logits.softmax(-1).topk(4)
        length = torch.linalg.vector_norm(best.values, ord=1, dim=-1, keepdim=True)
        return best.indices, best.values / length

    assert matched(match_router(problem(one_norm, 16, 4, ops=SM_TOPK))).spec.kind == (
        "softmax>top4>sum"
    )


# What must not match

Answer = tuple[Tensor, Tensor]


def weigh(select: Callable[[Tensor], Tensor], top_k: int = 2) -> Router:
    """Top-k of `select(logits)`, those values as weights."""

    def run(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype) -> Answer:
        best = select(logits).topk(top_k)
        return best.indices, best.values

    return run


def two_norm(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype) -> Answer:
    best = logits.softmax(-1).topk(2)
    return best.indices, best.values / best.values.norm(dim=-1, keepdim=True)


def three_norm(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype) -> Answer:
    best = logits.softmax(-1).topk(2)
    return best.indices, best.values / best.values.norm(p=3, dim=-1, keepdim=True)


def noisy(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype) -> Answer:
    ids, weights = softmax_router(2, renormalize=True)(logits, bias, wide, low)
    assert ids is not None
    return ids, weights * (1 + 0.01 * torch.rand_like(weights))


def gambling(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype) -> Answer:
    best = (logits + torch.randn_like(logits)).topk(2)
    return best.indices, best.values.softmax(-1)


def renumbered(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype) -> Answer:
    best = logits.topk(2)
    return (best.indices + 1) % logits.shape[-1], best.values.softmax(-1)


def swapped(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype) -> Answer:
    best = logits.topk(2)
    return best.indices, best.values.softmax(-1).flip(-1)


def capacity(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype) -> Answer:
    ids, weights = softmax_router(1, renormalize=False)(logits, bias, wide, low)
    assert ids is not None
    place = F.one_hot(ids[:, 0], logits.shape[-1]).cumsum(0).gather(1, ids)
    return ids, weights * (place <= 2)


def scaled_by_expert(
    logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype
) -> Answer:
    assert bias is not None
    best = logits.softmax(-1).topk(2)
    return best.indices, best.values * bias[best.indices]


def biased_weights(
    logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype
) -> Answer:
    assert bias is not None
    best = (logits.sigmoid() + bias).topk(2)
    return best.indices, best.values


def temperature(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype) -> Answer:
    assert bias is not None
    best = (logits * bias.sigmoid()).softmax(-1).topk(2)
    return best.indices, best.values


def repeated(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype) -> Answer:
    best = logits.topk(1)
    return best.indices.repeat(1, 2), torch.full_like(logits[:, :2], 0.5)


def not_a_number(
    logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype
) -> Answer:
    best = logits.topk(2)
    return best.indices, best.values.sqrt()


def broken(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype) -> Answer:
    raise RuntimeError("no kernel for this dtype\nand a second line")


NOT_THE_TOP = "the selected experts are not the top 2 of"
NO_FUNCTION = "the combine weights are no known function of the scores"
LOOKALIKES: dict[str, tuple[Router, bool, str]] = {
    "smallest": (weigh(torch.neg), False, "selects the 2 smallest logits"),
    "magnitude": (weigh(torch.abs), False, "selects the 2 logits of largest magnitude"),
    "tanh": (weigh(torch.tanh), False, NOT_THE_TOP),
    "soft cap": (weigh(lambda x: 5 * torch.tanh(x / 5)), False, NOT_THE_TOP),
    "temperature": (weigh(lambda x: (x / 2).softmax(-1)), False, NO_FUNCTION),
    "cubed": (weigh(lambda x: x**3), False, NO_FUNCTION),
    "two norm": (two_norm, False, "constant 2-norm"),
    "three norm": (three_norm, False, NO_FUNCTION),
    "noise on weights": (noisy, False, "the router is random"),
    "noise on logits": (gambling, False, "the router is random"),
    "renumbered": (renumbered, False, "renumbered after the top-k"),
    "swapped weights": (swapped, False, NO_FUNCTION),
    "repeated": (repeated, False, "selects the same expert twice"),
    "not a number": (not_a_number, False, "not finite"),
    "broken": (broken, False, "does not run in fp64: RuntimeError: no kernel for this dtype"),
    "scale by expert": (scaled_by_expert, True, "changes the combine weights, not only"),
    "bias in weights": (biased_weights, True, "changes the combine weights, not only"),
    "temperature by expert": (temperature, True, NOT_THE_TOP),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalikes_are_refused(name: str) -> None:
    router, has_bias, words = LOOKALIKES[name]
    given = problem(router, 16, 2, bias_dtype=FP32 if has_bias else None)
    reason = refused(match_router(given))
    assert words in reason
    assert "\n" not in reason


def test_tokens_that_influence_each_other_are_refused() -> None:
    assert refused(match_router(problem(capacity, 8, 1))) in (
        "the routing of a token depends on the other tokens of the batch",
        "combine weights are not finite for some finite logits",
    )


def test_masked_group_of_the_wrong_size_is_refused() -> None:
    """Groups of unequal size have no spec."""

    def uneven(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype):
        first = logits[:, :5].amax(-1, keepdim=True) > logits[:, 5:].amax(-1, keepdim=True)
        mask = (torch.arange(16) < 5) ^ first
        best = logits.masked_fill(mask, NEG_INF).topk(3)
        return best.indices, best.values.softmax(-1)

    assert "the selected experts are not the top 3" in refused(match_router(problem(uneven, 16, 3)))


# Manners


def test_random_state_and_inputs_are_left_alone() -> None:
    def in_place(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype):
        assert bias is not None
        scores = logits.sigmoid_()
        ids = (scores + bias.mul_(2.0).div_(2.0)).topk(4).indices
        bias.zero_()
        return ids, scores.gather(1, ids)

    before = torch.get_rng_state()
    match = matched(match_router(problem(in_place, 16, 4, bias_dtype=FP32)))
    refused(match_router(problem(noisy, 16, 2)))
    assert match.spec.kind == "sigmoid+bias>top4"
    assert torch.equal(torch.get_rng_state(), before)


def test_no_gradient_is_recorded() -> None:
    weight = torch.ones(16, requires_grad=True)

    def trained(logits: Tensor, bias: Tensor | None, wide: torch.dtype, low: torch.dtype):
        best = (logits * weight.to(logits.dtype)).topk(2)
        assert not best.values.requires_grad
        return best.indices, best.values.softmax(-1)

    assert matched(match_router(problem(trained, 16, 2))).spec.score is Score.IDENTITY


def test_default_dtype_and_device_do_not_matter() -> None:
    given = problem(topk_then_softmax(4, upcast=True), 32, 4, dtype=BF16)
    usual = match_router(given)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            other = match_router(given)
    finally:
        torch.set_default_dtype(torch.float32)
    assert other == usual
