"""Which kernel a shape gets, and the text that names it."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Callable

import pytest

from moe_compiler.codegen.cuda import Kernel, choose_config, render
from moe_compiler.errors import UnsupportedError
from moe_compiler.ir import (
    ActivationKind,
    ActivationSpec,
    ExpertSpec,
    GateLayout,
    MoEPlan,
    Orientation,
    RouterSpec,
    Score,
)
from moe_compiler.runtime.cuda_build import read_template

SILU = ActivationSpec(kind=ActivationKind.SILU)


def make_plan(
    num_experts: int = 128, top_k: int = 8, hidden: int = 2048, intermediate: int = 768
) -> MoEPlan:
    return MoEPlan(
        router=RouterSpec(score=Score.EXTERNAL, top_k=top_k, num_experts=num_experts),
        experts=ExpertSpec(
            num_experts=num_experts,
            hidden=hidden,
            intermediate=intermediate,
            gate_layout=GateLayout.CONCAT,
            activation=SILU,
        ),
    )


def with_experts(plan: MoEPlan, **changes: object) -> MoEPlan:
    experts = dataclasses.replace(plan.experts, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(plan, experts=experts)


def test_few_tokens_decode_many_prefill() -> None:
    plan = make_plan()
    kernels = [choose_config(plan, tokens, "bf16").kernel for tokens in (1, 64, 512, 2048, 8192)]
    assert kernels == [Kernel.DECODE] * 3 + [Kernel.PREFILL] * 2


def test_decode_tile_grows_with_the_rows_of_an_expert() -> None:
    plan = make_plan()
    widths = [
        choose_config(plan, tokens, "bf16").num_tokens_per_tile for tokens in (1, 16, 64, 256, 512)
    ]
    assert widths == [8, 8, 16, 32, 64]


@pytest.mark.parametrize(
    ("shape", "tokens", "num_slices"),
    [
        ((128, 8, 2048, 768), 8192, 2),
        ((128, 8, 2048, 768), 2048, 1),  # few rows an expert
        ((16, 2, 4096, 6400), 8192, 2),
        ((16, 2, 4096, 6400), 2048, 1),  # rows of the down projection fit into L2
        ((128, 8, 4096, 192), 4096, 2),
    ],
)
def test_slices_are_those_that_measured_faster(
    shape: tuple[int, int, int, int], tokens: int, num_slices: int
) -> None:
    assert choose_config(make_plan(*shape), tokens, "bf16").num_slices == num_slices
    mixed = with_experts(make_plan(*shape), w13_orientation=Orientation.IN_OUT)
    assert choose_config(mixed, tokens, "bf16").num_slices == 1


@pytest.mark.parametrize("num_experts", [8, 16, 64, 128, 512])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_decode_tables_hold_every_launch_they_are_chosen_for(num_experts: int, top_k: int) -> None:
    plan = make_plan(num_experts, top_k)
    for tokens in range(1, 5000, 7):
        config = choose_config(plan, tokens, "bf16")
        if config.kernel is Kernel.DECODE:
            assert tokens * top_k <= config.max_routes
            assert num_experts + tokens * top_k // config.num_tokens_per_tile <= max(
                config.max_tiles, num_experts + config.max_routes // config.num_tokens_per_tile
            )


def test_batch_invariant_uses_one_kernel() -> None:
    plan = dataclasses.replace(make_plan(), batch_invariant=True)
    kernels = {choose_config(plan, tokens, "bf16").kernel for tokens in (1, 64, 8192)}
    assert kernels == {Kernel.PREFILL}


@pytest.mark.parametrize(
    ("plan", "dtype", "part"),
    [
        (make_plan(), "fp32", "bf16 or fp16"),
        (make_plan(hidden=2044), "bf16", "multiples of 8"),
        (make_plan(intermediate=100), "bf16", "multiples of 8"),
        (make_plan(num_experts=1024), "bf16", "512 experts"),
        (make_plan(top_k=64), "bf16", "32 experts a token"),
        (with_experts(make_plan(), stacked=False), "bf16", "stacked"),
    ],
)
def test_what_is_not_supported_says_so(plan: MoEPlan, dtype: str, part: str) -> None:
    with pytest.raises(UnsupportedError, match=part):
        choose_config(plan, 16, dtype)


def test_config_is_a_key() -> None:
    one, two = (choose_config(make_plan(), 16, "bf16") for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize("tokens", [1, 4096])
def test_render_names_every_choice_once(tokens: int) -> None:
    activation = ActivationSpec(
        kind=ActivationKind.SILU, alpha=1.702, gate_max=7.0, up_min=-7.0, up_max=7.0, up_shift=1.0
    )
    plan = with_experts(
        make_plan(),
        activation=activation,
        gate_layout=GateLayout.INTERLEAVED,
        w13_orientation=Orientation.IN_OUT,
        has_b13=True,
    )
    config = choose_config(plan, tokens, "fp16", weight_dtype="bf16", index_dtype="int32")
    source = render(config, read_template())
    values = dict(re.findall(r"static constexpr \w+ (k\w+) = (.+);", source))
    assert len(re.findall(r"static constexpr", source)) == len(values)
    assert values["kPaired"] == "true"
    assert values["kAlpha"] == "1.702f"
    assert values["kGateMin"] == "-3.4e+38f"
    assert values["kBias13Stride"] == "2"
    assert "using Element = Fp16;" in source
    assert "using Index = int;" in source
    assert config.entry in source
    assert "MOEFLEX_WATCHDOG" not in source
    watched = dataclasses.replace(config, watchdog=True)
    assert "#define MOEFLEX_WATCHDOG 1" in render(watched, read_template())


def test_rendered_kernel_is_golden(golden: Callable[[str, str], None]) -> None:
    config = choose_config(make_plan(), 64, "bf16")
    golden("cuda_decode_qwen3_30b.cu", render(config, read_template()))
