"""Routers and layers on which the Triton kernels are tested."""

from __future__ import annotations

import dataclasses

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

DEEPSEEK_V3 = RouterSpec(
    score=Score.SIGMOID,
    top_k=8,
    num_experts=256,
    has_bias=True,
    num_groups=8,
    top_k_groups=4,
    group_score=GroupScore.TOP2_SUM,
    normalize=Normalize.SUM,
    eps=1e-20,
    scale=2.5,
)
ROUTERS = {
    "qwen3": RouterSpec(score=Score.SOFTMAX, top_k=8, num_experts=128, normalize=Normalize.SUM),
    "olmoe": RouterSpec(score=Score.SOFTMAX, top_k=8, num_experts=64),
    "mixtral": RouterSpec(
        score=Score.IDENTITY, top_k=2, num_experts=8, normalize=Normalize.SOFTMAX
    ),
    "gpt-oss": RouterSpec(
        score=Score.IDENTITY, top_k=4, num_experts=32, normalize=Normalize.SOFTMAX, score_dtype=""
    ),
    "logits-bias": RouterSpec(
        score=Score.IDENTITY,
        top_k=4,
        num_experts=33,
        has_bias=True,
        normalize=Normalize.SIGMOID_SUM,
    ),
    "llama4": RouterSpec(
        score=Score.IDENTITY, top_k=1, num_experts=16, normalize=Normalize.SIGMOID, score_dtype=""
    ),
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3-zero-fill": dataclasses.replace(DEEPSEEK_V3, top_k=6, group_fill=0.0),
    "deepseek-v2": RouterSpec(
        score=Score.SOFTMAX,
        top_k=6,
        num_experts=160,
        num_groups=8,
        top_k_groups=3,
        scale=16.0,
    ),
    "odd-groups": RouterSpec(
        score=Score.SIGMOID,
        top_k=3,
        num_experts=15,
        num_groups=3,
        top_k_groups=2,
        group_fill=float("-inf"),
        normalize=Normalize.SUM,
    ),
    "clamped-sum": RouterSpec(
        score=Score.SIGMOID,
        top_k=5,
        num_experts=72,
        normalize=Normalize.SUM,
        eps=2.5,
        eps_clamps=True,
    ),
    "sqrtsoftplus": RouterSpec(
        score=Score.SQRTSOFTPLUS, top_k=6, num_experts=64, has_bias=True, normalize=Normalize.SUM
    ),
    "sparsemixer": RouterSpec(score=Score.SPARSEMIXER, top_k=2, num_experts=16, jitter_eps=0.01),
    "sparsemixer-wide": RouterSpec(
        score=Score.SPARSEMIXER, top_k=4, num_experts=20, jitter_eps=0.3
    ),
    "largest": RouterSpec(score=Score.SOFTMAX, top_k=32, num_experts=512, normalize=Normalize.SUM),
    "all-experts": RouterSpec(score=Score.SOFTMAX, top_k=5, num_experts=5),
}

SILU = ActivationSpec(kind=ActivationKind.SILU)
GPT_OSS = ActivationSpec(
    kind=ActivationKind.SILU, alpha=1.702, gate_max=7.0, up_min=-7.0, up_max=7.0, up_shift=1.0
)
KN, NK = Orientation.IN_OUT, Orientation.OUT_IN


@dataclasses.dataclass(frozen=True)
class LayerCase:
    experts: int = 8
    top_k: int = 2
    hidden: int = 48
    intermediate: int = 40
    layout: GateLayout = GateLayout.CONCAT
    w13: Orientation = NK
    w2: Orientation = NK
    activation: ActivationSpec = SILU
    b13: bool = False
    b2: bool = False
    position: WeightPosition = WeightPosition.OUTPUT
    dtype: str = "bf16"
    out_dtype: str = ""
    weight_dtype: str = "fp32"
    index_dtype: str = "int64"
    round_gemms: bool = False

    @property
    def plan(self) -> MoEPlan:
        return MoEPlan(
            router=RouterSpec(score=Score.EXTERNAL, top_k=self.top_k, num_experts=self.experts),
            experts=ExpertSpec(
                num_experts=self.experts,
                hidden=self.hidden,
                intermediate=self.intermediate,
                gate_layout=self.layout,
                w13_orientation=self.w13,
                w2_orientation=self.w2,
                has_b13=self.b13,
                has_b2=self.b2,
                activation=self.activation,
                weight_position=self.position,
            ),
            out_dtype=self.out_dtype,
            round_gemms=self.round_gemms,
        )


def _act(kind: ActivationKind) -> ActivationSpec:
    return ActivationSpec(kind=kind)


# Small enough for the interpreter, with sizes that no tile divides.
SMALL_LAYERS = {
    "plain": LayerCase(),
    "fp32": LayerCase(dtype="fp32", b13=True, b2=True),
    "fp16": LayerCase(dtype="fp16", weight_dtype="fp16", index_dtype="int32"),
    "mn-major": LayerCase(w13=KN, w2=KN),
    "mn-major-first": LayerCase(w13=KN, intermediate=72),
    "mn-major-second": LayerCase(w2=KN, hidden=33),
    "up-first": LayerCase(layout=GateLayout.CONCAT_UP_FIRST, out_dtype="fp32", b13=True),
    "interleaved": LayerCase(layout=GateLayout.INTERLEAVED, b13=True, intermediate=35),
    "interleaved-up-first": LayerCase(layout=GateLayout.INTERLEAVED_UP_FIRST, b13=True),
    "gpt-oss-small": LayerCase(
        6, 3, 90, 90, GateLayout.INTERLEAVED, KN, KN, GPT_OSS, True, True, weight_dtype="bf16"
    ),
    "separate": LayerCase(layout=GateLayout.SEPARATE, b13=True, b2=True),
    "llama4": LayerCase(
        top_k=1, w13=KN, w2=KN, position=WeightPosition.INPUT, b13=True, weight_dtype="bf16"
    ),
    "hidden-weight": LayerCase(b2=True, position=WeightPosition.HIDDEN),
    "rounded": LayerCase(b13=True, b2=True, round_gemms=True, out_dtype="fp32"),
    "not-gated": LayerCase(layout=GateLayout.NONE, activation=_act(ActivationKind.RELU2), b13=True),
    "not-gated-gelu": LayerCase(
        layout=GateLayout.NONE, activation=_act(ActivationKind.GELU), w13=KN
    ),
    **{
        f"act-{kind.value}": LayerCase(activation=_act(kind))
        for kind in (
            ActivationKind.GELU,
            ActivationKind.GELU_TANH,
            ActivationKind.RELU,
            ActivationKind.SIGMOID,
            ActivationKind.IDENTITY,
        )
    },
}
LAYERS = {
    **SMALL_LAYERS,
    "qwen3-30b": LayerCase(128, 8, 2048, 768),
    "gpt-oss": LayerCase(
        32, 4, 2880, 2880, GateLayout.INTERLEAVED, KN, KN, GPT_OSS, True, True, weight_dtype="bf16"
    ),
    "llama4-large": LayerCase(
        16, 1, 640, 512, w13=KN, w2=KN, position=WeightPosition.INPUT, weight_dtype="bf16"
    ),
    "separate-1408": LayerCase(16, 2, 520, 1408, layout=GateLayout.SEPARATE, b13=True, b2=True),
    "fp32-large": LayerCase(16, 2, 256, 320, dtype="fp32"),
    "relu2-plain": LayerCase(
        16, 2, 256, 320, GateLayout.NONE, activation=_act(ActivationKind.RELU2), b13=True
    ),
    "many-experts": LayerCase(512, 10, 256, 64),
    "i192": LayerCase(128, 8, 4096, 192),
}
