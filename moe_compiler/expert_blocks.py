"""How the experts of one layer lie in memory under two layouts, and what a switch has to move.

Every expert is cut along I into R blocks, and a block is the unit of ownership:

```
W13 [E][R][2][I/R][H]    W2 [E][R][H][I/R]    b13 [E][R][2][I/R]    b2 [E][R][H]
ep: rank r holds all blocks of its experts    [E/R][R][block]
tp: rank r holds block r of every expert      [E][block]
```

A layout is a permutation of whole blocks over (rank, place), so that a switch copies contiguous
bytes only. Both layouts read as stacks of narrow experts of width I/R: in EP an expert is R of them,
whose results add up. `b2` belongs to block 0; the other blocks hold zeros there. Experts that are
never cut are one block each, and there is no TP then.

Pure arithmetic: no tensor, no device.
"""

from __future__ import annotations

import dataclasses

from moe_compiler.errors import UnsupportedError
from moe_compiler.ir import ExpertSpec, GateLayout, Name, Orientation

ALIGNMENT_BYTES = 256
"""Every role of a layer, and every slot, starts at a multiple: enough for TMA and for any vector unit."""

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


class Layout(Name):
    """Who holds what."""

    EP = "ep"  # experts whole, E/R a rank; attention data-parallel
    TP = "tp"  # every expert and the attention heads cut over the ranks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Where the tensor of one role lies inside of a layer's bytes.

    Attributes:
        role: "w13" (or "w1" where not gated), "b13" (or "b1"), "w2", "b2".
        offset_bytes: from the start of the layer.
        block_shape: shape of one block.
        block_bytes: bytes of one block.
    """

    role: str
    offset_bytes: int
    block_shape: tuple[int, ...]
    block_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One contiguous copy of a switch; offsets count from the start of the layer's slot.

    Attributes:
        role: role of the tensor.
        src_rank, src_offset: where the bytes are.
        dst_rank, dst_offset: where they go.
        num_bytes: how many.
    """

    role: str
    src_rank: int
    src_offset: int
    dst_rank: int
    dst_offset: int
    num_bytes: int

    @property
    def crosses(self) -> bool:
        """Whether the bytes change their owner."""
        return self.src_rank != self.dst_rank


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBlocks:
    """The blocked experts of one layer.

    Attributes:
        num_experts: E.
        num_ranks: R.
        hidden: H.
        intermediate: I, a multiple of the number of blocks.
        gated: two projections in front of the activation.
        has_b13, has_b2: biases.
        dtype: "bf16" | "fp16" | "fp32" | "fp64".
        whole: experts are not cut: one block each, for EP alone.
    """

    num_experts: int
    num_ranks: int
    hidden: int
    intermediate: int
    gated: bool = True
    has_b13: bool = False
    has_b2: bool = False
    dtype: str = "bf16"
    whole: bool = False

    @staticmethod
    def of(spec: ExpertSpec, num_ranks: int, dtype: str, *, whole: bool = False) -> ExpertBlocks:
        """The blocks of a layer's experts.

        Raises:
            UnsupportedError: I is no multiple of R, so that no rank can hold an equal part of an expert.
        """
        if not whole and spec.intermediate % num_ranks:
            raise UnsupportedError(
                f"tensor parallelism needs an expert width I that {num_ranks} ranks divide; got I = "
                f"{spec.intermediate}. Run this model with layouts=('ep',), or on another number of ranks"
            )
        return ExpertBlocks(
            num_experts=spec.num_experts,
            num_ranks=num_ranks,
            hidden=spec.hidden,
            intermediate=spec.intermediate,
            gated=spec.gated,
            has_b13=spec.has_b13,
            has_b2=spec.has_b2,
            dtype=dtype,
            whole=whole,
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of an expert: R, or 1 where experts are whole."""
        return 1 if self.whole else self.num_ranks

    @property
    def width(self) -> int:
        """Width of a block: I/R, or I where experts are whole."""
        return self.intermediate // self.num_blocks

    @property
    def experts_per_rank(self) -> int:
        """Experts that a rank holds in EP; the last ranks hold fewer where R does not divide E."""
        return -(-self.num_experts // self.num_ranks)

    def num_places(self, layout: Layout) -> int:
        """Places for blocks on one rank; all are filled in TP, in EP where R divides E."""
        if layout is Layout.TP:
            return self.num_experts
        return self.experts_per_rank * self.num_blocks

    def owner(self, layout: Layout, expert: int, block: int) -> tuple[int, int]:
        """(rank, place) of a block."""
        if layout is Layout.TP:
            return block, expert
        rank, local = divmod(expert, self.experts_per_rank)
        return rank, local * self.num_blocks + block

    def owned_experts(self, layout: Layout, rank: int) -> range:
        """The experts of which `rank` holds a block."""
        if layout is Layout.TP:
            return range(self.num_experts)
        first = min(rank * self.experts_per_rank, self.num_experts)
        return range(first, min(first + self.experts_per_rank, self.num_experts))

    def regions(self, layout: Layout) -> tuple[Region, ...]:
        """The tensors of one rank's layer, in the order of the op's expert tensors."""
        found = []
        offset = 0
        for role, shape in self._block_shapes():
            size = ITEM_BYTES[self.dtype]
            for extent in shape:
                size *= extent
            found.append(
                Region(role=role, offset_bytes=offset, block_shape=shape, block_bytes=size)
            )
            offset = align(offset + size * self.num_places(layout))
        return tuple(found)

    def num_bytes(self, layout: Layout) -> int:
        """Bytes of the layer on one rank, a multiple of the alignment."""
        last = self.regions(layout)[-1]
        return align(last.offset_bytes + last.block_bytes * self.num_places(layout))

    def local_spec(self, spec: ExpertSpec, layout: Layout) -> ExpertSpec:
        """The narrow experts that one rank's op runs: `num_places` of width I/R, in canonical form.

        TP: narrow expert e is the rank's block of expert e. EP: narrow expert `local * num_blocks + block`.
        """
        return dataclasses.replace(
            spec,
            num_experts=self.num_places(layout),
            intermediate=self.width,
            gate_layout=GateLayout.CONCAT if self.gated else GateLayout.NONE,
            w13_orientation=Orientation.OUT_IN,
            w2_orientation=Orientation.OUT_IN,
            stacked=True,
        )

    def _block_shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        halves = 2 if self.gated else 1
        first, first_bias = ("w13", "b13") if self.gated else ("w1", "b1")
        found: list[tuple[str, tuple[int, ...]]] = [(first, (halves * self.width, self.hidden))]
        if self.has_b13:
            found.append((first_bias, (halves * self.width,)))
        found.append(("w2", (self.hidden, self.width)))
        if self.has_b2:
            found.append(("b2", (self.hidden,)))
        return tuple(found)


def moves(blocks: ExpertBlocks, source: Layout, target: Layout) -> tuple[Move, ...]:
    """Every copy that turns a layer from one layout into the other.

    Each block is named once: those with `Move.crosses` change their owner, the others only their
    place. Ordered by target rank, then by target offset.
    """
    found = []
    for src, dst in zip(blocks.regions(source), blocks.regions(target), strict=True):
        for expert in range(blocks.num_experts):
            for block in range(blocks.num_blocks):
                src_rank, src_place = blocks.owner(source, expert, block)
                dst_rank, dst_place = blocks.owner(target, expert, block)
                found.append(
                    Move(
                        role=src.role,
                        src_rank=src_rank,
                        src_offset=src.offset_bytes + src_place * src.block_bytes,
                        dst_rank=dst_rank,
                        dst_offset=dst.offset_bytes + dst_place * dst.block_bytes,
                        num_bytes=src.block_bytes,
                    )
                )
    return tuple(sorted(found, key=lambda move: (move.dst_rank, move.dst_offset)))


def align(num_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
