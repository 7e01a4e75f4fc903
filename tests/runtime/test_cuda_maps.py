"""Gate and up as views of every layout, and the sizes of the workspace; no GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from moe_compiler import reference
from moe_compiler.codegen.cuda import choose_config
from moe_compiler.ir import (
    ActivationKind,
    ActivationSpec,
    ExpertSpec,
    GateLayout,
    MoEPlan,
    Orientation,
    RouterSpec,
    Score,
)
from moe_compiler.runtime import cuda_maps
from moe_compiler.runtime.cuda_launch import plan_workspace
from moe_compiler.runtime.cuda_maps import Matrix, split_gate_up

E, H, I = 3, 16, 24


def make_spec(layout: GateLayout, orientation: Orientation) -> ExpertSpec:
    return ExpertSpec(
        num_experts=E,
        hidden=H,
        intermediate=I,
        gate_layout=layout,
        w13_orientation=orientation,
        activation=ActivationSpec(kind=ActivationKind.SILU),
    )


def read(matrix: Matrix, tensors: list[Tensor]) -> Tensor:
    """[E, rows, k] as the tensor map would read it."""
    owner = max(
        (t for t in tensors if t.data_ptr() <= matrix.address), key=lambda tensor: tensor.data_ptr()
    )
    offset = (matrix.address - owner.data_ptr()) // 2
    strides = (matrix.expert_stride, matrix.row_stride, matrix.k_stride)
    return owner.as_strided((matrix.num_experts, matrix.rows, matrix.k), strides, offset)


@pytest.mark.parametrize("orientation", list(Orientation))
@pytest.mark.parametrize("layout", list(GateLayout))
def test_views_are_the_reference_projections(layout: GateLayout, orientation: Orientation) -> None:
    spec = make_spec(layout, orientation)
    tensors = {role: torch.randn(spec.tensor_shape(role)).bfloat16() for role in spec.tensor_roles}
    owners = list(tensors.values())
    gate, up = split_gate_up(spec, tensors)
    x = torch.eye(H, dtype=torch.bfloat16)  # the projection of the identity is the matrix itself
    for expert in range(E):
        one = reference.expert_tensors(spec, owners, expert)
        want_gate, want_up = reference._project(spec, x, one)
        ours = read(gate, owners)[expert].t()
        if up is None and layout is not GateLayout.NONE:  # neighbours: gate holds both
            first, second = ours[:, ::2], ours[:, 1::2]
            swapped = layout is GateLayout.INTERLEAVED_UP_FIRST
            ours, ours_up = (second, first) if swapped else (first, second)
            assert torch.equal(ours_up, want_up)
        elif up is not None:
            assert torch.equal(read(up, owners)[expert].t(), want_up)
        assert torch.equal(ours, want_gate)


@pytest.mark.parametrize("layout", [GateLayout.CONCAT_UP_FIRST, GateLayout.INTERLEAVED])
def test_slab_map_alternates_eight_rows(
    layout: GateLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(layout, Orientation.OUT_IN)
    weight = torch.arange(E * 2 * I * H).reshape(E, 2 * I, H).to(torch.int16)
    gate, up = split_gate_up(spec, {"w13": weight})
    assert up is not None
    seen = []
    monkeypatch.setattr(cuda_maps, "TensorMap", lambda *arguments: seen.append(arguments))
    cuda_maps.slab_map(gate, up, "bf16", 2)
    address, _, dims, strides, box = seen[0]
    assert address == weight.data_ptr()
    view = weight.as_strided(dims[::-1], [*(s // 2 for s in reversed(strides)), 1])
    first, second = read(gate, [weight]), read(up, [weight])
    if up.address < gate.address:
        first, second = second, first
    assert torch.equal(view[:, :, 0].reshape(E, I, H), first)
    assert torch.equal(view[:, :, 1].reshape(E, I, H), second)
    assert box == (64, 8, 2, 8, 1)


@pytest.mark.parametrize("tokens", [1, 37, 8192])
def test_workspace_holds_every_route(tokens: int) -> None:
    router = RouterSpec(score=Score.EXTERNAL, top_k=2, num_experts=E)
    plan = MoEPlan(router=router, experts=make_spec(GateLayout.CONCAT, Orientation.OUT_IN))
    for invariant in (False, True):
        plan = dataclasses.replace(plan, batch_invariant=invariant)
        config = choose_config(plan, tokens, "bf16")
        work = plan_workspace(config, plan, tokens)
        padding = config.block_m if config.kernel == "prefill" else 1
        assert work.num_rows * 1 >= tokens * 2
        assert work.num_rows <= tokens * 2 + E * padding
        assert work.h_bytes == work.num_rows * I * 2
        assert work.y_bytes == work.num_rows * H * 2
        assert all(part % 1024 == 0 for part in work.parts)
        assert work.num_bytes == sum(work.parts)
