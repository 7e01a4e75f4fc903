"""The live switch over gloo processes: both ways of moving, both directions, and what can go wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_compiler.arena import ArenaPlan, plan_arena
from moe_compiler.errors import LayoutError, PeerError, SwitchError
from moe_compiler.expert_blocks import ExpertBlocks, Layout
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
from moe_compiler.reference import expert_tensors, moe_layer
from moe_compiler.runtime import op_forward, transfer
from moe_compiler.runtime.arena_views import Arena
from moe_compiler.runtime.switch import LayoutStore, SwitchReport
from tests.runtime.ranks import run_ranks

BOTH = (Layout.EP, Layout.TP)
NUM_LAYERS = 3
TOP_K = 2


def spec_of(num_experts: int = 8, gate_layout: GateLayout = GateLayout.CONCAT) -> ExpertSpec:
    turned = gate_layout is GateLayout.INTERLEAVED_UP_FIRST
    orientation = Orientation.IN_OUT if turned else Orientation.OUT_IN
    return ExpertSpec(
        num_experts=num_experts,
        hidden=16,
        intermediate=8,
        gate_layout=gate_layout,
        w13_orientation=orientation,
        w2_orientation=orientation,
        has_b13=turned,
        has_b2=turned,
        activation=ActivationSpec(kind=ActivationKind.SILU),
    )


def model_tensors(spec: ExpertSpec, layer: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + layer)
    return [
        torch.randn(spec.tensor_shape(role), generator=generator) * 0.3
        for role in spec.tensor_roles
    ]


def plan_of(spec: ExpertSpec, num_ranks: int, layouts: tuple[Layout, ...] = BOTH) -> ArenaPlan:
    blocks = ExpertBlocks.of(spec, num_ranks, "fp32")
    return plan_arena(num_ranks=num_ranks, layouts=layouts, experts=[blocks] * NUM_LAYERS)


def fill(store: LayoutStore, spec: ExpertSpec, seed: int = 0) -> None:
    for layer in range(NUM_LAYERS):
        tensors = model_tensors(spec, layer, seed)
        for expert in range(spec.num_experts):
            store.refit(layer, spec, expert, expert_tensors(spec, tensors, expert))


def new_store(rank: int, num_ranks: int, folder: Path, spec: ExpertSpec, way: str) -> LayoutStore:
    plan = plan_of(spec, num_ranks)
    with pytest.MonkeyPatch.context() as patch:
        if way == "collective":
            patch.setattr(transfer, "PeerMemory", several_hosts)
        memory = transfer.allocate(plan)
    arena = Arena(plan, memory.local)
    moved = memory.transfer(arena, rank)
    link_gbps = transfer.measure_link(moved, plan)
    return LayoutStore(
        *(arena, rank, moved, Layout.EP), link_gbps=link_gbps, way_reason=memory.reason
    )


def several_hosts(*_: Any, **__: Any) -> None:
    raise PeerError("the ranks must run on one machine")


def owned(store: LayoutStore, layer: int) -> list[Tensor]:
    """The blocks that this rank holds, in order."""
    blocks = store.arena.plan.experts[layer]
    found = []
    for expert in blocks.owned_experts(store.layout, store.rank):
        for block in range(blocks.num_ranks):
            owner, place = blocks.owner(store.layout, expert, block)
            if owner == store.rank:
                found += [view[place].clone() for view in store.experts(layer)]
    return found


def static_store(
    rank: int, num_ranks: int, spec: ExpertSpec, layout: Layout, seed: int
) -> LayoutStore:
    """What the rank holds without any switch."""
    arena = Arena(
        plan_of(spec, num_ranks), torch.zeros(plan_of(spec, num_ranks).num_bytes, dtype=torch.uint8)
    )
    store = LayoutStore(arena, rank, None, layout)  # type: ignore[arg-type]
    fill(store, spec, seed)
    return store


def same(store: LayoutStore, other: LayoutStore) -> bool:
    return all(
        torch.equal(a, b)
        for layer in range(NUM_LAYERS)
        for a, b in zip(owned(store, layer), owned(other, layer), strict=True)
    )


def partial_output(store: LayoutStore, spec: ExpertSpec, layer: int, num_tokens: int) -> Tensor:
    """This rank's part of a layer's result on tokens that every rank knows; the parts add up."""
    blocks = store.arena.plan.experts[layer]
    layout = store.layout
    local = blocks.local_spec(spec, layout)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(num_tokens, spec.hidden, generator=generator)
    ids = torch.rand(num_tokens, spec.num_experts, generator=generator).topk(TOP_K).indices
    weights = torch.rand(num_tokens, TOP_K, generator=generator)
    if layout is Layout.EP:
        mine = blocks.owned_experts(layout, store.rank)
        held = (ids >= mine.start) & (ids < mine.stop)
        narrow = (ids - mine.start)[..., None] * blocks.num_ranks + torch.arange(blocks.num_ranks)
        ids = torch.where(held[..., None], narrow, -1).flatten(1)
        weights = weights.repeat_interleave(blocks.num_ranks, dim=1)
    router = RouterSpec(score=Score.EXTERNAL, top_k=ids.shape[1], num_experts=local.num_experts)
    plan = MoEPlan(router=router, experts=local)
    return op_forward.forward(plan, x, [ids, weights], list(store.experts(layer)))


def check_switches(
    rank: int, num_ranks: int, folder: Path, spec: ExpertSpec, way: str
) -> dict[str, Any]:
    store = new_store(rank, num_ranks, folder, spec, way)
    fill(store, spec)
    static = {layout: static_store(rank, num_ranks, spec, layout, 0) for layout in BOTH}
    before = [view.clone() for layer in range(NUM_LAYERS) for view in owned(store, layer)]
    reports = [store.switch(Layout.TP, check=True)]
    found = {
        "tp": same(store, static[Layout.TP]),
        "outputs": [
            torch.equal(
                partial_output(store, spec, layer, tokens),
                partial_output(static[Layout.TP], spec, layer, tokens),
            )
            for layer in range(NUM_LAYERS)
            for tokens in (5, 0)
        ],
        "tp_parts": partial_output(store, spec, 1, 5),
    }
    reports.append(store.switch(Layout.EP, check=True))
    found["ep"] = same(store, static[Layout.EP])
    found["ep_parts"] = partial_output(store, spec, 1, 5)
    for _ in range(10):
        store.switch(Layout.TP)
        store.switch(Layout.EP)
    after = [view for layer in range(NUM_LAYERS) for view in owned(store, layer)]
    found["bytes"] = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    found["again"] = store.switch(Layout.EP)
    fill(store, spec, seed=1)
    store.switch(Layout.TP)
    found["refit"] = same(store, static_store(rank, num_ranks, spec, Layout.TP, 1))
    return {**found, "reports": reports}


@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "way", "gate_layout"),
    [
        (2, 8, "peers", GateLayout.CONCAT),
        (2, 7, "collective", GateLayout.INTERLEAVED_UP_FIRST),
        (4, 8, "collective", GateLayout.SEPARATE),
        (4, 6, "peers", GateLayout.NONE),
        (4, 2, "peers", GateLayout.CONCAT_UP_FIRST),
    ],
)
def test_switches_are_exact(
    tmp_path: Path, num_ranks: int, num_experts: int, way: str, gate_layout: GateLayout
) -> None:
    """Also where R does not divide E, and where some ranks hold no expert at all."""
    spec = spec_of(num_experts, gate_layout)
    ranks = run_ranks(check_switches, num_ranks, tmp_path, spec, way)
    for found in ranks:
        assert found["tp"]
        assert all(found["outputs"])
        assert found["ep"]
        assert found["bytes"]
        assert found["refit"]
        assert found["again"].done
        assert found["again"].crossed_bytes == 0
        assert [str(r.target) for r in found["reports"]] == ["tp", "ep"]
        check_report(found["reports"][0], way)
    of_layer = sum(t.numel() * 4 for t in model_tensors(spec, 0))
    if not spec.has_b2:
        for turn in range(2):
            crossed = sum(found["reports"][turn].crossed_bytes for found in ranks)
            assert crossed == NUM_LAYERS * of_layer * (num_ranks - 1) // num_ranks
    expected = expected_output(spec)
    for parts in ("tp_parts", "ep_parts"):
        total = sum(found[parts] for found in ranks)
        torch.testing.assert_close(total, expected)


def check_report(report: SwitchReport, way: str) -> None:
    assert dict(report.phase_ms).keys() == {"ready", "check", "experts"}
    assert report.way == {"peers": "peer copies", "collective": "all-to-all"}[way]
    assert report.way_reason == ("" if way == "peers" else "the ranks must run on one machine")
    assert report.done
    assert report.link_gbps > 0
    assert report.link_share == report.gbps / report.link_gbps
    assert report.gbps > 0 or report.crossed_bytes == 0


def expected_output(spec: ExpertSpec) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(5, spec.hidden, generator=generator)
    ids = torch.rand(5, spec.num_experts, generator=generator).topk(TOP_K).indices
    weights = torch.rand(5, TOP_K, generator=generator)
    router = RouterSpec(score=Score.EXTERNAL, top_k=TOP_K, num_experts=spec.num_experts)
    return moe_layer(
        MoEPlan(router=router, experts=spec), x, [ids, weights], model_tensors(spec, 1)
    )


def lose_a_rank(
    rank: int, num_ranks: int, folder: Path, way: str, moved_layers: int
) -> tuple[str, str]:
    """Rank 1 dies after so many layers; -1: before it answers at all."""
    spec = spec_of()
    store = new_store(rank, num_ranks, folder, spec, way)
    fill(store, spec)
    if rank == 1:
        moved: Any = store._transfer
        move, done = moved.move, []

        def die(*args: Any) -> None:
            if len(done) == moved_layers:
                os._exit(1)
            done.append(1)
            move(*args)

        moved.move = die
        if moved_layers < 0:
            os._exit(1)
    with pytest.raises(SwitchError) as raised:
        store.switch(Layout.TP)
    try:
        state = str(store.layout)
        assert same(store, static_store(rank, num_ranks, spec, Layout.EP, 0))
    except SwitchError as error:
        state = str(error)
    return str(raised.value), state


@pytest.mark.parametrize("way", ["peers", "collective"])
def test_a_rank_that_dies_midway_tears_the_switch(tmp_path: Path, way: str) -> None:
    message, state = run_ranks(lose_a_rank, 2, tmp_path, way, 1, lost=(1,))[0]
    assert "Load the model again" in message
    assert "was interrupted" in state


def test_a_rank_that_dies_before_leaves_the_old_layout(tmp_path: Path) -> None:
    ranks = run_ranks(lose_a_rank, 4, tmp_path, "peers", -1, lost=(1,))
    for message, state in (ranks[0], *ranks[2:]):
        assert "Nothing was moved" in message
        assert state == "ep"


def damage_a_byte(rank: int, num_ranks: int, folder: Path) -> str:
    spec = spec_of()
    store = new_store(rank, num_ranks, folder, spec, "collective")
    fill(store, spec)
    moved: Any = store._transfer
    move = moved.move

    def damage(layer_moves: Any, source: int, target: int) -> None:
        move(layer_moves, source, target)
        if rank == 0:
            store.arena.memory[target] ^= 1

    moved.move = damage
    with pytest.raises(SwitchError, match="blocks changed their bytes"):
        store.switch(Layout.TP, check=True)
    with pytest.raises(SwitchError, match="Load the model again"):
        store.experts(0)
    return "refused"


def test_a_damaged_byte_is_found_by_the_check(tmp_path: Path) -> None:
    assert run_ranks(damage_a_byte, 2, tmp_path) == ["refused"] * 2


def broken_barrier(rank: int, num_ranks: int, folder: Path) -> list[str]:
    """All ranks live, and one copy fails: every rank refuses from then on."""
    store = new_store(rank, num_ranks, folder, spec_of(), "peers")
    fill(store, spec_of())
    moved: Any = store._transfer
    if rank == 1:
        moved.move = lambda *_: 1 / 0
        moved._peers._timeout_s = 1.0
    moved._peers._timeout_s = 1.0
    found = []
    for _ in range(2):
        with pytest.raises(SwitchError) as raised:
            store.switch(Layout.TP)
        found.append(str(raised.value))
    return found


def test_one_failed_copy_tears_every_rank(tmp_path: Path) -> None:
    for first, second in run_ranks(broken_barrier, 2, tmp_path):
        assert "Load the model again" in first
        assert "was interrupted" in second


def allocations(rank: int, num_ranks: int, folder: Path) -> list[int]:
    """Bytes of each; the flag of gloo's own barrier is no tensor of ours."""
    spec = spec_of()
    store = new_store(rank, num_ranks, folder, spec, "peers")
    fill(store, spec)
    store.switch(Layout.TP)
    with torch.profiler.profile(profile_memory=True) as profile:
        store.switch(Layout.EP)
    return [e.self_cpu_memory_usage for e in profile.events() if e.self_cpu_memory_usage > 8]


def test_a_switch_allocates_nothing(tmp_path: Path) -> None:
    assert run_ranks(allocations, 2, tmp_path) == [[], []]


def test_a_layout_that_was_not_planned_is_refused() -> None:
    spec = spec_of()
    plan = plan_of(spec, 2, (Layout.EP,))
    arena = Arena(plan, torch.zeros(plan.num_bytes, dtype=torch.uint8))
    with pytest.raises(LayoutError, match="planned for ep"):
        LayoutStore(arena, 0, None, Layout.TP)  # type: ignore[arg-type]
    absent = {Layout.TP: "five heads"}
    store = LayoutStore(arena, 0, None, Layout.EP, absent=absent)  # type: ignore[arg-type]
    report = store.switch(Layout.TP)
    assert not report.done
    assert report.reason == "the arena was planned for ep alone: five heads"
    assert store.layout is Layout.EP
