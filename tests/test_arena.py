"""The arena table, and a verifier that has to find every fault that is planted in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_compiler.arena import ArenaPlan, Slot, WeightUse, plan_arena, verify
from moe_compiler.errors import ArenaError
from moe_compiler.expert_blocks import ExpertBlocks, Layout

BOTH = (Layout.EP, Layout.TP)


def qwen3_30b(num_ranks: int = 2) -> ArenaPlan:
    """Sizes of Qwen3-30B-A3B: 48 layers, 58 GB of experts."""
    blocks = ExpertBlocks(num_experts=128, num_ranks=num_ranks, hidden=2048, intermediate=768)
    attention = 2 * 2048 * (32 * 128) + 2 * 2048 * (4 * 128)
    weights = [WeightUse(name=f"layers.{i}", num_bytes=2 * attention, tp_bytes=2 * attention // num_ranks)
               for i in range(48)]  # fmt: skip
    embedding = 2 * 151936 * 2048
    weights.append(WeightUse(name="embed", num_bytes=embedding, tp_bytes=embedding))
    weights.append(WeightUse(name="head", num_bytes=embedding, tp_bytes=embedding // num_ranks))
    return plan_arena(num_ranks=num_ranks, layouts=BOTH, experts=[blocks] * 48, weights=weights)


def small(num_layers: int = 4, **changes: object) -> ArenaPlan:
    blocks = ExpertBlocks(num_experts=4, num_ranks=2, hidden=8, intermediate=8)
    arguments = {
        "num_ranks": 2,
        "layouts": BOTH,
        "experts": [blocks] * num_layers,
        "weights": [WeightUse(name="q", num_bytes=1000, tp_bytes=500)],
        "sizes": {"kv": 4096, "requests": 0, "scratch": 100},
        **changes,
    }
    return plan_arena(**arguments)  # type: ignore[arg-type]


def test_equal_layers_lie_in_one_slot_more_than_there_are_layers() -> None:
    plan = small()
    size = plan.experts[0].num_bytes(Layout.EP)
    tp = [plan.expert_slot(Layout.TP, i).offset_bytes for i in range(4)]
    ep = [plan.expert_slot(Layout.EP, i).offset_bytes for i in range(4)]
    assert ep == [offset + size for offset in tp]
    assert ep[:-1] == tp[1:]
    assert [s.name for s in plan.slots if s.part in ("kv", "requests", "scratch")] == [
        "kv",
        "scratch",
    ]


def test_overhead_of_qwen3_30b() -> None:
    plan = qwen3_30b()
    of_ep = plan.overhead_bytes(Layout.EP) / plan.static_bytes(Layout.EP)
    assert plan.better_static is Layout.TP
    assert plan.overhead_bytes(Layout.EP) == plan.experts[0].num_bytes(Layout.EP)
    assert of_ep < 0.024


def moved(plan: ArenaPlan, name: str, **changes: object) -> ArenaPlan:
    slots = tuple(
        dataclasses.replace(s, **changes) if s.name == name else s  # type: ignore[arg-type]
        for s in plan.slots
    )
    return dataclasses.replace(plan, slots=slots)


def without(plan: ArenaPlan, name: str) -> ArenaPlan:
    return dataclasses.replace(plan, slots=tuple(s for s in plan.slots if s.name != name))


def shifted_the_other_way(plan: ArenaPlan) -> ArenaPlan:
    """EP in the slots of TP and TP in those of EP, the orders unchanged."""
    other = {"ep": "tp", "tp": "ep"}
    slots = []
    for slot in plan.slots:
        head, _, tail = slot.name.partition("/experts/")
        if tail:
            slot = dataclasses.replace(
                slot, name=f"{other[head]}/experts/{tail}", lifetimes=(other[head], "switch")
            )
        slots.append(slot)
    return dataclasses.replace(plan, slots=tuple(slots))


def in_place(plan: ArenaPlan) -> ArenaPlan:
    """N slots: both layouts of a layer in the same bytes."""
    for layer in range(len(plan.experts)):
        target = plan.expert_slot(Layout.TP, layer)
        plan = moved(plan, f"ep/experts/{layer:03d}", offset_bytes=target.offset_bytes)
    return plan


FAULTS: dict[str, tuple[Callable[[ArenaPlan], ArenaPlan], str]] = {
    "layers forward in both directions": (
        lambda p: dataclasses.replace(p, backward=p.forward), "tp -> ep: layer 0 is written"),
    "layers backward in both directions": (
        lambda p: dataclasses.replace(p, forward=p.backward), "ep -> tp: layer 3 is written"),
    "a layer is never moved": (
        lambda p: dataclasses.replace(p, forward=p.forward[:-1]), "not each of 4 once"),
    "two layers change places": (
        lambda p: dataclasses.replace(p, forward=(0, 2, 1, 3)), "ep -> tp: layer 2 is written"),
    "the shift goes the other way": (shifted_the_other_way, "is written"),
    "no spare slot": (in_place, "is written"),
    "a slot too small": (
        lambda p: moved(p, "tp/experts/002", num_bytes=256), "layer 2 needs"),
    "a slot is missing": (lambda p: without(p, "ep/experts/001"), "layer 1 has no slot under ep"),
    "two layers share bytes": (
        lambda p: moved(p, "tp/experts/001", offset_bytes=p.slot("tp/experts/000").offset_bytes),
        "overlap while tp"),
    "weights under the experts": (
        lambda p: moved(p, "weights/q", offset_bytes=p.slot("ep/experts/003").offset_bytes),
        "overlap while ep"),
    "scratch under the experts of one layout": (
        lambda p: moved(p, "scratch", offset_bytes=p.slot("tp/experts/000").offset_bytes),
        "overlap while"),
    "a target over what lives during the switch only": (
        lambda p: moved(p, "scratch", offset_bytes=p.slot("tp/experts/000").offset_bytes,
                        lifetimes=("switch",)), "overlap while switch"),
    "a crooked start": (lambda p: moved(p, "kv", offset_bytes=p.num_bytes + 8), "no multiple"),
    "a lifetime that nobody knows": (lambda p: moved(p, "kv", lifetimes=("sp",)), "lifetimes"),
    "an empty slot": (lambda p: moved(p, "kv", num_bytes=0), "is empty"),
    "a name twice": (
        lambda p: dataclasses.replace(p, slots=(*p.slots, Slot(
            name="kv", offset_bytes=2 * p.num_bytes // 256 * 256, num_bytes=256))), "are called kv"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_verifier_finds(fault: str) -> None:
    plant, text = FAULTS[fault]
    plan = small()
    assert verify(plan) == []
    assert any(text in found for found in verify(plant(plan))), verify(plant(plan))


blocks_of = st.builds(
    lambda experts, hidden, width: ExpertBlocks(
        num_experts=experts, num_ranks=3, hidden=hidden, intermediate=3 * width
    ),
    st.integers(1, 7),
    st.integers(1, 40),
    st.integers(1, 9),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(blocks_of, max_size=6), st.integers(0, 5000), st.data())
def test_plans_of_any_layers_hold_and_any_swap_of_slots_is_found(
    experts: list[ExpertBlocks], kv: int, data: st.DataObject
) -> None:
    plan = plan_arena(num_ranks=3, layouts=BOTH, experts=experts, sizes={"kv": kv})
    assert verify(plan) == []
    if len(experts) < 2:
        return
    # A plan whose order is any other permutation is sound only if playing it byte by byte says so.
    order = tuple(data.draw(st.permutations(range(len(experts)))))
    changed = dataclasses.replace(plan, forward=order)
    assert bool(verify(changed)) == (not survives(changed))


def survives(plan: ArenaPlan) -> bool:
    """Play EP -> TP on real bytes, the target poisoned before the source is read."""
    memory: dict[int, int] = {}
    for layer in range(len(plan.experts)):
        slot = plan.expert_slot(Layout.EP, layer)
        memory.update(dict.fromkeys(range(slot.offset_bytes, slot.end_bytes), layer))
    for layer in plan.forward:
        source, target = (plan.expert_slot(way, layer) for way in BOTH)
        memory.update(dict.fromkeys(range(target.offset_bytes, target.end_bytes), -1))
        if any(memory[b] != layer for b in range(source.offset_bytes, source.end_bytes)):
            return False
        memory.update(dict.fromkeys(range(target.offset_bytes, target.end_bytes), layer))
    for layer in range(len(plan.experts)):
        slot = plan.expert_slot(Layout.TP, layer)
        if any(memory[b] != layer for b in range(slot.offset_bytes, slot.end_bytes)):
            return False
    return True


def test_a_wrong_name_says_so() -> None:
    with pytest.raises(ArenaError, match="no slot 'kw'"):
        small().slot("kw")


def test_one_layout_has_no_spare_slot() -> None:
    plan = small(layouts=(Layout.EP,))
    assert plan.overhead_bytes(Layout.EP) == plan.slot("scratch").num_bytes
