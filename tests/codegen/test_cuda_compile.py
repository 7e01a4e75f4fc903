"""Every configuration that `choose_config` can choose compiles for sm_90a and passes the build
rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from moe_compiler.codegen.cuda import CudaConfig, choose_config, render
from moe_compiler.ir import (
    ActivationKind,
    ActivationSpec,
    ExpertSpec,
    GateLayout,
    MoEPlan,
    Orientation,
    RouterSpec,
    Score,
    WeightPosition,
)
from moe_compiler.runtime.cuda_build import build, find_nvcc, find_nvrtc, read_template

pytestmark = pytest.mark.skipif(
    find_nvcc() is None and find_nvrtc() is None,
    reason="needs nvcc or NVRTC to compile; no GPU is needed",
)

SILU = ActivationSpec(kind=ActivationKind.SILU)
# E, K, H, I of the shapes of the design, and sizes that no tile divides.
SHAPES = [
    (128, 8, 2048, 768),
    (256, 8, 2048, 512),
    (64, 6, 2048, 1408),
    (16, 2, 4096, 6400),
    (160, 6, 5120, 1536),
    (256, 8, 7168, 2048),
    (128, 8, 4096, 192),
    (32, 4, 2880, 2880),
    (60, 4, 2048, 704),
    (8, 2, 1024, 352),
]
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 32768)
IN_OUT = Orientation.IN_OUT


def make_plan(shape: tuple[int, int, int, int], **experts: object) -> MoEPlan:
    num_experts, top_k, hidden, intermediate = shape
    fields = {"gate_layout": GateLayout.CONCAT, "activation": SILU, **experts}
    spec = ExpertSpec(
        num_experts=num_experts,
        hidden=hidden,
        intermediate=intermediate,
        **fields,  # type: ignore[arg-type]
    )
    router = RouterSpec(score=Score.EXTERNAL, top_k=top_k, num_experts=num_experts)
    return MoEPlan(router=router, experts=spec)


def check(config: CudaConfig) -> None:
    source = render(config, read_template())
    binary = build(config.name, source, entry=config.entry, allow_stack=config.watchdog)
    assert binary.resources.num_registers <= 65536 // config.num_threads


def test_the_shapes_of_the_design() -> None:
    configs = {
        choose_config(make_plan(shape), tokens, dtype): None
        for shape in SHAPES
        for tokens in TOKENS
        for dtype in ("bf16", "fp16")
    }
    assert len(configs) >= 12
    for config in configs:
        check(config)


GPT_OSS = ActivationSpec(
    kind=ActivationKind.SILU, alpha=1.702, gate_max=7.0, up_min=-7.0, up_max=7.0, up_shift=1.0
)
KINDS = {
    "mn-major": {"w13_orientation": IN_OUT, "w2_orientation": IN_OUT},
    "mn-major-first": {"w13_orientation": IN_OUT, "has_b13": True},
    "mn-major-second": {"w2_orientation": IN_OUT, "has_b2": True},
    "gpt-oss": {
        "gate_layout": GateLayout.INTERLEAVED,
        "w13_orientation": IN_OUT,
        "w2_orientation": IN_OUT,
        "activation": GPT_OSS,
        "has_b13": True,
        "has_b2": True,
    },
    "interleaved": {"gate_layout": GateLayout.INTERLEAVED, "has_b13": True},
    "separate": {"gate_layout": GateLayout.SEPARATE, "has_b13": True, "has_b2": True},
    "llama4": {
        "w13_orientation": IN_OUT,
        "w2_orientation": IN_OUT,
        "weight_position": WeightPosition.INPUT,
    },
    "hidden-weight": {"weight_position": WeightPosition.HIDDEN, "has_b2": True},
    "plain-relu2": {
        "gate_layout": GateLayout.NONE,
        "activation": ActivationSpec(kind=ActivationKind.RELU2),
        "has_b13": True,
    },
    "plain-mn-gelu": {
        "gate_layout": GateLayout.NONE,
        "w13_orientation": IN_OUT,
        "w2_orientation": IN_OUT,
        "activation": ActivationSpec(kind=ActivationKind.GELU),
        "has_b13": True,
        "has_b2": True,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_kinds_of_experts(kind: str) -> None:
    plan = make_plan((32, 4, 2880, 704), **KINDS[kind])
    for tokens in (1, 256, 1024, 8192):
        check(choose_config(plan, tokens, "bf16"))


def _activations() -> Iterator[ActivationSpec]:
    for kind in ActivationKind:
        yield ActivationSpec(kind=kind)


@pytest.mark.slow
@pytest.mark.parametrize("activation", list(_activations()), ids=lambda spec: spec.kind)
def test_activations_with_everything_at_once(activation: ActivationSpec) -> None:
    for w13 in Orientation:
        for w2 in Orientation:
            for layout in (GateLayout.CONCAT, GateLayout.INTERLEAVED, GateLayout.NONE):
                plan = make_plan(
                    (16, 4, 512, 352),
                    activation=dataclasses.replace(activation, gate_max=7.0),
                    gate_layout=layout,
                    w13_orientation=w13,
                    w2_orientation=w2,
                    has_b13=True,
                    has_b2=True,
                    weight_position=WeightPosition.HIDDEN,
                )
                for tokens in (64, 4096):
                    check(choose_config(plan, tokens, "fp16"))


def test_watchdog_build_compiles() -> None:
    for tokens in (16, 4096):
        check(choose_config(make_plan(SHAPES[0]), tokens, "bf16", watchdog=True))
