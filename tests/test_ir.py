"""The data that the stages exchange: keys read back, properties agree with tensor shapes."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_compiler.errors import MoeflexError, PlanError
from moe_compiler.ir import (
    PLAN_VERSION,
    ActivationKind,
    ActivationSpec,
    ExpertSpec,
    GateLayout,
    GroupScore,
    MoEPlan,
    MoERegion,
    NoMatch,
    Normalize,
    Orientation,
    Proof,
    RouterSpec,
    Score,
    WeightPosition,
)

finite = st.floats(-1e6, 1e6, allow_nan=False)
bounds = finite | st.sampled_from([math.inf, -math.inf])

routers = st.builds(
    RouterSpec,
    score=st.sampled_from(Score),
    top_k=st.integers(1, 16),
    num_experts=st.integers(0, 512),
    has_bias=st.booleans(),
    num_groups=st.integers(1, 16),
    top_k_groups=st.integers(1, 8),
    group_score=st.sampled_from(GroupScore),
    group_fill=st.sampled_from([0.0, -math.inf]),
    normalize=st.sampled_from(Normalize),
    eps=st.floats(0, 1e-3),
    eps_clamps=st.booleans(),
    scale=finite,
    jitter_eps=st.floats(0, 1),
    score_dtype=st.sampled_from(["", "fp32"]),
)
activations = st.builds(
    ActivationSpec,
    kind=st.sampled_from(ActivationKind),
    alpha=finite,
    gate_min=bounds,
    gate_max=bounds,
    up_min=bounds,
    up_max=bounds,
    up_shift=finite,
)
experts = st.builds(
    ExpertSpec,
    num_experts=st.integers(1, 512),
    hidden=st.integers(1, 8192),
    intermediate=st.integers(1, 8192),
    gate_layout=st.sampled_from(GateLayout),
    w13_orientation=st.sampled_from(Orientation),
    w2_orientation=st.sampled_from(Orientation),
    stacked=st.booleans(),
    has_b13=st.booleans(),
    has_b2=st.booleans(),
    activation=activations,
    weight_position=st.sampled_from(WeightPosition),
)
plans = st.builds(
    MoEPlan,
    router=routers,
    experts=experts,
    out_dtype=st.sampled_from(["", "bf16", "fp16", "fp32", "fp64"]),
    batch_invariant=st.booleans(),
    round_gemms=st.booleans(),
)


def simple_plan(**changes: object) -> MoEPlan:
    plan = MoEPlan(
        router=RouterSpec(score=Score.SOFTMAX, top_k=2, num_experts=8),
        experts=ExpertSpec(
            num_experts=8,
            hidden=64,
            intermediate=32,
            gate_layout=GateLayout.CONCAT,
            activation=ActivationSpec(kind=ActivationKind.SILU),
        ),
    )
    return dataclasses.replace(plan, **changes)


@given(plans)
def test_key_reads_back(plan: MoEPlan) -> None:
    read = MoEPlan.from_key(plan.key)
    assert read == plan
    assert hash(read) == hash(plan)
    assert read.key == plan.key
    assert type(read.router.score) is Score
    assert type(read.experts.activation.kind) is ActivationKind


@given(plans)
def test_key_is_strict_one_line_json(plan: MoEPlan) -> None:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    fields = json.loads(plan.key, parse_constant=refuse)
    assert fields["v"] == PLAN_VERSION
    assert "\n" not in plan.key


@given(plans, plans)
def test_key_is_the_identity_of_a_plan(one: MoEPlan, other: MoEPlan) -> None:
    assert (one.key == other.key) == (one == other)


@given(plans)
def test_pickle_round_trip(plan: MoEPlan) -> None:
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_defaults_are_left_out_of_the_key() -> None:
    key = simple_plan().key
    assert "has_b2" not in key
    assert "scale" not in key
    assert "inf" not in key


@pytest.mark.parametrize(
    "key",
    [
        "",
        "{}",
        "[]",
        "null",
        "3",
        "not json",
        '{"v": 1}',
        '{"v": 1, "router": {}, "experts": {}}',
        '{"v": 1, "router": 3, "experts": []}',
    ],
)
def test_foreign_text_is_refused(key: str) -> None:
    with pytest.raises(PlanError, match="compile the model again"):
        MoEPlan.from_key(key)


def test_unknown_fields_and_values_are_refused() -> None:
    fields = json.loads(simple_plan().key)
    for path, entry in (
        (("router", "future"), 1),
        (("experts", "gate_layout"), "braided"),
        (("router", "score"), 7),
        (("experts", "activation"), "silu"),
    ):
        changed = json.loads(json.dumps(fields))
        changed[path[0]][path[1]] = entry
        with pytest.raises(PlanError):
            MoEPlan.from_key(json.dumps(changed))


@pytest.mark.parametrize("version", [0, PLAN_VERSION + 1, "1", None])
def test_other_versions_are_refused_by_number(version: object) -> None:
    fields = {**json.loads(simple_plan().key), "v": version}
    with pytest.raises(PlanError, match=f"version {version}"):
        MoEPlan.from_key(json.dumps(fields))


def test_plan_error_is_ours_and_a_value_error() -> None:
    assert issubclass(PlanError, MoeflexError)
    assert issubclass(PlanError, ValueError)


def test_plans_are_frozen_slotted_and_keyword_only() -> None:
    plan = simple_plan()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.out_dtype = "bf16"  # type: ignore[misc]
    assert not hasattr(plan, "__dict__")
    with pytest.raises(TypeError):
        RouterSpec(Score.SOFTMAX, 2)  # type: ignore[misc]


@given(experts)
def test_roles_shapes_and_counts_agree(spec: ExpertSpec) -> None:
    roles = spec.tensor_roles
    assert len(set(roles)) == len(roles)
    assert spec.num_tensors == len(roles) * (1 if spec.stacked else spec.num_experts)
    assert ("w3" in roles) == (spec.gate_layout is GateLayout.SEPARATE)
    assert ("w13" in roles) == (spec.gated and spec.gate_layout is not GateLayout.SEPARATE)
    assert any(role.startswith("b") and role != "b2" for role in roles) == spec.has_b13
    assert ("b2" in roles) == spec.has_b2
    shapes = [spec.tensor_shape(role) for role in roles]
    if spec.stacked:
        assert all(shape[0] == spec.num_experts for shape in shapes)
        shapes = [shape[1:] for shape in shapes]
    num_elements = sum(
        math.prod(shape) for role, shape in zip(roles, shapes, strict=True) if role[0] == "w"
    )
    assert num_elements == spec.num_elements_per_expert
    num_biases = sum(
        math.prod(shape) for role, shape in zip(roles, shapes, strict=True) if role[0] == "b"
    )
    wide = spec.intermediate * (2 if spec.gated else 1)
    assert num_biases == spec.has_b13 * wide + spec.has_b2 * spec.hidden


@given(experts)
def test_orientation_swaps_the_last_two_axes(spec: ExpertSpec) -> None:
    def flip(orientation: Orientation) -> Orientation:
        return Orientation.IN_OUT if orientation is Orientation.OUT_IN else Orientation.OUT_IN

    flipped = dataclasses.replace(
        spec,
        w13_orientation=flip(spec.w13_orientation),
        w2_orientation=flip(spec.w2_orientation),
    )
    for role in spec.tensor_roles:
        shape, other = spec.tensor_shape(role), flipped.tensor_shape(role)
        if role[0] == "b":
            assert shape == other
        else:
            assert shape[:-2] == other[:-2]
            assert shape[-2:] == other[-2:][::-1]


def test_w2_reads_what_w13_writes() -> None:
    spec = simple_plan().experts
    assert spec.tensor_shape("w13") == (8, 64, 64)
    assert spec.tensor_shape("w2") == (8, 64, 32)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (RouterSpec(score=Score.EXTERNAL, top_k=4), "external"),
        (
            RouterSpec(score=Score.SOFTMAX, top_k=8, normalize=Normalize.SUM),
            "softmax>top8>sum",
        ),
        (
            RouterSpec(
                score=Score.SIGMOID,
                top_k=8,
                has_bias=True,
                num_groups=8,
                top_k_groups=4,
                normalize=Normalize.SUM,
                scale=2.5,
            ),
            "sigmoid+bias>groups 4/8>top8>sum*2.5",
        ),
        (
            RouterSpec(score=Score.IDENTITY, top_k=4, normalize=Normalize.SOFTMAX),
            "identity>top4>softmax",
        ),
        (RouterSpec(score=Score.SPARSEMIXER, top_k=2, jitter_eps=0.01), "sparsemixer>top2"),
    ],
)
def test_router_kind_for_people(spec: RouterSpec, kind: str) -> None:
    assert spec.kind == kind


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (ActivationSpec(kind=ActivationKind.SILU), "silu"),
        (
            ActivationSpec(
                kind=ActivationKind.SILU,
                alpha=1.702,
                gate_max=7.0,
                up_min=-7.0,
                up_max=7.0,
                up_shift=1.0,
            ),
            "silu(alpha=1.702 gate[-inf,7] up[-7,7] up+1)",
        ),
        (ActivationSpec(kind=ActivationKind.GELU_TANH, gate_min=-2.0), "gelu_tanh(gate[-2,inf])"),
    ],
)
def test_activation_name_for_people(spec: ActivationSpec, name: str) -> None:
    assert spec.name == name


@pytest.mark.parametrize("member", [Score.SOFTMAX, GateLayout.CONCAT, ActivationKind.RELU2])
def test_names_print_as_their_text(member: Score | GateLayout | ActivationKind) -> None:
    assert str(member) == member.value
    assert f"{member}" == member.value
    assert f"{member:>12}" == member.value.rjust(12)
    assert pickle.loads(pickle.dumps(member)) is member


def test_regions_and_refusals_hash_compare_and_pickle() -> None:
    plan = simple_plan()
    proof = Proof(max_error=1e-7, num_runs=4, precision="fp64", seconds=0.1, peak_bytes=1024)
    region = MoERegion(
        name="model.layers.0.mlp",
        module_class="Block",
        router=plan.router,
        experts=plan.experts,
        num_tokens=0,
        x_dtype="bf16",
        weight_dtype="bf16",
        out_dtype="bf16",
        escaping=("logits",),
        form="grouped",
        proof=proof,
    )
    refusal = NoMatch(name="a", module_class="B", node="topk", reason="experts are unequal")
    assert region.top_k == plan.router.top_k
    for value in (proof, region, refusal):
        assert pickle.loads(pickle.dumps(value)) == value
        assert hash(dataclasses.replace(value)) == hash(value)
        assert not hasattr(value, "__dict__")
    assert dataclasses.replace(region, name="other") != region
