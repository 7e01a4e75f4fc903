"""`torch.compile(model, backend="moeflex")` with the Triton router and the Triton layer, on a GPU."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import moe_compiler
from moe_compiler import triton_kernels
from moe_compiler.backend import moeflex
from moe_compiler.ir import MoEPlan, RouterSpec
from tests import tolerances
from tests.models import zoo
from tests.runtime.test_triton_layer import make_experts
from tests.runtime.triton_cases import LAYERS, ROUTERS
from tests.tolerances import assert_close_to_eager, assert_close_to_fp32

# Later tokens of a sequence see, through the attention, one that was sent to another expert.
assert_close = functools.partial(tolerances.assert_most_rows_close_to_fp32, share=0.25)

pytestmark = pytest.mark.gpu

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
TRITON = {"target": "triton"}


def model_of(family: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return zoo.build(family, "grouped_mm", dtype).cuda().requires_grad_(False)


def logits(model: Any, ids: Tensor, **more: Any) -> Tensor:
    return model(ids, use_cache=False, **more).logits


def placements() -> set[str]:
    return {placed for report in moe_compiler.reports() for placed in report.placements}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill(family: str, dtype: torch.dtype) -> None:
    model = model_of(family, dtype)
    exact = copy.deepcopy(model).float()
    compiled = torch.compile(model, backend=moeflex, options=TRITON)
    with torch.no_grad():
        for length in (17, 40, 150):  # static, then dynamic in T
            ids = zoo.token_ids(2, length).cuda()
            ours = logits(compiled, ids)
            assert_close(ours.cpu(), logits(model, ids).cpu(), logits(exact, ids).cpu())
            assert torch.equal(ours, logits(compiled, ids))
    assert placements() == {"triton"}


def test_cuda_graphs() -> None:
    model = model_of("qwen3_moe")
    exact = copy.deepcopy(model).float()
    options = {**TRITON, "mode": "reduce-overhead"}
    compiled = torch.compile(model, backend=moeflex, options=options)
    with torch.no_grad():
        for seed in range(6):
            ids = zoo.token_ids(2, 16, seed).cuda()
            torch.compiler.cudagraph_mark_step_begin()
            ours = logits(compiled, ids).clone()
            assert_close(ours.cpu(), logits(model, ids).cpu(), logits(exact, ids).cpu())
    from torch._inductor.cudagraph_trees import get_container

    manager = get_container(torch.cuda.current_device()).tree_manager
    assert manager is not None
    assert manager.roots, "nothing was captured"


@pytest.mark.parametrize("target", ["auto", "triton"])
def test_inductor_launches_the_kernels_itself(target: str) -> None:
    from torch._inductor.utils import run_and_get_code

    model = model_of("qwen3_moe")
    compiled = torch.compile(model, backend=moeflex, options={"target": target})
    with torch.no_grad():
        _, codes = run_and_get_code(logits, compiled, zoo.token_ids(2, 16).cuda())
    code = "\n".join(codes)
    assert "moeflex_route" in code
    assert "moeflex.route" not in code, "the router is a call into Python"
    assert ("moeflex_gate_up" in code) == (target == "triton")
    assert "moeflex.triton_layer" not in code


def test_gradients() -> None:
    model = zoo.build("qwen3_moe", "grouped_mm", torch.bfloat16).cuda()
    exact, eager = copy.deepcopy(model).float(), copy.deepcopy(model)
    compiled = torch.compile(model, backend=moeflex, options=TRITON)
    ids = zoo.token_ids(2, 16).cuda()
    found = []
    for run, owner in ((compiled, model), (eager, eager), (exact, exact)):
        logits(run, ids).float().square().mean().backward()
        found.append([p.grad for p in owner.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[2]) > 0
    for ours, same, wider in zip(*found, strict=True):
        assert_close_to_fp32(ours.cpu(), same.cpu(), wider.cpu())
    assert placements() == {"triton"}


class _Layer(nn.Module):
    """The two ops, as a graph of the backend holds them; small, for its weights go into the package."""

    def __init__(self, plan: MoEPlan, router: RouterSpec) -> None:
        super().__init__()
        self.keys = router.key, plan.key
        self.gate = nn.Parameter(torch.randn(router.num_experts, plan.experts.hidden) * 0.1)
        self.experts = nn.ParameterList(make_experts(plan, torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        router, plan = self.keys
        scores = x.float() @ self.gate.t()
        ids, weights = torch.ops.moeflex.route(scores, None, router)
        return torch.ops.moeflex.triton_layer(x, ids, weights, list(self.experts), plan)


def test_aot_inductor_packages_the_kernels(tmp_path: Path) -> None:
    triton_kernels.define_ops()
    module = _Layer(LAYERS["plain"].plan, ROUTERS["mixtral"]).cuda().requires_grad_(False)
    hidden = LAYERS["plain"].hidden
    x = torch.randn(32, hidden, device="cuda").bfloat16()
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    exported = torch.export.export(module, (x,), dynamic_shapes=({0: tokens},))
    package = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "layer.pt2")
    )
    loaded = torch._inductor.aoti_load_package(package)
    for num_tokens in (32, 2, 500):
        x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
        assert_close_to_eager(loaded(x).cpu(), module(x).cpu())
