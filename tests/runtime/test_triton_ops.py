"""The Triton ops in eager, under autograd, and as Inductor meets them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from moe_compiler import reference
from moe_compiler.codegen import triton as codegen
from moe_compiler.errors import PlanError
from moe_compiler.ir import RouterSpec
from moe_compiler.runtime import op, triton_router
from tests.runtime.test_triton_layer import DEVICE, make_experts, make_route
from tests.runtime.triton_cases import ROUTERS, SMALL_LAYERS
from tests.tolerances import assert_close_to_fp32

pytestmark = pytest.mark.skipif(
    bool(triton_router.missing()), reason=triton_router.missing() or "Triton is here"
)


@pytest.fixture(autouse=True)
def _ops() -> None:
    from moe_compiler.runtime import triton_ops

    triton_ops.use_configs(codegen.choose_config)


def test_router_key_is_canonical() -> None:
    for spec in ROUTERS.values():
        assert RouterSpec.from_key(spec.key) == spec
    with pytest.raises(PlanError, match="compile the model again"):
        RouterSpec.from_key("{}")


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "deepseek-v3", "sparsemixer"])
def test_gradient_of_the_router(name: str) -> None:
    spec = ROUTERS[name]
    logits = torch.randn(3, spec.num_experts, device=DEVICE)
    bias = torch.zeros(spec.num_experts, device=DEVICE) if spec.has_bias else None
    grad = torch.randn(3, spec.top_k, device=DEVICE)
    ours, eager = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    ids, weights = torch.ops.moeflex.route(ours, bias, spec.key)
    assert not ids.requires_grad
    weights.backward(grad)
    reference.route(spec, eager, bias)[1].backward(grad)
    assert ours.grad is not None and eager.grad is not None
    assert_close_to_fp32(ours.grad.cpu(), eager.grad.cpu(), eager.grad.cpu())


def test_gradient_of_the_layer() -> None:
    case = dataclasses.replace(SMALL_LAYERS["separate"], dtype="fp32")
    plan = case.plan
    ids, weights = make_route(case, 5, "random")
    tensors = [torch.randn(5, case.hidden, device=DEVICE), weights]
    tensors += make_experts(plan, torch.float32)
    grad = torch.randn(5, case.hidden, device=DEVICE)

    def gradients(triton: bool) -> list[Tensor]:
        x, w, *experts = [t.clone().requires_grad_() for t in tensors]
        if triton:
            out = torch.ops.moeflex.triton_layer(x, ids, w, experts, plan.key)
        else:
            out = reference.moe_layer(plan, x, [ids, w], experts)
        return list(torch.autograd.grad(out, [x, w, *experts], grad))

    for ours, eager in zip(gradients(True), gradients(False), strict=True):
        assert_close_to_fp32(ours.cpu(), eager.cpu(), eager.cpu())


def test_op_is_the_layer() -> None:
    assert op.OP_VERSION  # defines the gradient's op
    case = SMALL_LAYERS["plain"]
    x = torch.randn(4, case.hidden, device=DEVICE).bfloat16()
    ids, weights = make_route(case, 4, "invalid")
    experts = make_experts(case.plan, torch.bfloat16)
    out = torch.ops.moeflex.triton_layer(x, ids, weights, experts, case.plan.key)
    eager = reference.moe_layer(case.plan, x, [ids, weights], experts)
    wide_plan = dataclasses.replace(case.plan, out_dtype="fp32")
    wide = reference.moe_layer(wide_plan, x.float(), [ids, weights], [t.float() for t in experts])
    assert_close_to_fp32(out.cpu(), eager.cpu(), wide.cpu())
