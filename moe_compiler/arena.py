"""The arena of one rank: one allocation, planned as a table of named slots for both layouts.

```
weights/...        what both layouts read; TP takes slices of the one full copy
ep/experts/i  }    N+1 expert slots for N layers: layer i lies in slot i under TP, in slot i+1 under EP
tp/experts/i  }
kv, requests, scratch, control
```

EP -> TP moves the layers forward, TP -> EP backward, so that a layer is never written over one that
somebody still has to read. `verify` proves that on the table itself, byte by byte: it knows nothing
of the rule by which the table was made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from moe_compiler.errors import ArenaError
from moe_compiler.expert_blocks import ALIGNMENT_BYTES, ExpertBlocks, Layout, align

SWITCHING = "switch"
"""The time between two layouts, beside the names of the layouts in `Slot.lifetimes`."""

ALWAYS = (Layout.EP.value, Layout.TP.value, SWITCHING)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A named range of the arena.

    Attributes:
        name: unique, `part/name`.
        offset_bytes: from the start of the arena.
        num_bytes: its length; above 0.
        lifetimes: when its bytes must not be written by anyone else: "ep", "tp", "switch".
    """

    name: str
    offset_bytes: int
    num_bytes: int
    lifetimes: tuple[str, ...] = ALWAYS

    @property
    def end_bytes(self) -> int:
        """First byte behind it."""
        return self.offset_bytes + self.num_bytes

    @property
    def part(self) -> str:
        """What kind of slot it is: the name up to its last `/`."""
        return self.name.rpartition("/")[0] or self.name

    def overlaps(self, other: Slot) -> bool:
        """Whether they share a byte."""
        return self.offset_bytes < other.end_bytes and other.offset_bytes < self.end_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightUse:
    """A tensor that both layouts read, and how much of it TP alone would need.

    Attributes:
        name: qualified name of the parameter or buffer.
        num_bytes: of the full tensor.
        tp_bytes: of the part that one rank uses under TP.
    """

    name: str
    num_bytes: int
    tp_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArenaPlan:
    """The table.

    Attributes:
        num_ranks: R.
        layouts: what the arena can hold, the initial one first.
        slots: all slots, by offset.
        experts: blocks of every MoE layer, in model order.
        weights: what both layouts read.
        forward: order of the layers from EP to TP.
        backward: order of the layers from TP to EP.
    """

    num_ranks: int
    layouts: tuple[Layout, ...]
    slots: tuple[Slot, ...]
    experts: tuple[ExpertBlocks, ...]
    weights: tuple[WeightUse, ...] = ()
    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the arena, the same on every rank."""
        return max((slot.end_bytes for slot in self.slots), default=0)

    def slot(self, name: str) -> Slot:
        """The slot of a name.

        Raises:
            ArenaError: there is none.
        """
        for slot in self.slots:
            if slot.name == name:
                return slot
        raise ArenaError(f"the arena has no slot {name!r}; it has {len(self.slots)} others")

    def expert_slot(self, layout: Layout, layer: int) -> Slot:
        """Where the experts of a layer lie."""
        return self.slot(expert_slot_name(layout, layer))

    def order(self, target: Layout) -> tuple[int, ...]:
        """The order in which a switch to `target` moves the layers."""
        return self.forward if target is Layout.TP else self.backward

    def static_bytes(self, layout: Layout) -> int:
        """What a rank would need that knew this layout alone."""
        both = sum(s.num_bytes for s in self.slots if s.part in ("kv", "requests"))
        experts = sum(blocks.num_bytes(layout) for blocks in self.experts)
        weights = sum(
            align(use.tp_bytes if layout is Layout.TP else use.num_bytes) for use in self.weights
        )
        return both + experts + weights

    def overhead_bytes(self, layout: Layout) -> int:
        """What the arena holds beyond `static_bytes`."""
        return self.num_bytes - self.static_bytes(layout)

    @property
    def better_static(self) -> Layout:
        """The layout that alone needs the fewest bytes."""
        return min(self.layouts, key=self.static_bytes)


def expert_slot_name(layout: Layout, layer: int) -> str:
    """Name of the slot of a layer's experts."""
    return f"{layout.value}/experts/{layer:03d}"


def plan_arena(
    *,
    num_ranks: int,
    layouts: Sequence[Layout],
    experts: Sequence[ExpertBlocks],
    weights: Sequence[WeightUse] = (),
    sizes: Mapping[str, int] | None = None,
) -> ArenaPlan:
    """Plan one rank's arena and prove the plan.

    Args:
        num_ranks: R.
        layouts: the layouts that it must hold, the initial one first.
        experts: blocks of every MoE layer, in model order.
        weights: what both layouts read.
        sizes: bytes of further slots by name ("kv", "requests", "scratch", "control"); 0 leaves one out.

    Raises:
        ArenaError: the table is wrong, a fault of this project.
    """
    slots = []
    offset = 0
    for use in weights:
        slots.append(_slot(f"weights/{use.name}", offset, use.num_bytes))
        offset = slots[-1].end_bytes
    placed, offset = _place_experts(tuple(layouts), experts, offset)
    slots += placed
    for name, num_bytes in (sizes or {}).items():
        if num_bytes:
            slots.append(_slot(name, offset, num_bytes))
            offset = slots[-1].end_bytes
    plan = ArenaPlan(
        num_ranks=num_ranks,
        layouts=tuple(layouts),
        slots=tuple(sorted(slots, key=lambda slot: (slot.offset_bytes, slot.name))),
        experts=tuple(experts),
        weights=tuple(weights),
        forward=tuple(range(len(experts))),
        backward=tuple(reversed(range(len(experts)))),
    )
    faults = verify(plan)
    if faults:
        raise ArenaError("the arena plan is wrong, a fault of moeflex: " + "; ".join(faults[:5]))
    return plan


def _place_experts(
    layouts: tuple[Layout, ...], experts: Sequence[ExpertBlocks], start: int
) -> tuple[list[Slot], int]:
    """TP from the start on; EP behind a gap as large as the largest layer. Layers of one size give N+1 slots."""
    sizes = [max(blocks.num_bytes(layout) for layout in layouts) for blocks in experts]
    gap = max(sizes, default=0) if len(layouts) > 1 else 0
    slots = []
    end = start
    for layout in layouts:
        offset = start + (gap if layout is Layout.EP else 0)
        for layer, (blocks, size) in enumerate(zip(experts, sizes, strict=True)):
            used = blocks.num_bytes(layout)
            slots.append(
                _slot(expert_slot_name(layout, layer), offset, used, (layout.value, SWITCHING))
            )
            offset += size
        end = max(end, offset)
    return slots, end


def _slot(name: str, offset: int, num_bytes: int, lifetimes: tuple[str, ...] = ALWAYS) -> Slot:
    return Slot(name=name, offset_bytes=offset, num_bytes=align(num_bytes), lifetimes=lifetimes)


def verify(plan: ArenaPlan) -> list[str]:
    """What is wrong with a plan, one sentence each; empty for a plan that may be used.

    Checked on the table alone: alignment and unique names; every layer has a slot of its size under every
    layout; slots that live at the same time share no byte; in both directions, every layer is intact when it
    is read, lies in its place at the end, and no byte that somebody still needs is written.
    """
    faults = _check_slots(plan)
    for layout in plan.layouts:
        for layer, blocks in enumerate(plan.experts):
            found = [s for s in plan.slots if s.name == expert_slot_name(layout, layer)]
            if blocks.whole and layout is Layout.TP:
                faults.append(f"the experts of layer {layer} are whole; TP needs them cut")
            if not found:
                faults.append(f"layer {layer} has no slot under {layout}")
            elif found[0].num_bytes < blocks.num_bytes(layout):
                faults.append(
                    f"{found[0].name} holds {found[0].num_bytes} bytes; layer {layer} needs "
                    f"{blocks.num_bytes(layout)}"
                )
    if faults:
        return faults
    faults += _check_overlap(plan)
    if len(plan.layouts) > 1:
        faults += _check_order(plan, Layout.EP, Layout.TP)
        faults += _check_order(plan, Layout.TP, Layout.EP)
    return faults


def _check_slots(plan: ArenaPlan) -> list[str]:
    faults = []
    names = [slot.name for slot in plan.slots]
    faults += [
        f"two slots are called {name}" for name in sorted(set(names)) if names.count(name) > 1
    ]
    for slot in plan.slots:
        if slot.offset_bytes < 0 or slot.offset_bytes % ALIGNMENT_BYTES:
            faults.append(
                f"{slot.name} starts at {slot.offset_bytes}, no multiple of the alignment"
            )
        if slot.num_bytes <= 0:
            faults.append(f"{slot.name} is empty")
        unknown = set(slot.lifetimes) - set(ALWAYS)
        if unknown or not slot.lifetimes:
            faults.append(f"{slot.name} has the lifetimes {slot.lifetimes}")
    return faults


def _is_experts(slot: Slot) -> bool:
    return slot.part.endswith("/experts")


def _check_overlap(plan: ArenaPlan) -> list[str]:
    """Slots that live together; two expert slots of different layouts are judged by the order."""
    faults = []
    ordered = sorted(plan.slots, key=lambda slot: slot.offset_bytes)
    for index, slot in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if other.offset_bytes >= slot.end_bytes:
                break
            shared = set(slot.lifetimes) & set(other.lifetimes)
            if _is_experts(slot) and _is_experts(other):
                shared -= {SWITCHING}
            if shared:
                faults.append(f"{slot.name} and {other.name} overlap while {min(shared)} is active")
    return faults


def _check_order(plan: ArenaPlan, source: Layout, target: Layout) -> list[str]:
    """Play a switch: which layer's bytes every expert slot still holds."""
    way = f"{source} -> {target}"
    order = plan.order(target)
    if sorted(order) != list(range(len(plan.experts))):
        return [f"{way} moves the layers {order}, not each of {len(plan.experts)} once"]
    faults = []
    waiting = {layer: plan.expert_slot(source, layer) for layer in order}
    arrived: dict[int, Slot] = {}
    others = [s for s in plan.slots if not _is_experts(s) and SWITCHING in s.lifetimes]
    for layer in order:
        written = plan.expert_slot(target, layer)
        # Peers read the source until the step is over, so it may not be written in this step either.
        for needed in (*waiting.values(), *arrived.values(), *others):
            if written.overlaps(needed):
                faults.append(
                    f"{way}: layer {layer} is written to {written.name} over {needed.name}"
                )
        del waiting[layer]
        arrived[layer] = written
    return faults
