"""Floor times: against numbers worked out by hand, against a simulation, and in their limits."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_compiler.codegen.floor import H200, distinct_experts, expert_tensors, floor_points
from moe_compiler.errors import OptionError
from moe_compiler.ir import ActivationKind, ActivationSpec, ExpertSpec, GateLayout

QWEN3_30B = ExpertSpec(
    num_experts=128,
    hidden=2048,
    intermediate=768,
    gate_layout=GateLayout.CONCAT,
    activation=ActivationSpec(kind=ActivationKind.SILU),
)


def test_one_token_reads_k_experts() -> None:
    # 8 experts x 3 x 2048 x 768 weights x 2 bytes at 4.5 TB/s
    (point,) = floor_points(QWEN3_30B, 8, "bf16", H200, [1])
    assert point.weight_bytes_balanced == 75_497_472
    assert point.floor_us == pytest.approx(16.777, rel=1e-4)
    assert point.floor_random_us == pytest.approx(point.floor_us)
    assert point.bound == "weights"


def test_many_tokens_are_bound_by_flop() -> None:
    # 2 x 8192 x 8 x 3 x 2048 x 768 FLOP at 790 TFLOP/s
    (point,) = floor_points(QWEN3_30B, 8, "bf16", H200, [8192])
    assert point.flop == 618_475_290_624
    assert point.floor_us == pytest.approx(782.9, rel=1e-3)
    assert point.bound == "flop"
    assert point.experts_balanced == 128


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 2), (5, 2), (12, 3)])
def test_random_routing_is_the_mean_of_a_simulation(tokens: int, top_k: int) -> None:
    num_experts, rounds = 16, 3000
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(rounds, tokens, num_experts, generator=generator).topk(top_k).indices
    hit = torch.zeros(rounds, num_experts).scatter_(1, draws.flatten(1), 1.0).sum(1)
    tolerance = 4 * float(hit.std()) / math.sqrt(rounds) + 1e-9
    expected = distinct_experts(num_experts, top_k, tokens, routing="random")
    assert float(hit.mean()) == pytest.approx(expected, abs=tolerance)


@given(
    st.integers(1, 256).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, e))),
    st.integers(1, 10_000),
)
def test_random_routing_hits_at_least_k_and_at_most_balanced(
    sizes: tuple[int, int], tokens: int
) -> None:
    num_experts, top_k = sizes
    random = distinct_experts(num_experts, top_k, tokens, routing="random")
    balanced = distinct_experts(num_experts, top_k, tokens, routing="balanced")
    assert top_k - 1e-6 <= random <= balanced + 1e-6
    assert balanced <= num_experts


def test_list_storage_has_the_bytes_of_stacked_storage() -> None:
    stacked = expert_tensors(QWEN3_30B, "bf16")
    listed = expert_tensors(dataclasses.replace(QWEN3_30B, stacked=False), "bf16")
    assert [t.num_bytes for t in listed] == [t.num_bytes for t in stacked]
    assert {t.count for t in listed} == {128}
    assert listed[0].shape == (1536, 2048)


def test_biases_are_read_but_not_multiplied() -> None:
    biased = dataclasses.replace(QWEN3_30B, has_b13=True, has_b2=True)
    (with_bias,) = floor_points(biased, 8, "bf16", H200, [16])
    (plain,) = floor_points(QWEN3_30B, 8, "bf16", H200, [16])
    assert with_bias.weight_bytes_balanced - plain.weight_bytes_balanced == 128 * (1536 + 2048) * 2
    assert with_bias.flop == plain.flop


def test_unknown_names_say_what_is_known() -> None:
    with pytest.raises(OptionError, match="'balanced' or 'random'; got 'skewed'"):
        distinct_experts(8, 2, 1, routing="skewed")
    narrow = dataclasses.replace(H200, rates=H200.rates[:1])
    with pytest.raises(OptionError, match=r"no fp32 matrix rate .* --tflops"):
        floor_points(QWEN3_30B, 8, "fp32", narrow, [1])
