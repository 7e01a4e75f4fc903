"""What each family's block is, read from the models' own source code and not from our matcher."""

from __future__ import annotations

import dataclasses

from moe_compiler.ir import (
    ActivationKind,
    ActivationSpec,
    GateLayout,
    GroupScore,
    MoERegion,
    Normalize,
    Orientation,
    RouterSpec,
    Score,
    WeightPosition,
)
from tests.models import zoo

SILU = ActivationSpec(kind=ActivationKind.SILU)
RELU2 = ActivationSpec(kind=ActivationKind.RELU2)
GPT_OSS = ActivationSpec(
    kind=ActivationKind.SILU, alpha=1.702, gate_max=7.0, up_min=-7.0, up_max=7.0, up_shift=1.0
)
NEGATIVE_INFINITY = float("-inf")


@dataclasses.dataclass(frozen=True)
class Expected:
    """The facts of a block that do not depend on how it was traced.

    Attributes:
        router: the router; `score_dtype` is not compared (it is a matter of rounding).
        layout: gate and up.
        in_out: the expert tensors are [E, in, out].
        biases: the experts have biases.
        activation: the activation.
        position: where the combine weight enters.
        shared: "" | "plain" | "gated".
        hidden: H of the experts, where it is not the model's.
    """

    router: RouterSpec
    layout: GateLayout = GateLayout.CONCAT
    in_out: bool = False
    biases: bool = False
    activation: ActivationSpec = SILU
    position: WeightPosition = WeightPosition.OUTPUT
    shared: str = ""
    hidden: int = zoo.HIDDEN


def _softmax(**more: object) -> RouterSpec:
    return RouterSpec(**{"score": Score.SOFTMAX, "top_k": 2, "num_experts": 8, **more})


def _sigmoid(eps: float = 0.0, **more: object) -> RouterSpec:
    fields = {
        "score": Score.SIGMOID,
        "top_k": 2,
        "num_experts": 8,
        "has_bias": True,
        "normalize": Normalize.SUM,
        "eps": eps,
    }
    return RouterSpec(**{**fields, **more})


_SOFTMAX_SUM = _softmax(normalize=Normalize.SUM)
_TOPK_SOFTMAX = RouterSpec(
    score=Score.IDENTITY, top_k=2, num_experts=8, normalize=Normalize.SOFTMAX
)

EXPECTED: dict[str, Expected] = {
    "mixtral": Expected(_SOFTMAX_SUM),
    "qwen2_moe": Expected(_softmax(), shared="gated"),
    "qwen3_moe": Expected(_SOFTMAX_SUM),
    "qwen3_next": Expected(_SOFTMAX_SUM, shared="gated"),
    "qwen3_5_moe_text": Expected(_SOFTMAX_SUM, shared="gated"),
    "deepseek_v2": Expected(
        _softmax(
            top_k=3,
            num_groups=4,
            top_k_groups=2,
            group_score=GroupScore.MAX,
            group_fill=0.0,
            scale=1.5,
        ),
        shared="plain",
    ),
    "deepseek_v3": Expected(
        _sigmoid(
            1e-20,
            num_groups=4,
            top_k_groups=2,
            group_score=GroupScore.TOP2_SUM,
            group_fill=NEGATIVE_INFINITY,
            scale=2.5,
        ),
        shared="plain",
    ),
    "olmoe": Expected(_softmax()),
    "phimoe": Expected(
        RouterSpec(score=Score.SPARSEMIXER, top_k=2, num_experts=8, jitter_eps=0.01)
    ),
    "gpt_oss": Expected(
        _TOPK_SOFTMAX,
        layout=GateLayout.INTERLEAVED,
        in_out=True,
        biases=True,
        activation=GPT_OSS,
    ),
    "llama4_text": Expected(
        RouterSpec(score=Score.IDENTITY, top_k=1, num_experts=8, normalize=Normalize.SIGMOID),
        in_out=True,
        position=WeightPosition.INPUT,
        shared="plain",
    ),
    "glm4_moe": Expected(_sigmoid(1e-20), shared="plain"),
    "granitemoe": Expected(_TOPK_SOFTMAX),
    "jamba": Expected(_softmax()),
    "ernie4_5_moe": Expected(
        _softmax(has_bias=True, normalize=Normalize.SUM, eps=1e-12, eps_clamps=True),
        shared="plain",
    ),
    "minimax_m2": Expected(_sigmoid()),
    "lfm2_moe": Expected(_sigmoid(1e-6)),
    "hunyuan_v1_moe": Expected(_SOFTMAX_SUM, shared="plain"),
    "nemotron_h": Expected(
        _sigmoid(1e-20), layout=GateLayout.NONE, activation=RELU2, shared="plain"
    ),
    "flex_olmo": Expected(_softmax()),
}

# Families whose own code is not the experts interface and does not match; the text that must be in the reason.
UNMATCHED: dict[str, str] = {"dbrx": "graph break inside an MoE block", "jetmoe": ""}


def differences(name: str, region: MoERegion) -> list[str]:
    """What a proven region says otherwise than `EXPECTED[name]`, one line a fact; empty when nothing."""
    want = EXPECTED[name]
    experts = region.experts
    orientation = Orientation.IN_OUT if want.in_out else Orientation.OUT_IN
    pairs = [
        (
            f"router.{field.name}",
            getattr(region.router, field.name),
            getattr(want.router, field.name),
        )
        for field in dataclasses.fields(RouterSpec)
        if field.name != "score_dtype"
    ]
    if want.router.num_groups == 1:
        pairs = [p for p in pairs if p[0] not in ("router.group_score", "router.group_fill")]
    pairs += [
        ("gate_layout", experts.gate_layout, want.layout),
        ("w13_orientation", experts.w13_orientation, orientation),
        ("w2_orientation", experts.w2_orientation, orientation),
        ("has_b13", experts.has_b13, want.biases),
        ("has_b2", experts.has_b2, want.biases),
        ("weight_position", experts.weight_position, want.position),
        ("num_experts", experts.num_experts, zoo.NUM_EXPERTS),
        ("hidden", experts.hidden, want.hidden),
        ("intermediate", experts.intermediate, zoo.INTERMEDIATE),
        ("shared_expert", region.shared_expert, want.shared),
    ]
    found = [
        f"{fact}: {got} instead of {wanted}"
        for fact, got, wanted in pairs
        if not _same(got, wanted)
    ]
    for field in dataclasses.fields(ActivationSpec):
        got, wanted = getattr(experts.activation, field.name), getattr(want.activation, field.name)
        if not _same(got, wanted):
            found.append(f"activation.{field.name}: {got} instead of {wanted}")
    return found


def _same(got: object, wanted: object) -> bool:
    if isinstance(got, float) and isinstance(wanted, float) and got != wanted:
        return abs(got - wanted) <= 1e-3 * abs(wanted)
    return got == wanted
