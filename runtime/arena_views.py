"""The arena of one rank as tensors: expert views of either layout, written block by block.

The memory comes from outside (a shared segment, a plain tensor); nothing is allocated here but
views.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_compiler.arena import ArenaPlan, expert_slot_name
from moe_compiler.errors import ArenaError
from moe_compiler.expert_blocks import ExpertBlocks, Layout, Region
from moe_compiler.ir import ExpertSpec, GateLayout, Orientation
from moe_compiler.reference import DTYPES


class Arena:
    """One rank's memory, read by the names of the plan.

    Args:
        plan: the table.
        memory: at least `plan.num_bytes` of uint8, contiguous.

    Raises:
        ArenaError: the memory does not fit the plan.
    """

    def __init__(self, plan: ArenaPlan, memory: Tensor) -> None:
        if memory.dtype is not torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
            raise ArenaError(
                f"an arena lies in contiguous uint8 of one axis; got {memory.dtype} {tuple(memory.shape)}"
            )
        if memory.numel() < plan.num_bytes:
            raise ArenaError(
                f"the plan needs {plan.num_bytes} bytes a rank; the memory has {memory.numel()}"
            )
        self.plan = plan
        self.memory = memory

    def slot_bytes(self, name: str) -> Tensor:
        """The bytes of a slot, uint8."""
        slot = self.plan.slot(name)
        return self.memory[slot.offset_bytes : slot.end_bytes]

    def weight(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The full tensor that both layouts read."""
        num_bytes = shape.numel() * dtype.itemsize
        return self.slot_bytes(f"weights/{name}")[:num_bytes].view(dtype).view(shape)

    def experts(self, layout: Layout, layer: int) -> tuple[Tensor, ...]:
        """Expert tensors [places, *block] of a layer, in the order of the op's expert tensors."""
        blocks = self.plan.experts[layer]
        layer_bytes = self.slot_bytes(expert_slot_name(layout, layer))
        return tuple(
            region_view(blocks, layout, region, layer_bytes) for region in blocks.regions(layout)
        )


def region_view(
    blocks: ExpertBlocks, layout: Layout, region: Region, layer_bytes: Tensor
) -> Tensor:
    """One role of a layer as [places, *block]."""
    places = blocks.num_places(layout)
    end = region.offset_bytes + places * region.block_bytes
    flat = layer_bytes[region.offset_bytes : end].view(DTYPES[blocks.dtype])
    return flat.view(places, *region.block_shape)


def write_expert(
    arena: Arena,
    layout: Layout,
    layer: int,
    rank: int,
    expert: int,
    spec: ExpertSpec,
    tensors: Mapping[str, Tensor],
) -> int:
    """Write the blocks of one expert that `rank` holds under `layout`.

    Args:
        arena: the rank's arena.
        layout: where to write.
        layer: index of the MoE layer.
        rank: this rank.
        expert: index of the expert in the model.
        spec: how `tensors` spell the expert, as in the model.
        tensors: the expert's full tensors by role, without the E axis.

    Returns:
        How many blocks were written; 0 when the rank holds none of the expert.
    """
    blocks = arena.plan.experts[layer]
    views = arena.experts(layout, layer)
    written = 0
    for block in range(blocks.num_blocks):
        owner, place = blocks.owner(layout, expert, block)
        if owner != rank:
            continue
        written += 1
        parts = block_tensors(blocks, spec, tensors, block)
        for view, part in zip(views, parts, strict=True):
            if part is None:
                view[place].zero_()
            else:
                view[place].copy_(part)
    return written


def block_tensors(
    blocks: ExpertBlocks, spec: ExpertSpec, tensors: Mapping[str, Tensor], block: int
) -> list[Tensor | None]:
    """Views on one expert's tensors that make up a block; None where it holds zeros.

    The first projection comes as [halves * I/R, H] of gate, then up, copied together where they are apart.
    """
    rows = slice(block * blocks.width, (block + 1) * blocks.width)
    found: list[Tensor | None] = [_first(spec, tensors, rows, bias=False)]
    if spec.has_b13:
        found.append(_first(spec, tensors, rows, bias=True))
    w2 = tensors["w2"] if spec.w2_orientation is Orientation.OUT_IN else tensors["w2"].t()
    found.append(w2[:, rows])
    if spec.has_b2:
        # The results of the blocks add up, so one of them carries the bias.
        found.append(tensors["b2"] if block == 0 else None)
    return found


def _first(spec: ExpertSpec, tensors: Mapping[str, Tensor], rows: slice, *, bias: bool) -> Tensor:
    """Rows of gate, then of up: [2 * I/R, H], or [2 * I/R] of the bias."""
    kind = "b" if bias else "w"

    def out_in(tensor: Tensor) -> Tensor:
        return tensor if bias or spec.w13_orientation is Orientation.OUT_IN else tensor.t()

    layout = spec.gate_layout
    if layout is GateLayout.NONE:
        return out_in(tensors[f"{kind}1"])[rows]
    if layout is GateLayout.SEPARATE:
        gate, up = (out_in(tensors[f"{kind}{i}"]) for i in (1, 3))
        return torch.cat((gate[rows], up[rows]))
    both = out_in(tensors[f"{kind}13"])
    if layout in (GateLayout.CONCAT, GateLayout.CONCAT_UP_FIRST):
        first, second = both[: spec.intermediate], both[spec.intermediate :]
    else:
        first, second = both[::2], both[1::2]
    if layout in (GateLayout.CONCAT_UP_FIRST, GateLayout.INTERLEAVED_UP_FIRST):
        first, second = second, first
    return torch.cat((first[rows], second[rows]))
