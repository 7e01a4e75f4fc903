"""The sm_90a layer kernels against the reference, on a Hopper GPU."""

from __future__ import annotations

import dataclasses
import functools
import os

import pytest
import torch
from torch import Tensor

from moe_compiler import reference
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
from moe_compiler.runtime.cuda_build import build, read_template
from moe_compiler.runtime.cuda_driver import Kernel
from moe_compiler.runtime.cuda_launch import CudaLayer
from tests.tolerances import assert_close_to_fp32

pytestmark = pytest.mark.gpu

SILU = ActivationSpec(kind=ActivationKind.SILU)
GPT_OSS = ActivationSpec(
    kind=ActivationKind.SILU, alpha=1.702, gate_max=7.0, up_min=-7.0, up_max=7.0, up_shift=1.0
)
KN, NK = Orientation.IN_OUT, Orientation.OUT_IN


@dataclasses.dataclass(frozen=True)
class Case:
    experts: int = 8
    top_k: int = 2
    hidden: int = 256
    intermediate: int = 128
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
        )


CASES = {
    "plain": Case(),
    "qwen3-30b": Case(128, 8, 2048, 768),
    "fp16": Case(64, 6, 1024, 384, dtype="fp16", weight_dtype="fp16"),
    "mn-major": Case(16, 4, 512, 352, w13=KN, w2=KN),
    "mn-major-first": Case(16, 4, 512, 704, w13=KN),
    "mn-major-second": Case(16, 4, 328, 192, w2=KN),
    "up-first": Case(16, 4, 512, 192, layout=GateLayout.CONCAT_UP_FIRST, out_dtype="fp32"),
    "interleaved": Case(16, 4, 512, 352, layout=GateLayout.INTERLEAVED, b13=True),
    "interleaved-up-first": Case(16, 4, 512, 352, layout=GateLayout.INTERLEAVED_UP_FIRST, b13=True),
    "gpt-oss": Case(
        32, 4, 2880, 2880, GateLayout.INTERLEAVED, KN, KN, GPT_OSS, True, True, weight_dtype="bf16"
    ),
    "separate": Case(16, 2, 520, 1408, layout=GateLayout.SEPARATE, b13=True, b2=True),
    "llama4": Case(
        16, 1, 640, 512, w13=KN, w2=KN, position=WeightPosition.INPUT, b13=True, weight_dtype="bf16"
    ),
    "hidden-weight": Case(
        8, 3, 264, 136, b2=True, position=WeightPosition.HIDDEN, index_dtype="int32"
    ),
    "gelu": Case(16, 2, 256, 192, activation=ActivationSpec(kind=ActivationKind.GELU)),
    "gelu-tanh": Case(16, 2, 256, 192, activation=ActivationSpec(kind=ActivationKind.GELU_TANH)),
    "relu2-plain": Case(
        16,
        2,
        256,
        320,
        GateLayout.NONE,
        activation=ActivationSpec(kind=ActivationKind.RELU2),
        b13=True,
    ),
    "gelu-plain-mn": Case(
        16,
        2,
        256,
        200,
        GateLayout.NONE,
        KN,
        KN,
        ActivationSpec(kind=ActivationKind.GELU),
        True,
        True,
    ),
    "many-experts": Case(512, 10, 256, 64),
}


@functools.cache
def load(config: CudaConfig) -> Kernel:
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    source = render(config, read_template())
    binary = build(config.name, source, entry=config.entry, allow_stack=config.watchdog)
    return Kernel(binary.cubin, config.entry)


def make_experts(plan: MoEPlan, dtype: torch.dtype) -> list[Tensor]:
    spec = plan.experts
    tensors = []
    for role in spec.tensor_roles:
        shape = spec.tensor_shape(role)
        fan_in = spec.intermediate if role == "w2" else spec.hidden
        scale = 0.5 if role.startswith("b") else fan_in**-0.5
        tensors.append((torch.randn(shape, device="cuda") * scale).to(dtype))
    return tensors


def route(case: Case, num_tokens: int, routing: str) -> tuple[Tensor, Tensor]:
    logits = torch.randn(num_tokens, case.experts, device="cuda")
    logits += torch.randn(case.experts, device="cuda")
    weights, ids = logits.softmax(-1).topk(case.top_k)
    if routing == "invalid":
        ids[torch.rand(ids.shape, device="cuda") < 0.3] = -1
        ids[torch.rand(ids.shape, device="cuda") < 0.1] = case.experts
        ids[0] = -1
    elif routing == "one":
        ids[:] = torch.arange(case.top_k, device="cuda")
    weights = weights.to(reference.DTYPES[case.weight_dtype])
    return ids.to(getattr(torch, case.index_dtype)), weights


def poison(layer: CudaLayer) -> None:
    """Every byte of the tables, of h and of y: 0xFF is NaN in all float types."""
    for buffer in layer._buffers[1:]:
        buffer.fill_(0xFF)


def check(case: Case, num_tokens: int, routing: str, kind: str = "", repeats: int = 3) -> None:
    """`kind`: "decode" or "prefill" where it can be had; "": what `choose_config` says."""
    plan = dataclasses.replace(case.plan, batch_invariant=kind == "prefill")
    config = choose_config(
        plan, num_tokens, case.dtype, weight_dtype=case.weight_dtype, index_dtype=case.index_dtype
    )
    dtype = reference.DTYPES[case.dtype]
    experts = make_experts(plan, dtype)
    x = torch.randn(num_tokens, case.hidden, device="cuda").to(dtype)
    ids, weights = route(case, num_tokens, routing)
    layer = CudaLayer(load(config), config, plan, experts, num_tokens)
    outs = []
    for _ in range(repeats):
        poison(layer)
        out = torch.full(
            (num_tokens, case.hidden),
            float("nan"),
            dtype=reference.DTYPES[config.out_dtype],
            device="cuda",
        )
        outs.append(layer(x, ids, weights, out))
    torch.cuda.synchronize()
    assert not layer._buffers[0].any(), "the kernel left a counter that is not zero"
    assert all(torch.equal(outs[0], out) for out in outs[1:])
    eager = reference.moe_layer(plan, x, [ids, weights], experts)
    fp32_plan = dataclasses.replace(plan, out_dtype="fp32")
    fp32 = reference.moe_layer(
        fp32_plan, x.float(), [ids, weights.float()], [t.float() for t in experts]
    )
    assert_close_to_fp32(outs[0].cpu(), eager.cpu(), fp32.cpu())


KINDS = ("decode", "prefill")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(CASES))
def test_layer_matches_reference(name: str, kind: str) -> None:
    case = CASES[name]
    for num_tokens in (1, 3, 16, 77, 256, *(() if kind == "decode" else (600, 1300))):
        check(case, num_tokens, "random", kind)
    check(case, 50, "invalid", kind)
    check(case, 100, "one", kind)
    if kind != "decode":
        check(case, 1000, "one", kind)


@pytest.mark.parametrize("num_tokens", [512, 1000, 2048])
def test_many_tokens(num_tokens: int) -> None:
    check(CASES["qwen3-30b"], num_tokens, "random")
    check(CASES["mn-major"], num_tokens, "invalid")


@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_launches_agree_bitwise(kind: str) -> None:
    check(CASES["qwen3-30b"], 16 if kind == "decode" else 1500, "random", kind, repeats=100)


def test_replays_in_a_cuda_graph_with_new_inputs() -> None:
    case = CASES["qwen3-30b"]
    for num_tokens in (4, 600):
        config = choose_config(case.plan, num_tokens, "bf16")
        experts = make_experts(case.plan, torch.bfloat16)
        layer = CudaLayer(load(config), config, case.plan, experts, num_tokens)
        x = torch.randn(num_tokens, case.hidden, device="cuda").bfloat16()
        ids, weights = route(case, num_tokens, "random")
        out = torch.empty_like(x)
        layer(x, ids, weights, out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(x, ids, weights, out)
        for _ in range(3):
            x.normal_()
            new_ids, new_weights = route(case, num_tokens, "random")
            ids.copy_(new_ids)
            weights.copy_(new_weights)
            graph.replay()
            replayed = out.clone()
            assert torch.equal(layer(x, ids, weights), replayed)


def test_sees_weights_written_in_place() -> None:
    case = CASES["plain"]
    config = choose_config(case.plan, 16, "bf16")
    experts = make_experts(case.plan, torch.bfloat16)
    layer = CudaLayer(load(config), config, case.plan, experts, 16)
    x = torch.randn(16, case.hidden, device="cuda").bfloat16()
    ids, weights = route(case, 16, "random")
    before = layer(x, ids, weights)
    experts[-1].mul_(2)
    assert torch.equal(layer(x, ids, weights), 2 * before)


@pytest.mark.parametrize("kind", KINDS)
def test_watchdog_build_passes_random_routings(kind: str) -> None:
    """No wait of any role lasts two seconds, whatever the routing; the counters end at zero."""
    case = Case(32, 4, 256, 192)
    plan = dataclasses.replace(case.plan, batch_invariant=kind != "decode")
    config = choose_config(plan, 300, "bf16", watchdog=True)
    kernel = load(config)
    experts = make_experts(plan, torch.bfloat16)
    layer = CudaLayer(kernel, config, plan, experts, 300)
    generator = torch.Generator().manual_seed(1)
    for _ in range(int(os.environ.get("MOEFLEX_TEST_ROUTINGS", "200"))):
        num_tokens = int(torch.randint(1, 301, (), generator=generator))
        num_used = int(torch.randint(case.top_k, case.experts + 1, (), generator=generator))
        ids = torch.rand(num_tokens, num_used, device="cuda").topk(case.top_k).indices
        ids[torch.rand(ids.shape, device="cuda") < 0.05] = -1
        x = torch.randn(num_tokens, case.hidden, device="cuda").bfloat16()
        weights = torch.rand(num_tokens, case.top_k, device="cuda")
        layer(x, ids, weights)
    torch.cuda.synchronize()
    assert kernel.read_ints("moeflex_watchdog", 4) == [0, 0, 0, 0]
    assert not layer._buffers[0].any()
