"""The text of the CPU kernel: which choices it names, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from moe_compiler.codegen import cpu
from moe_compiler.errors import PlanError
from moe_compiler.ir import (
    ActivationKind,
    ActivationSpec,
    ExpertSpec,
    GateLayout,
    MoEPlan,
    RouterSpec,
    Score,
)

TEMPLATE = (Path(__file__).parents[2] / "templates" / "cpu" / "kernel.cpp.in").read_text()
GPT_OSS = ActivationSpec(
    kind=ActivationKind.SILU, alpha=1.702, gate_max=7.0, up_min=-7.0, up_max=7.0, up_shift=1.0
)


def make_plan(score: Score = Score.EXTERNAL, **fields: object) -> MoEPlan:
    values: dict[str, object] = {
        "num_experts": 4, "hidden": 16, "intermediate": 8, "gate_layout": GateLayout.CONCAT,
        "activation": ActivationSpec(kind=ActivationKind.SILU), **fields,
    }  # fmt: skip
    return MoEPlan(router=RouterSpec(score=score, top_k=2), experts=ExpertSpec(**values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("x", "weights", "isa", "compute"),
    [
        ("bf16", ["bf16"], cpu.Isa.AVX512_BF16, cpu.Compute.BF16),
        ("bf16", ["bf16"], cpu.Isa.AVX512, cpu.Compute.F32),
        ("bf16", ["bf16", "fp32"], cpu.Isa.AVX512_BF16, cpu.Compute.F32),
        ("fp32", ["bf16"], cpu.Isa.AVX512_BF16, cpu.Compute.F32),
        ("fp16", ["fp16"], cpu.Isa.AVX2, cpu.Compute.F32),
        ("fp64", ["fp32"], cpu.Isa.AVX2, cpu.Compute.F64),
        ("bf16", ["fp64"], cpu.Isa.SCALAR, cpu.Compute.F64),
    ],
)
def test_sums_are_as_wide_as_the_widest_operand(
    x: str, weights: list[str], isa: cpu.Isa, compute: cpu.Compute
) -> None:
    assert cpu.choose_config(make_plan(), x, weights, isa).compute is compute


def test_the_text_names_the_choices() -> None:
    plan = make_plan(activation=GPT_OSS)
    text = cpu.render(cpu.choose_config(plan, "bf16", ["bf16"], cpu.Isa.AVX512_BF16), TEMPLATE)
    for line in (
        "typedef moeflex::KindBF16 Kind;",
        "static constexpr double alpha = 1.702;",
        "static constexpr double gate_min = -INFINITY;",
        "static constexpr double up_max = 7.0;",
        "static constexpr bool x_is_element = true;",
    ):
        assert line in text
    assert "$" not in text


def test_layers_of_different_sizes_share_a_kernel() -> None:
    small, large = make_plan(), make_plan(hidden=4096, num_experts=128)
    texts = {
        cpu.render(cpu.choose_config(p, "fp32", ["fp32"], cpu.Isa.AVX2), TEMPLATE)
        for p in (small, large)
    }
    assert len(texts) == 1


def test_dtypes_by_role_by_tensor_or_for_all() -> None:
    listed = make_plan(stacked=False, has_b13=True).experts
    assert cpu.role_dtypes(listed, ["bf16"]) == {"w13": "bf16", "b13": "bf16", "w2": "bf16"}
    assert cpu.role_dtypes(listed, ["bf16", "fp32", "bf16"])["b13"] == "fp32"
    by_tensor = ["bf16"] * 4 + ["fp32"] * 4 + ["bf16"] * 4
    assert cpu.role_dtypes(listed, by_tensor)["b13"] == "fp32"
    with pytest.raises(PlanError, match="share one dtype"):
        cpu.role_dtypes(listed, ["bf16"] * 11 + ["fp32"])
    with pytest.raises(PlanError, match="got 5 dtypes"):
        cpu.role_dtypes(listed, ["bf16"] * 5)


def test_refusals_have_a_reason() -> None:
    assert cpu.unsupported(make_plan(), "bf16", ["bf16"]) is None
    assert "router" in (cpu.unsupported(make_plan(score=Score.SOFTMAX), "bf16", ["bf16"]) or "")
    assert "int8" in (cpu.unsupported(make_plan(), "bf16", ["int8"]) or "")
    assert "empty" in (cpu.unsupported(make_plan(intermediate=0), "bf16", ["bf16"]) or "")


def test_batch_invariant_plans_keep_to_panels() -> None:
    plan = make_plan()
    config = cpu.choose_config(plan, "bf16", ["bf16"], cpu.Isa.AVX512_BF16)
    assert cpu.direct_rows(plan, config) > 0
    invariant = MoEPlan(router=plan.router, experts=plan.experts, batch_invariant=True)
    assert cpu.direct_rows(invariant, config) == 0


def test_numbers_survive_the_text() -> None:
    value = 1 / 3
    plan = make_plan(activation=ActivationSpec(kind=ActivationKind.SILU, alpha=value))
    text = cpu.render(cpu.choose_config(plan, "fp32", ["fp32"], cpu.Isa.SCALAR), TEMPLATE)
    found = float(text.split("double alpha = ")[1].split(";")[0])
    assert math.isclose(found, value, rel_tol=0, abs_tol=0)
