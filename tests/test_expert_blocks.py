"""The blocked expert format: who owns what, and the exact copies of a switch."""

from __future__ import annotations

import collections

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_compiler.errors import UnsupportedError
from moe_compiler.expert_blocks import ALIGNMENT_BYTES, ExpertBlocks, Layout, moves
from moe_compiler.ir import ActivationKind, ActivationSpec, ExpertSpec, GateLayout

WAYS = ((Layout.EP, Layout.TP), (Layout.TP, Layout.EP))

shapes = st.builds(
    lambda experts, ranks, hidden, width, gated, b13, b2, dtype: ExpertBlocks(
        num_experts=experts,
        num_ranks=ranks,
        hidden=hidden,
        intermediate=width * ranks,
        gated=gated,
        has_b13=b13,
        has_b2=b2,
        dtype=dtype,
    ),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["bf16", "fp32"]),
)


def random_layer(blocks: ExpertBlocks, layout: Layout) -> list[torch.Tensor]:
    """Random bytes where blocks lie, 255 elsewhere; one tensor a rank."""
    ranks = []
    for rank in range(blocks.num_ranks):
        layer = torch.full((blocks.num_bytes(layout),), 255, dtype=torch.uint8)
        for region in blocks.regions(layout):
            for expert in blocks.owned_experts(layout, rank):
                for block in range(blocks.num_ranks):
                    owner, place = blocks.owner(layout, expert, block)
                    if owner == rank:
                        at = region.offset_bytes + place * region.block_bytes
                        layer[at : at + region.block_bytes].random_(0, 250)
        ranks.append(layer)
    return ranks


def apply(
    blocks: ExpertBlocks, source: Layout, target: Layout, ranks: list[torch.Tensor]
) -> list[torch.Tensor]:
    out = [
        torch.full((blocks.num_bytes(target),), 255, dtype=torch.uint8)
        for _ in range(blocks.num_ranks)
    ]
    for move in moves(blocks, source, target):
        piece = ranks[move.src_rank][move.src_offset : move.src_offset + move.num_bytes]
        out[move.dst_rank][move.dst_offset : move.dst_offset + move.num_bytes] = piece
    return out


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_moves_are_exact(blocks: ExpertBlocks) -> None:
    """Every block moves once, no byte is written twice, and there and back is the identity."""
    for source, target in WAYS:
        found = moves(blocks, source, target)
        written: collections.Counter[tuple[int, int]] = collections.Counter()
        for move in found:
            for byte in range(move.dst_offset, move.dst_offset + move.num_bytes):
                written[move.dst_rank, byte] += 1
        assert set(written.values()) == {1}
        of_layer = sum(r.block_bytes for r in blocks.regions(source))
        assert sum(m.num_bytes for m in found) == of_layer * blocks.num_experts * blocks.num_ranks
        crossing = sum(m.num_bytes for m in found if m.crosses)
        assert crossing == of_layer * blocks.num_experts * (blocks.num_ranks - 1)
        before = random_layer(blocks, source)
        after = apply(blocks, target, source, apply(blocks, source, target, before))
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_thousand_round_trips_leave_every_byte() -> None:
    blocks = ExpertBlocks(
        num_experts=6, num_ranks=4, hidden=8, intermediate=12, has_b13=True, has_b2=True
    )
    before = random_layer(blocks, Layout.EP)
    now = before
    for _ in range(1000):
        now = apply(blocks, Layout.TP, Layout.EP, apply(blocks, Layout.EP, Layout.TP, now))
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_regions_are_aligned_and_apart(blocks: ExpertBlocks) -> None:
    for layout in Layout:
        end = 0
        for region in blocks.regions(layout):
            assert region.offset_bytes >= end
            assert region.offset_bytes % ALIGNMENT_BYTES == 0
            end = region.offset_bytes + region.block_bytes * blocks.num_places(layout)
        assert end <= blocks.num_bytes(layout)


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_every_block_has_one_owner(blocks: ExpertBlocks) -> None:
    for layout in Layout:
        places = [
            blocks.owner(layout, e, b)
            for e in range(blocks.num_experts)
            for b in range(blocks.num_ranks)
        ]
        assert len(set(places)) == len(places)
        assert all(place < blocks.num_places(layout) for _, place in places)
        for rank in range(blocks.num_ranks):
            held = {e for e in range(blocks.num_experts) for b in range(blocks.num_ranks)
                    if blocks.owner(layout, e, b)[0] == rank}  # fmt: skip
            assert held == set(blocks.owned_experts(layout, rank))


def spec(**changes: object) -> ExpertSpec:
    fields = {
        "num_experts": 8,
        "hidden": 16,
        "intermediate": 12,
        "gate_layout": GateLayout.INTERLEAVED,
        "activation": ActivationSpec(kind=ActivationKind.SILU),
        **changes,
    }
    return ExpertSpec(**fields)  # type: ignore[arg-type]


def test_local_specs_are_narrow_and_canonical() -> None:
    blocks = ExpertBlocks.of(spec(num_experts=6), 4, "bf16")
    for layout, count in ((Layout.TP, 6), (Layout.EP, 8)):
        local = blocks.local_spec(spec(num_experts=6), layout)
        assert (local.num_experts, local.intermediate) == (count, 3)
        assert local.gate_layout is GateLayout.CONCAT
        shapes = [(local.num_experts, *r.block_shape) for r in blocks.regions(layout)]
        assert shapes == [local.tensor_shape(role) for role in local.tensor_roles]


def test_width_that_the_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="I = 12"):
        ExpertBlocks.of(spec(), 5, "bf16")
