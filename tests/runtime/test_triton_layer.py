"""The Triton layer against the reference: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from moe_compiler import reference
from moe_compiler.codegen import triton as codegen
from moe_compiler.ir import MoEPlan
from moe_compiler.runtime import triton_router
from tests.runtime.triton_cases import LAYERS, SMALL_LAYERS, LayerCase
from tests.tolerances import assert_close_to_fp32

pytestmark = pytest.mark.skipif(
    bool(triton_router.missing()), reason=triton_router.missing() or "Triton is here"
)

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if CUDA else (9, 0)


def make_experts(plan: MoEPlan, dtype: torch.dtype) -> list[Tensor]:
    tensors = []
    for role in plan.experts.tensor_roles:
        shape = plan.experts.tensor_shape(role)
        fan_in = plan.experts.intermediate if role == "w2" else plan.experts.hidden
        scale = 0.5 if role.startswith("b") else fan_in**-0.5
        tensors.append((torch.randn(shape, device=DEVICE) * scale).to(dtype))
    return tensors


def make_route(case: LayerCase, num_tokens: int, routing: str) -> tuple[Tensor, Tensor]:
    logits = torch.randn(num_tokens, case.experts, device=DEVICE)
    weights, ids = logits.softmax(-1).topk(case.top_k)
    if routing == "invalid":
        ids[torch.rand(ids.shape, device=DEVICE) < 0.3] = -1
        ids[torch.rand(ids.shape, device=DEVICE) < 0.1] = case.experts
        ids[0] = -1
        weights[ids < 0] = float("nan")
    elif routing == "one":
        ids[:] = torch.arange(case.top_k, device=DEVICE)
    weights = weights.to(reference.DTYPES[case.weight_dtype])
    return ids.to(getattr(torch, case.index_dtype)), weights


def run(
    case: LayerCase,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: list[Tensor],
    typical_tokens: int,
) -> Tensor:
    from moe_compiler.runtime import triton_layer

    config = codegen.choose_config(case.plan, typical_tokens, case.dtype, capability())
    return triton_layer.layer(case.plan, config, x, ids, weights, experts)


def check(case: LayerCase, num_tokens: int, routing: str, typical_tokens: int = 0) -> None:
    plan, dtype = case.plan, reference.DTYPES[case.dtype]
    experts = make_experts(plan, dtype)
    x = torch.randn(num_tokens, case.hidden, device=DEVICE).to(dtype)
    ids, weights = make_route(case, num_tokens, routing)
    outs = [
        run(case, x, ids, weights, experts, typical_tokens or num_tokens)
        for _ in range(3 if CUDA else 1)
    ]
    assert all(torch.equal(out, outs[0]) for out in outs)
    eager = reference.moe_layer(plan, x, [ids, weights], experts)
    wide_plan = dataclasses.replace(plan, out_dtype="fp32")
    wide = reference.moe_layer(
        wide_plan, x.float(), [ids, weights.float()], [t.float() for t in experts]
    )
    assert_close_to_fp32(outs[0].cpu(), eager.cpu(), wide.cpu())


@pytest.mark.parametrize("name", SMALL_LAYERS)
def test_every_kind_of_expert(name: str) -> None:
    check(SMALL_LAYERS[name], 11, "random")


@pytest.mark.parametrize("routing", ["invalid", "one"])
@pytest.mark.parametrize("typical_tokens", [1, 100, 1000])
def test_routings(routing: str, typical_tokens: int) -> None:
    """Every tile size on a short batch: experts without rows, and rows without an expert."""
    check(SMALL_LAYERS["plain"], 40, routing, typical_tokens)
    check(SMALL_LAYERS["hidden-weight"], 40, routing, typical_tokens)


@pytest.mark.parametrize("routing", ["random", "invalid", "one"])
def test_sort_in_parts_gives_the_same_order(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_compiler.runtime import triton_layer

    case = LayerCase(experts=11, top_k=3)
    ids, _ = make_route(case, 150, routing)
    monkeypatch.setattr(triton_layer, "_MAX_CHUNK", triton_layer._MIN_CHUNK)
    config = codegen.choose_config(case.plan, 150, "bf16", capability())
    found = [
        triton_layer._align(
            case.plan.experts, dataclasses.replace(config, sort_in_parts=parts), ids
        )
        for parts in (False, True)
    ]
    num_tiles = int(found[0].tiles[-1])
    num_valid = int(((ids >= 0) & (ids < case.experts)).sum())
    assert torch.equal(found[1].tiles[-1], found[0].tiles[-1])
    for once, parts in zip(found[0].tiles[:-1], found[1].tiles[:-1], strict=True):
        assert torch.equal(parts[:num_tiles], once[:num_tiles])
    assert torch.equal(found[1].routes[:num_valid], found[0].routes[:num_valid])
    expected = torch.argsort(ids.flatten(), stable=True)
    flat = ids.flatten()[expected]
    expected = expected[(flat >= 0) & (flat < case.experts)]
    assert torch.equal(found[0].routes[:num_valid].long(), expected)


def test_no_tokens_and_one() -> None:
    case = SMALL_LAYERS["plain"]
    check(case, 1, "random")
    check(case, 1, "invalid")
    experts = make_experts(case.plan, torch.bfloat16)
    x = torch.empty(0, case.hidden, dtype=torch.bfloat16, device=DEVICE)
    ids, weights = make_route(case, 0, "random")
    assert run(case, x, ids, weights, experts, 1).shape == (0, case.hidden)


def test_strides() -> None:
    """Views of larger tensors, as a checkpoint or an arena leaves them."""
    case = SMALL_LAYERS["separate"]
    wide = [
        torch.stack((t, torch.full_like(t, float("nan"))), dim=1)
        for t in make_experts(case.plan, torch.bfloat16)
    ]
    experts = [t[:, 0] for t in wide]
    x = torch.randn(9, 2 * case.hidden, device=DEVICE).bfloat16()
    ids, weights = make_route(case, 9, "random")
    ids, weights = ids.t().contiguous().t(), weights.t().contiguous().t()
    for rows in (x[:, : case.hidden], x[:, ::2]):
        out = run(case, rows, ids, weights, experts, 9)
        same = run(
            case,
            rows.contiguous(),
            ids.contiguous(),
            weights.contiguous(),
            [t.contiguous() for t in experts],
            9,
        )
        assert torch.equal(out, same)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(set(LAYERS) - set(SMALL_LAYERS)))
def test_large_layers(name: str) -> None:
    for num_tokens in (1, 16, 300, 2048):
        check(LAYERS[name], num_tokens, "random")
    check(LAYERS[name], 77, "invalid")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3-30b", "many-experts"])
def test_cuda_graph_with_new_inputs(name: str) -> None:
    case = LAYERS[name]
    experts = make_experts(case.plan, torch.bfloat16)
    x = torch.randn(64, case.hidden, device=DEVICE).bfloat16()
    ids, weights = make_route(case, 64, "random")
    run(case, x, ids, weights, experts, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(case, x, ids, weights, experts, 64)
    for _ in range(3):
        new_ids, new_weights = make_route(case, 64, "random")
        x.normal_()
        ids.copy_(new_ids)
        weights.copy_(new_weights)
        graph.replay()
        assert torch.equal(out, run(case, x, ids, weights, experts, 64))
