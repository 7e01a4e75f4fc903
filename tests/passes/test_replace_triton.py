"""Blocks whose router and layer become the Triton ops."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx

from moe_compiler import triton_kernels
from moe_compiler.ir import Score
from moe_compiler.layer import Device
from moe_compiler.options import Options
from moe_compiler.passes.match_moe import find_regions
from moe_compiler.passes.replace import replace_region
from moe_compiler.placement import Placement, place
from moe_compiler.runtime import triton_router
from tests.models import styles
from tests.passes.graphs import capture, match
from tests.runtime.test_triton_layer import DEVICE
from tests.tolerances import assert_close_to_fp32


def placed(capability: tuple[int, int], **options: Any) -> Placement:
    block = match(styles.build("gathered_einsum"), styles.rows()).matches[0]
    device = Device(type="cuda", capability=capability, here=False)
    return place(block, Options(**options), device=device)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_gpus_without_a_kernel_of_their_own_get_triton(capability: tuple[int, int]) -> None:
    found = placed(capability)
    assert found.target == "triton"
    assert found.layer_op == "triton_layer"
    assert "runs on compute capability 9.0" in found.title
    assert found.router is not None and found.router.score is Score.SOFTMAX


def test_triton_can_be_asked_for_and_is_refused_where_it_cannot_run() -> None:
    assert placed((9, 0), target="triton").title == "triton"
    old = placed((7, 5))
    assert old.target == "" and "8.0 or newer; this is sm_75" in old.reason
    block = match(styles.build("gathered_einsum"), styles.rows()).matches[0]
    on_cpu = place(block, Options(target="triton"))
    assert on_cpu.target == "" and "does not run on cpu" in on_cpu.reason


def test_a_router_that_shall_not_be_absorbed_stays_in_the_graph() -> None:
    assert placed((8, 0), absorb_router="never").router is None
    assert placed((7, 5)).router is None


@pytest.mark.skipif(bool(triton_router.missing()), reason="Triton is not installed")
@pytest.mark.parametrize("name", ["gathered_einsum", "loop_stacked", "dense_bmm"])
@pytest.mark.parametrize("layer_op", ["triton_layer", "moe_layer"])
def test_router_and_layer_compute_the_same(name: str, layer_op: str) -> None:
    triton_kernels.define_ops()
    targets: list[str] = []

    def edit(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        found = find_regions(gm, example_inputs)
        (block,) = found.matches
        device = Device(type="cuda", capability=(8, 0))
        placement = place(block, Options(), device=device)
        assert placement.plan is not None and placement.router is not None
        replace_region(
            gm,
            block,
            placement.plan,
            flow=found.flow,
            router=placement.router,
            layer_op=layer_op,
        )
        gm.graph.lint()
        gm.recompile()
        targets.extend(str(node.target) for node in gm.graph.nodes)

    module, x = styles.build(name).to(DEVICE), styles.rows().to(DEVICE)
    eager, exact = module(x), copy.deepcopy(module).double()
    _, ours = capture(module, x, edit=edit)
    wide = exact(x.double())
    assert_close_to_fp32(ours.cpu(), eager.cpu(), wide.cpu())
    assert "moeflex.route.default" in targets
    assert f"moeflex.{layer_op}.default" in targets
    if name == "loop_stacked":  # the others write in place, which AOT autograd clears away
        assert not any("topk" in target or "softmax" in target for target in targets)
    grad = torch.randn_like(eager)
    parameters = list(module.parameters())
    for mine, theirs, wider in zip(
        torch.autograd.grad(ours, parameters, grad),
        torch.autograd.grad(eager, parameters, grad),
        torch.autograd.grad(wide, list(exact.parameters()), grad.double()),
        strict=True,
    ):
        assert_close_to_fp32(mine.cpu(), theirs.cpu(), wider.cpu())
