"""The reference against formulas written independently of it, one number at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_compiler import reference
from moe_compiler.errors import PlanError
from moe_compiler.ir import (
    ActivationKind,
    ActivationSpec,
    ExpertSpec,
    GateLayout,
    GroupScore,
    MoEPlan,
    Normalize,
    Orientation,
    RouterSpec,
    Score,
    WeightPosition,
)
from tests.tolerances import assert_close_to_eager, relative_error

T, H, E, K = 5, 4, 6, 2
INTERMEDIATE = 3
INF = math.inf
EXTERNAL = RouterSpec(score=Score.EXTERNAL, top_k=K, num_experts=E)
SILU = ActivationSpec(kind=ActivationKind.SILU)


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def softmax(row: list[float]) -> list[float]:
    powers = [math.exp(z - max(row)) for z in row]
    return [p / sum(powers) for p in powers]


def best(row: list[float], count: int) -> list[int]:
    return sorted(range(len(row)), key=lambda i: -row[i])[:count]


def score_row(score: Score, row: list[float]) -> list[float]:
    each: dict[Score, Callable[[float], float]] = {
        Score.IDENTITY: lambda z: z,
        Score.SIGMOID: sigmoid,
        Score.SQRTSOFTPLUS: lambda z: math.sqrt(math.log1p(math.exp(z))),
    }
    return softmax(row) if score is Score.SOFTMAX else [each[score](z) for z in row]


def eligible(spec: RouterSpec, choice: list[float]) -> list[float]:
    size = len(choice) // spec.num_groups
    groups = [choice[g * size : (g + 1) * size] for g in range(spec.num_groups)]
    if spec.group_score is GroupScore.MAX:
        worth = [max(group) for group in groups]
    else:
        worth = [sum(sorted(group)[-2:]) for group in groups]
    kept = best(worth, spec.top_k_groups)
    return [z if i // size in kept else spec.group_fill for i, z in enumerate(choice)]


def normalize_row(spec: RouterSpec, weights: list[float]) -> list[float]:
    if spec.normalize is Normalize.SOFTMAX:
        weights = softmax(weights)
    if spec.normalize in (Normalize.SIGMOID, Normalize.SIGMOID_SUM):
        weights = [sigmoid(w) for w in weights]
    if spec.normalize in (Normalize.SUM, Normalize.SIGMOID_SUM):
        total = sum(weights)
        total = max(total, spec.eps) if spec.eps_clamps else total + spec.eps
        weights = [w / total for w in weights]
    return [w * spec.scale for w in weights]


def route_row(
    spec: RouterSpec, row: list[float], bias: list[float]
) -> tuple[list[int], list[float]]:
    scores = score_row(spec.score, row)
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    if spec.num_groups > 1:
        choice = eligible(spec, choice)
    ids = best(choice, spec.top_k)
    return ids, normalize_row(spec, [scores[i] for i in ids])


ROUTERS = {
    "softmax": RouterSpec(score=Score.SOFTMAX, top_k=K),
    "softmax_sum": RouterSpec(score=Score.SOFTMAX, top_k=3, normalize=Normalize.SUM),
    "softmax_scale": RouterSpec(score=Score.SOFTMAX, top_k=K, scale=16.0),
    "topk_softmax": RouterSpec(score=Score.IDENTITY, top_k=4, normalize=Normalize.SOFTMAX),
    "top1_sigmoid": RouterSpec(score=Score.IDENTITY, top_k=1, normalize=Normalize.SIGMOID),
    "topk_sigmoid_sum": RouterSpec(
        score=Score.IDENTITY, top_k=3, normalize=Normalize.SIGMOID_SUM, eps=1e-3
    ),
    "sigmoid_bias_sum_eps": RouterSpec(
        score=Score.SIGMOID, top_k=3, has_bias=True, normalize=Normalize.SUM, eps=0.25
    ),
    "sigmoid_sum_clamped": RouterSpec(
        score=Score.SIGMOID, top_k=K, normalize=Normalize.SUM, eps=1.9, eps_clamps=True
    ),
    "groups_top2_sum": RouterSpec(
        score=Score.SIGMOID,
        top_k=3,
        has_bias=True,
        num_groups=4,
        top_k_groups=2,
        group_score=GroupScore.TOP2_SUM,
        normalize=Normalize.SUM,
        scale=2.5,
    ),
    "groups_max": RouterSpec(
        score=Score.SOFTMAX, top_k=4, num_groups=4, top_k_groups=2, group_fill=-INF, scale=3.0
    ),
    "groups_of_one": RouterSpec(
        score=Score.SOFTMAX, top_k=3, num_groups=8, top_k_groups=3, group_fill=-INF
    ),
    "all_groups": RouterSpec(
        score=Score.SIGMOID, top_k=3, num_groups=2, top_k_groups=2, group_score=GroupScore.MAX
    ),
    "sqrtsoftplus": RouterSpec(
        score=Score.SQRTSOFTPLUS, top_k=K, has_bias=True, normalize=Normalize.SUM
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("seed", range(3))
def test_route_agrees_with_one_row_at_a_time(name: str, seed: int) -> None:
    spec = ROUTERS[name]
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(9, 8, generator=generator, dtype=torch.float64) * 2
    # Never negative: a score below `group_fill` would tie with the experts of a lost group.
    bias = torch.rand(8, generator=generator, dtype=torch.float64) * spec.has_bias
    ids, weights = reference.route(spec, logits, bias if spec.has_bias else None)
    assert ids.dtype is torch.int64
    for t in range(9):
        want_ids, want_weights = route_row(spec, logits[t].tolist(), bias.tolist())
        assert ids[t].tolist() == want_ids
        assert weights[t].tolist() == pytest.approx(want_weights, rel=1e-12)


def sparsemixer_row(row: list[float], jitter: float, top_k: int) -> tuple[list[int], list[float]]:
    """Keep those within a relative distance of the best left; soft-max over them."""
    left, ids, weights = set(range(len(row))), [], []
    for _ in range(top_k):
        winner = max(left, key=lambda i: row[i])
        near = [
            i for i in left if (row[winner] - row[i]) / max(abs(row[i]), row[winner]) <= 2 * jitter
        ]
        ids.append(winner)
        weights.append(math.exp(row[winner]) / sum(math.exp(row[i]) for i in near))
        left.remove(winner)
    return ids, weights


@pytest.mark.parametrize("jitter", [0.01, 0.2, 0.5])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_sparsemixer_agrees_with_one_row_at_a_time(jitter: float, top_k: int) -> None:
    spec = RouterSpec(score=Score.SPARSEMIXER, top_k=top_k, jitter_eps=jitter)
    logits = torch.randn(12, 8, dtype=torch.float64)
    ids, weights = reference.route(spec, logits)
    for t in range(12):
        want_ids, want_weights = sparsemixer_row(logits[t].tolist(), jitter, top_k)
        assert ids[t].tolist() == want_ids
        assert weights[t].tolist() == pytest.approx(want_weights, rel=1e-12)


def test_scores_are_computed_in_the_score_dtype() -> None:
    logits = torch.randn(4, 8).bfloat16()
    for score_dtype, want in (("fp32", torch.float32), ("", torch.bfloat16)):
        spec = RouterSpec(score=Score.SOFTMAX, top_k=2, score_dtype=score_dtype)
        assert reference.route(spec, logits)[1].dtype is want
    spec = RouterSpec(score=Score.SOFTMAX, top_k=2)
    assert reference.route(spec, logits.double())[1].dtype is torch.float64


def test_missing_bias_and_external_router_are_refused() -> None:
    logits = torch.zeros(1, E)
    with pytest.raises(PlanError, match="bias"):
        reference.route(RouterSpec(score=Score.SIGMOID, top_k=1, has_bias=True), logits)
    with pytest.raises(PlanError, match="external"):
        reference.route(EXTERNAL, logits)


FUNCTIONS: dict[ActivationKind, Callable[[float], float]] = {
    ActivationKind.SILU: lambda z: z * sigmoid(z),
    ActivationKind.GELU: lambda z: 0.5 * z * (1 + math.erf(z / math.sqrt(2))),
    ActivationKind.GELU_TANH: lambda z: (
        0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    ),
    ActivationKind.RELU: lambda z: max(z, 0.0),
    ActivationKind.RELU2: lambda z: max(z, 0.0) ** 2,
    ActivationKind.SIGMOID: sigmoid,
    ActivationKind.IDENTITY: lambda z: z,
}


def activate_number(spec: ActivationSpec, gate: float, up: float | None) -> float:
    gate = min(max(gate, spec.gate_min), spec.gate_max)
    if spec.kind is ActivationKind.SILU:
        value = gate * sigmoid(spec.alpha * gate)
    else:
        value = FUNCTIONS[spec.kind](gate)
    if up is None:
        return value
    return value * (min(max(up, spec.up_min), spec.up_max) + spec.up_shift)


@pytest.mark.parametrize("kind", ActivationKind)
@pytest.mark.parametrize("limits", [{}, {"gate_max": 0.5, "up_min": -0.3, "up_max": 0.4}])
def test_activation_agrees_with_one_number_at_a_time(
    kind: ActivationKind, limits: dict[str, float]
) -> None:
    alpha = 1.702 if kind is ActivationKind.SILU and limits else 1.0
    spec = ActivationSpec(kind=kind, alpha=alpha, up_shift=0.75, **limits)
    gate, up = torch.randn(2, 20, dtype=torch.float64) * 2
    got = reference.activate(spec, gate, up).tolist()
    want = [activate_number(spec, g, u) for g, u in zip(gate.tolist(), up.tolist(), strict=True)]
    assert got == pytest.approx(want, rel=1e-12)
    alone = reference.activate(spec, gate, None).tolist()
    assert alone == pytest.approx([activate_number(spec, g, None) for g in gate.tolist()])


def random_tensors(spec: ExpertSpec, seed: int = 0) -> list[Tensor]:
    """Expert tensors in the order of the roles, fp64."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for role in spec.tensor_roles:
        for _ in range(1 if spec.stacked else spec.num_experts):
            shape = spec.tensor_shape(role)
            tensors.append(torch.randn(shape, generator=generator, dtype=torch.float64) * 0.7)
    return tensors


def entry(spec: ExpertSpec, tensors: list[Tensor], role: str, expert: int) -> list:
    """One expert's tensor as nested lists, `[out][in]`."""
    place = spec.tensor_roles.index(role)
    tensor = tensors[place][expert] if spec.stacked else tensors[place * spec.num_experts + expert]
    orientation = spec.w2_orientation if role == "w2" else spec.w13_orientation
    flip = role[0] == "w" and orientation is Orientation.IN_OUT
    return (tensor.t() if flip else tensor).tolist()


def dot(row: list[float], column: list[float]) -> float:
    return sum(a * b for a, b in zip(row, column, strict=True))


def project_row(
    spec: ExpertSpec, tensors: list[Tensor], expert: int, x: list[float]
) -> list[tuple[float, float | None]]:
    """(gate, up) for each of the I channels."""
    layout, width = spec.gate_layout, spec.intermediate

    def rows(role: str) -> list[float]:
        z = [dot(w, x) for w in entry(spec, tensors, role, expert)]
        if not spec.has_b13:
            return z
        bias = entry(spec, tensors, "b" + role[1:], expert)
        return [a + b for a, b in zip(z, bias, strict=True)]

    if layout is GateLayout.NONE:
        return [(z, None) for z in rows("w1")]
    if layout is GateLayout.SEPARATE:
        return list(zip(rows("w1"), rows("w3"), strict=True))
    z = rows("w13")
    where = {
        GateLayout.CONCAT: lambda i: (i, width + i),
        GateLayout.CONCAT_UP_FIRST: lambda i: (width + i, i),
        GateLayout.INTERLEAVED: lambda i: (2 * i, 2 * i + 1),
        GateLayout.INTERLEAVED_UP_FIRST: lambda i: (2 * i + 1, 2 * i),
    }[layout]
    return [(z[where(i)[0]], z[where(i)[1]]) for i in range(width)]


def expert_row(
    spec: ExpertSpec, tensors: list[Tensor], expert: int, x: list[float], w: float
) -> list[float]:
    position = spec.weight_position
    if position is WeightPosition.INPUT:
        x = [v * w for v in x]
    pairs = project_row(spec, tensors, expert, x)
    hidden = [activate_number(spec.activation, g, u) for g, u in pairs]
    if position is WeightPosition.HIDDEN:
        hidden = [v * w for v in hidden]
    y = [dot(row, hidden) for row in entry(spec, tensors, "w2", expert)]
    if spec.has_b2:
        y = [a + b for a, b in zip(y, entry(spec, tensors, "b2", expert), strict=True)]
    return [v * w for v in y] if position is WeightPosition.OUTPUT else y


expert_specs = st.builds(
    ExpertSpec,
    num_experts=st.just(E),
    hidden=st.just(H),
    intermediate=st.just(INTERMEDIATE),
    gate_layout=st.sampled_from(GateLayout),
    w13_orientation=st.sampled_from(Orientation),
    w2_orientation=st.sampled_from(Orientation),
    stacked=st.booleans(),
    has_b13=st.booleans(),
    has_b2=st.booleans(),
    activation=st.builds(
        ActivationSpec,
        kind=st.sampled_from(ActivationKind),
        gate_max=st.sampled_from([INF, 0.5]),
        up_min=st.sampled_from([-INF, -0.5]),
        up_shift=st.sampled_from([0.0, 1.0]),
    ),
    weight_position=st.sampled_from(WeightPosition),
)


@settings(max_examples=80, deadline=None)
@given(expert_specs, st.integers(0, 1000))
def test_layer_agrees_with_one_row_at_a_time(spec: ExpertSpec, seed: int) -> None:
    tensors = random_tensors(spec, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, H, generator=generator, dtype=torch.float64)
    # -1 and E are routes to nobody.
    ids = torch.randint(-1, E + 1, (T, K), generator=generator)
    weights = torch.randn(T, K, generator=generator, dtype=torch.float64)
    plan = MoEPlan(router=EXTERNAL, experts=spec)
    got = reference.moe_layer(plan, x, [ids, weights], tensors)
    want = [[0.0] * H for _ in range(T)]
    for t, k in itertools.product(range(T), range(K)):
        if 0 <= (expert := int(ids[t, k])) < E:
            y = expert_row(spec, tensors, expert, x[t].tolist(), float(weights[t, k]))
            want[t] = [a + b for a, b in zip(want[t], y, strict=True)]
    assert_close_to_eager(got, torch.tensor(want, dtype=torch.float64))


def plain_experts(**changes: object) -> ExpertSpec:
    fields = {
        "num_experts": E,
        "hidden": H,
        "intermediate": INTERMEDIATE,
        "gate_layout": GateLayout.CONCAT,
        "activation": SILU,
    }
    return ExpertSpec(**{**fields, **changes})


def test_leading_axes_are_flattened_and_ids_may_be_narrow() -> None:
    spec = plain_experts()
    plan, tensors = MoEPlan(router=EXTERNAL, experts=spec), random_tensors(spec)
    x, weights = torch.randn(2, 3, H).double(), torch.rand(2, 3, K).double()
    ids = torch.randint(0, E, (2, 3, K))
    flat = reference.moe_layer(plan, x.view(6, H), [ids.view(6, K), weights.view(6, K)], tensors)
    assert flat.shape == (6, H)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        assert torch.equal(reference.moe_layer(plan, x, [ids.to(dtype), weights], tensors), flat)


@pytest.mark.parametrize("out_dtype", ["", "bf16", "fp16", "fp32", "fp64"])
def test_out_dtype(out_dtype: str) -> None:
    spec = plain_experts()
    plan = MoEPlan(router=EXTERNAL, experts=spec, out_dtype=out_dtype)
    tensors = [t.bfloat16() for t in random_tensors(spec)]
    routing = [torch.randint(0, E, (T, K)), torch.rand(T, K)]
    y = reference.moe_layer(plan, torch.randn(T, H).bfloat16(), routing, tensors)
    assert y.dtype is reference.DTYPES[out_dtype or "bf16"]


@pytest.mark.parametrize("name", [*ROUTERS, "sparsemixer"])
def test_no_tokens(name: str) -> None:
    spec = plain_experts(num_experts=8)
    sparsemixer = RouterSpec(score=Score.SPARSEMIXER, top_k=2, jitter_eps=0.01)
    router = ROUTERS.get(name, sparsemixer)
    routing = [torch.zeros(0, 8)] + [torch.zeros(8)] * router.has_bias
    plan = MoEPlan(router=router, experts=spec)
    y = reference.moe_layer(
        plan, torch.zeros(0, H), routing, [t.float() for t in random_tensors(spec)]
    )
    assert y.shape == (0, H)


def test_rounded_gemms_keep_sums_and_weights_wide() -> None:
    """`round_gemms`: only operands and results of the matmuls are rounded to the expert dtype."""
    spec = plain_experts()
    tensors = [t.bfloat16() for t in random_tensors(spec)]
    x, ids = torch.randn(T, H), torch.randint(0, E, (T, K))
    weights = torch.rand(T, K)
    plan = MoEPlan(router=EXTERNAL, experts=spec, round_gemms=True)
    y = reference.moe_layer(plan, x, [ids, weights], tensors)
    assert y.dtype is torch.float32
    want = torch.zeros(T, H)
    for t, k in itertools.product(range(T), range(K)):
        w13, w2 = (tensor[ids[t, k]].float() for tensor in tensors)
        gate, up = (w13 @ x[t].bfloat16().float()).bfloat16().float().chunk(2)
        hidden = (torch.nn.functional.silu(gate) * up).bfloat16().float()
        want[t] += weights[t, k] * (w2 @ hidden).bfloat16().float()
    # One differently rounded product is one unit of bf16.
    assert relative_error(y, want) < 8e-3


def test_sums_over_k_are_wide() -> None:
    """64 equal bf16 parts: a bf16 running sum would stop growing at 256 times one part's ulp."""
    spec = plain_experts(
        num_experts=1,
        hidden=1,
        intermediate=1,
        gate_layout=GateLayout.NONE,
        activation=ActivationSpec(kind=ActivationKind.IDENTITY),
    )
    router = RouterSpec(score=Score.EXTERNAL, top_k=600, num_experts=1)
    plan = MoEPlan(router=router, experts=spec, out_dtype="fp32")
    one = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    routing = [torch.zeros(1, 600, dtype=torch.int64), torch.ones(1, 600)]
    y = reference.moe_layer(plan, one[0], routing, [one, one])
    assert y.item() == 600.0


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("layout", [GateLayout.CONCAT, GateLayout.SEPARATE, GateLayout.NONE])
@pytest.mark.parametrize("position", WeightPosition)
def test_gradients(stacked: bool, layout: GateLayout, position: WeightPosition) -> None:
    spec = plain_experts(
        num_experts=3,
        stacked=stacked,
        gate_layout=layout,
        weight_position=position,
        has_b13=True,
        has_b2=True,
    )
    router = RouterSpec(score=Score.SOFTMAX, top_k=2, normalize=Normalize.SUM)
    plan = MoEPlan(router=router, experts=spec)
    x = torch.randn(3, H, dtype=torch.float64, requires_grad=True)
    logits = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    tensors = [t.requires_grad_() for t in random_tensors(spec)]

    def layer(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
        return reference.moe_layer(plan, x, [logits], tensors)

    assert torch.autograd.gradcheck(layer, (x, logits, *tensors))


def test_top1_softmax_after_topk_has_no_router_gradient() -> None:
    spec = plain_experts()
    tensors = random_tensors(spec)
    x = torch.randn(T, H, dtype=torch.float64)
    for router, has_gradient in (
        (RouterSpec(score=Score.IDENTITY, top_k=1, normalize=Normalize.SOFTMAX), False),
        (RouterSpec(score=Score.SOFTMAX, top_k=1), True),
    ):
        logits = torch.randn(T, E, dtype=torch.float64, requires_grad=True)
        plan = MoEPlan(router=router, experts=spec)
        reference.moe_layer(plan, x, [logits], tensors).square().sum().backward()
        assert bool(logits.grad.abs().max() > 1e-12) == has_gradient


# Hugging Face blocks: family -> (router, changes to the experts, names of the expert tensors).
STACKED = ("experts.gate_up_proj", "experts.down_proj")
BLOCKS: dict[str, tuple[RouterSpec, dict[str, object], tuple[str, ...]]] = {
    "mixtral": (
        RouterSpec(score=Score.SOFTMAX, top_k=2, normalize=Normalize.SUM),
        {},
        STACKED,
    ),
    "olmoe": (RouterSpec(score=Score.SOFTMAX, top_k=2), {}, STACKED),
    "qwen3_moe": (
        RouterSpec(score=Score.SOFTMAX, top_k=2, normalize=Normalize.SUM),
        {},
        STACKED,
    ),
    "granitemoe": (
        RouterSpec(score=Score.IDENTITY, top_k=2, normalize=Normalize.SOFTMAX),
        {},
        STACKED,
    ),
    "phimoe": (
        RouterSpec(score=Score.SPARSEMIXER, top_k=2, jitter_eps=0.01),
        {},
        STACKED,
    ),
    "gpt_oss": (
        RouterSpec(score=Score.IDENTITY, top_k=2, normalize=Normalize.SOFTMAX),
        {
            "gate_layout": GateLayout.INTERLEAVED,
            "w13_orientation": Orientation.IN_OUT,
            "w2_orientation": Orientation.IN_OUT,
            "has_b13": True,
            "has_b2": True,
            "activation": ActivationSpec(
                kind=ActivationKind.SILU,
                alpha=1.702,
                gate_max=7.0,
                up_min=-7.0,
                up_max=7.0,
                up_shift=1.0,
            ),
        },
        (
            "experts.gate_up_proj",
            "experts.gate_up_proj_bias",
            "experts.down_proj",
            "experts.down_proj_bias",
        ),
    ),
    "llama4_text": (
        RouterSpec(score=Score.IDENTITY, top_k=1, normalize=Normalize.SIGMOID),
        {
            "w13_orientation": Orientation.IN_OUT,
            "w2_orientation": Orientation.IN_OUT,
            "weight_position": WeightPosition.INPUT,
        },
        STACKED,
    ),
    "minimax_m2": (
        RouterSpec(score=Score.SIGMOID, top_k=2, has_bias=True, normalize=Normalize.SUM),
        {},
        STACKED,
    ),
}


@pytest.mark.parametrize("family", BLOCKS)
def test_hugging_face_blocks(family: str) -> None:
    pytest.importorskip("transformers")
    from tests.models import zoo

    known = zoo.FAMILIES[family]
    model = zoo.build(family, "eager", dtype=torch.float64)
    block = model.get_submodule(known.blocks[0])
    router, changes, names = BLOCKS[family]
    tensors = dict([*block.named_parameters(), *block.named_buffers()])
    spec = ExpertSpec(
        **{
            "num_experts": zoo.NUM_EXPERTS,
            "hidden": zoo.HIDDEN,
            "intermediate": zoo.INTERMEDIATE,
            "gate_layout": GateLayout.CONCAT,
            "activation": SILU,
            **changes,
        }
    )
    gate = "router" if "router.weight" in tensors else "gate"
    x = torch.randn(1, 23, zoo.HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        want = block(x)
        want = (want[0] if isinstance(want, tuple) else want).reshape(-1, zoo.HIDDEN)
        if family == "llama4_text":
            want = want - block.shared_expert(x[0])
        logits = torch.nn.functional.linear(
            x[0], tensors[f"{gate}.weight"], tensors.get(f"{gate}.bias")
        )
        routing = [logits, tensors["e_score_correction_bias"]] if router.has_bias else [logits]
        plan = MoEPlan(router=router, experts=spec)
        got = reference.moe_layer(plan, x[0], routing, [tensors[name] for name in names])
    # Some blocks compute their router in fp32 whatever the dtype of the model.
    assert relative_error(got, want) < 1e-6
