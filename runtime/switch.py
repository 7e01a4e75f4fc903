"""The live switch: experts change their layout between two steps, layer by layer, in place.

```
LayoutStore    one rank's arena and which layout it holds; refit and switch
SwitchReport   what one rank saw of a switch
```

All ranks call `switch` together. What fails before the first byte moves leaves the old layout
serving; what fails later marks the store as torn, and a torn store hands out nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_compiler.errors import LayoutError, SwitchError
from moe_compiler.expert_blocks import Layout, moves
from moe_compiler.ir import ExpertSpec
from moe_compiler.runtime.arena_views import Arena, region_view, write_expert
from moe_compiler.runtime.transfer import Transfer

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SwitchReport:
    """What one rank saw of a switch.

    Attributes:
        source, target: the layouts.
        done: whether the model is in `target` now; if not, the switch was refused and `source` serves on.
        reason: why it was refused, or why nothing had to be done; "".
        way: what moved the bytes: "peer copies" | "all-to-all".
        way_reason: why it was not peer copies; "".
        num_layers: MoE layers that changed their place.
        crossed_bytes: bytes that came from other ranks.
        local_bytes: bytes that only changed their place on this rank.
        phase_ms: pairs (phase, wall milliseconds): "ready", "experts", "check".
        link_gbps: what the same way reached at start-up in one large copy, in GB/s; 0.0 where not measured.
    """

    source: Layout
    target: Layout
    done: bool
    reason: str = ""
    way: str = ""
    way_reason: str = ""
    num_layers: int = 0
    crossed_bytes: int = 0
    local_bytes: int = 0
    phase_ms: tuple[tuple[str, float], ...] = ()
    link_gbps: float = 0.0

    @property
    def total_ms(self) -> float:
        """Wall milliseconds of all phases."""
        return sum(ms for _, ms in self.phase_ms)

    @property
    def gbps(self) -> float:
        """GB/s at which bytes of other ranks arrived, while experts moved."""
        ms = dict(self.phase_ms).get("experts", 0.0)
        return self.crossed_bytes / ms / 1e6 if ms else 0.0

    @property
    def link_share(self) -> float:
        """`gbps` as a part of the measured link; 0.0 where none was measured."""
        return self.gbps / self.link_gbps if self.link_gbps else 0.0


class LayoutStore:
    """One rank's experts, in one of two layouts at a time.

    Args:
        arena: the rank's arena.
        rank: this rank.
        transfer: how layers move.
        layout: the layout that the arena's experts are, or will be, written in.
        group: the process group; None for the default one.
        link_gbps: what `measure_link` found; 0.0 for none.
        absent: why the arena was not planned for a layout.
        way_reason: why `transfer` is not by peer copies.
    """

    def __init__(
        self,
        arena: Arena,
        rank: int,
        transfer: Transfer,
        layout: Layout,
        *,
        group: Any = None,
        link_gbps: float = 0.0,
        absent: Mapping[Layout, str] | None = None,
        way_reason: str = "",
    ) -> None:
        self.arena = arena
        self.rank = rank
        self._transfer = transfer
        self._layout = layout
        self._group = group
        self._link_gbps = link_gbps
        self._absent = dict(absent or {})
        self._way_reason = way_reason
        self._torn = ""
        if layout not in arena.plan.layouts:
            raise LayoutError(self._lacks(layout))
        ways = ((Layout.EP, Layout.TP), (Layout.TP, Layout.EP))
        self._moves = {
            target: tuple(moves(b, source, target) for b in arena.plan.experts)
            for source, target in (ways if len(arena.plan.layouts) > 1 else ())
        }

    @property
    def layout(self) -> Layout:
        """The layout that is served.

        Raises:
            SwitchError: an earlier switch was torn.
        """
        if self._torn:
            raise SwitchError(self._torn)
        return self._layout

    def experts(self, layer: int) -> tuple[Tensor, ...]:
        """Expert tensors of a layer in the active layout.

        Raises:
            SwitchError: an earlier switch was torn.
        """
        return self.arena.experts(self.layout, layer)

    def refit(
        self, layer: int, spec: ExpertSpec, expert: int, tensors: Mapping[str, Tensor]
    ) -> int:
        """Write new values of one expert in place; see `write_expert`.

        Raises:
            SwitchError: an earlier switch was torn.
        """
        return write_expert(self.arena, self.layout, layer, self.rank, expert, spec, tensors)

    def renew_if_torn(self) -> None:
        """Where the switch of any rank was torn, all serve the first layout again; every rank calls this.

        The caller writes all experts anew, and nothing is served before that.
        """
        torn: list[Any] = [self._torn] * self.arena.plan.num_ranks
        if dist.is_initialized():
            dist.all_gather_object(torn, self._torn, group=self._group)
        if any(torn):
            self._layout, self._torn = self.arena.plan.layouts[0], ""

    def switch(self, target: Layout, *, check: bool = False) -> SwitchReport:
        """Bring all experts into `target`; every rank has to call this.

        A layout that the arena was not planned for is refused in the report, and nothing changes.

        Args:
            target: the layout to serve.
            check: compare a sum over every block before and after, on its old and its new owner.

        Raises:
            SwitchError: a rank did not answer. Before the first byte the old layout still serves; later the
                store is torn, and the model has to be loaded again.
        """
        source = self.layout
        if target not in self.arena.plan.layouts:
            log.warning("no switch to %s: %s", target, self._lacks(target))
            return SwitchReport(
                source=source, target=target, done=False, reason=self._lacks(target)
            )
        if target is source:
            return SwitchReport(
                source=source, target=target, done=True, reason=f"the model is in {target} already"
            )
        clock = _Clock()
        with clock.phase("ready"), self._intact(source, target):
            self._transfer.barrier()
        before = None
        if check:
            with clock.phase("check"), self._intact(source, target):
                before = self._block_sums(source)
        self._torn = (
            f"a switch from {source} to {target} was interrupted: some layers lie in one layout, "
            "some in the other. Load the model again."
        )
        with clock.phase("experts"), self._torn_by(source, target):
            for layer in self.arena.plan.order(target):
                self._move_layer(layer, source, target)
        if before is not None:
            with clock.phase("check"), self._torn_by(source, target):
                self._compare(before, self._block_sums(target))
        self._layout = target
        self._torn = ""
        return self._report(source, target, clock)

    def _lacks(self, layout: Layout) -> str:
        have = ", ".join(self.arena.plan.layouts)
        reason = self._absent.get(layout, "")
        return f"the arena was planned for {have} alone" + (f": {reason}" if reason else "")

    def _move_layer(self, layer: int, source: Layout, target: Layout) -> None:
        plan = self.arena.plan
        self._transfer.move(
            self._moves[target][layer],
            plan.expert_slot(source, layer).offset_bytes,
            plan.expert_slot(target, layer).offset_bytes,
        )

    @contextlib.contextmanager
    def _intact(self, source: Layout, target: Layout) -> Iterator[None]:
        """What fails in here has moved nothing."""
        try:
            yield
        except Exception as error:
            raise SwitchError(
                f"no switch from {source} to {target}: a rank did not come ({error}). Nothing was moved; "
                f"this rank still holds {source}."
            ) from error

    @contextlib.contextmanager
    def _torn_by(self, source: Layout, target: Layout) -> Iterator[None]:
        """What fails in here leaves the store torn, as `switch` has marked it."""
        try:
            yield
        except Exception as error:
            log.exception("the switch from %s to %s was torn", source, target)
            raise SwitchError(f"{self._torn} Cause: {error}") from error

    def _report(self, source: Layout, target: Layout, clock: _Clock) -> SwitchReport:
        mine = [m for layer in self._moves[target] for m in layer if m.dst_rank == self.rank]
        return SwitchReport(
            source=source,
            target=target,
            done=True,
            way=self._transfer.name,
            way_reason=self._way_reason,
            num_layers=len(self.arena.plan.experts),
            crossed_bytes=sum(m.num_bytes for m in mine if m.crosses),
            local_bytes=sum(m.num_bytes for m in mine if not m.crosses),
            phase_ms=tuple(clock.ms.items()),
            link_gbps=self._link_gbps,
        )

    def _block_sums(self, layout: Layout) -> Tensor:
        """A sum over every block of every layer [layers * roles, E, R] int64, known to all ranks."""
        layers = []
        for layer, blocks in enumerate(self.arena.plan.experts):
            start = self.arena.plan.expert_slot(layout, layer).offset_bytes
            layer_bytes = self.arena.memory[start : start + blocks.num_bytes(layout)]
            for region in blocks.regions(layout):
                view = region_view(blocks, layout, region, layer_bytes).flatten(1)
                words = view.view(torch.int16).sum(1, dtype=torch.int64)
                sums = words.new_zeros(blocks.num_experts, blocks.num_blocks)
                for expert in blocks.owned_experts(layout, self.rank):
                    for block in range(blocks.num_blocks):
                        owner, place = blocks.owner(layout, expert, block)
                        if owner == self.rank:
                            sums[expert, block] = words[place]
                layers.append(sums.flatten())
        total = torch.cat(layers) if layers else torch.zeros(0, dtype=torch.int64)
        if dist.is_initialized():
            dist.all_reduce(total, group=self._group)
        return total

    def _compare(self, before: Tensor, after: Tensor) -> None:
        wrong = (before != after).nonzero().flatten()
        if len(wrong):
            raise SwitchError(
                f"{len(wrong)} of {len(before)} blocks changed their bytes on the way"
            )


class _Clock:
    """Wall milliseconds by phase."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.ms[name] = self.ms.get(name, 0.0) + (time.perf_counter() - start) * 1e3
