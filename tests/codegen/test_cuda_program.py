"""Ranges of token counts, and what the kernels do not take."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from moe_compiler.codegen import cuda_program
from moe_compiler.codegen.cuda import choose_config
from moe_compiler.codegen.cuda_program import MAX_TOKENS, make_program, ranges, unsupported
from moe_compiler.ir import (
    ActivationKind,
    ActivationSpec,
    ExpertSpec,
    GateLayout,
    MoEPlan,
    RouterSpec,
    Score,
)

SHAPES = {
    "qwen3-30b": (128, 8, 2048, 768),
    "mixtral": (8, 2, 4096, 14336),
    "gpt-oss": (32, 4, 2880, 2880),
    "deepseek-v3": (256, 8, 7168, 2048),
    "llama4": (16, 1, 5120, 8192),
    "small": (8, 2, 64, 32),
}


def plan_of(name: str = "small", **changes: object) -> MoEPlan:
    experts, top_k, hidden, intermediate = SHAPES[name]
    spec = ExpertSpec(
        num_experts=experts,
        hidden=hidden,
        intermediate=intermediate,
        gate_layout=GateLayout.CONCAT,
        activation=ActivationSpec(kind=ActivationKind.SILU),
    )
    router = RouterSpec(score=Score.EXTERNAL, top_k=top_k, num_experts=experts)
    return MoEPlan(router=router, experts=dataclasses.replace(spec, **changes))


@pytest.mark.parametrize("name", list(SHAPES))
def test_the_ranges_are_what_choose_config_says_for_every_token_count(name: str) -> None:
    plan = plan_of(name)
    found = ranges(plan, "bf16", "fp32", "int64")
    assert found[0][0] == 1
    assert found[-1][1] == MAX_TOKENS
    for (_, end, config), (start, _, other) in itertools.pairwise(found):
        assert start == end + 1
        assert config != other
    for first, last, config in found:
        for tokens in {*range(first, min(last, 2000) + 1), last}:
            assert choose_config(plan, tokens, "bf16") == config, tokens


def test_a_known_token_count_needs_one_kernel() -> None:
    plan = plan_of("qwen3-30b")
    whole = make_program(plan, "bf16", "", combine_dtype="fp32", index_dtype="int64")
    assert len(whole.kernels) > 3
    for kernel in whole.kernels:
        for tokens in (kernel.first_tokens, kernel.last_tokens):
            one = make_program(
                plan, "bf16", "", combine_dtype="fp32", index_dtype="int64", num_tokens=tokens
            )
            assert one.kernels == (kernel,)
            assert one.layer == whole.layer


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("one dtype for x and the experts; got bf16 and fp32", {"weight_dtypes": ("fp32",)}),
        ("bf16 or fp16", {"dtype": "fp32", "weight_dtypes": ("fp32",)}),
        ("combine weights in bf16, fp16, fp32; got fp64", {"combine_dtype": "fp64"}),
        ("int64 or int32 ids; got int16", {"index_dtype": "int16"}),
        ("multiples of 8", {"plan": plan_of(intermediate=36)}),
        ("one tensor an expert", {"plan": plan_of(stacked=False)}),
        ("holds a router", {"plan": dataclasses.replace(
            plan_of(), router=RouterSpec(score=Score.SOFTMAX, top_k=2, num_experts=8)
        )}),
        ("at most 512 experts", {"plan": plan_of(num_experts=513)}),
    ],
)  # fmt: skip
def test_a_refusal_says_what_is_needed_and_what_came(words: str, changes: dict) -> None:
    asked = {
        "plan": plan_of(),
        "dtype": "bf16",
        "weight_dtypes": ("bf16",),
        "combine_dtype": "fp32",
        "index_dtype": "int64",
    }
    assert unsupported(**asked) == ""
    assert words in unsupported(**{**asked, **changes})


def test_the_grid_reaches_the_last_token_count() -> None:
    assert cuda_program._GRID[0] == 1
    assert cuda_program._GRID[-1] == MAX_TOKENS
