"""The whole MoE layer as four Triton launches (six for many tokens), for GPUs that the Hopper kernel does not serve.

`layer` allocates, launches and returns: outside of a trace it runs, and in a traced graph (of
`torch.compile`, `torch.export`) its kernels are seen by Inductor one by one, as any Triton kernel
of the user. No host synchronisation, no atomics: CUDA graphs capture it, and two calls give the
same bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_compiler.ir import (
    ActivationSpec,
    ExpertSpec,
    GateLayout,
    MoEPlan,
    Orientation,
    WeightPosition,
)
from moe_compiler.reference import DTYPES
from moe_compiler.runtime.triton_launch import launchable
from moe_compiler.runtime.triton_router import at_least_one

# Routes that a program of the sort takes at a time. No fewer than its threads: Triton 3.6 counts values
# that two warps hold twice.
_MIN_CHUNK, _MAX_CHUNK = 128, 2048
_EXPERTS_AT_ONCE = 8
# What the kernel takes for "no limit": an infinity cannot be written into a source.
_NO_LIMIT = 1e39


class Tile(Protocol):
    """What the launch reads of `codegen.triton.TritonTile`."""

    @property
    def block_m(self) -> int: ...  # noqa: D102
    @property
    def block_n(self) -> int: ...  # noqa: D102
    @property
    def block_k(self) -> int: ...  # noqa: D102
    @property
    def group(self) -> int: ...  # noqa: D102
    @property
    def num_warps(self) -> int: ...  # noqa: D102
    @property
    def num_stages(self) -> int: ...  # noqa: D102


class Config(Protocol):
    """What the launch reads of `codegen.triton.TritonConfig`."""

    @property
    def gate_up(self) -> Tile: ...  # noqa: D102
    @property
    def down(self) -> Tile: ...  # noqa: D102
    @property
    def sort_in_parts(self) -> bool: ...  # noqa: D102


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Routes:
    """Routes sorted by expert, cut into tiles of rows of one expert.

    Attributes:
        routes: [R] int32, valid ones first.
        tiles: expert, first row and end of the expert's rows [max_tiles] int32 each, and the
            number of tiles [1].
        max_tiles: how many tiles there can be.
    """

    routes: Tensor
    tiles: tuple[Tensor, Tensor, Tensor, Tensor]
    max_tiles: Any


def layer(
    plan: MoEPlan,
    config: Config,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Sequence[Tensor],
) -> Tensor:
    """Experts on routed tokens: x [T, H] -> [T, H] in the plan's out dtype.

    Args:
        plan: the plan; its router is not read.
        config: tile sizes.
        x: [T, H] bf16, fp16 or fp32; rows of any stride.
        ids: [T, K] int32 or int64; a route whose id is not in [0, E) contributes nothing.
        weights: [T, K] bf16, fp16 or fp32.
        experts: stacked, as `ExpertSpec.tensor_roles` says, in the dtype of x.

    Returns:
        [T, H]; sums over k are fp32, in the order of k.
    """
    spec, num_tokens = plan.experts, x.shape[0]
    out_dtype = DTYPES[plan.out_dtype] if plan.out_dtype else x.dtype
    out = torch.empty((num_tokens, spec.hidden), dtype=out_dtype, device=x.device)
    if isinstance(num_tokens, int) and num_tokens == 0:
        return out
    ids, weights = ids.contiguous(), weights.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    tensors = dict(zip(spec.tensor_roles, experts, strict=True))
    routes = _align(spec, config, ids)
    h = _gate_up(plan, config.gate_up, x, weights, tensors, routes, ids.shape[1])
    y = _down(spec, config.down, h, tensors, routes)
    _combine(spec, y, ids, weights, out)
    return out


def _align(spec: ExpertSpec, config: Config, ids: Tensor) -> _Routes:
    num_routes, num_experts = ids.numel(), spec.num_experts
    # Full tiles, and one that is not full for every expert.
    max_tiles = num_routes // config.gate_up.block_m + num_experts
    if isinstance(max_tiles, int):
        max_tiles = min(max_tiles, num_routes)
    make = functools.partial(torch.empty, dtype=torch.int32, device=ids.device)
    tiles = make(max_tiles), make(max_tiles), make(max_tiles), make(1)
    found = _Routes(routes=make(num_routes), tiles=tiles, max_tiles=max_tiles)
    constants = {"E": num_experts, "BINS": 1 << num_experts.bit_length()}
    sort = _sort_in_parts if config.sort_in_parts else _sort_at_once
    sort(ids, found, constants, config.gate_up.block_m)
    return found


def _sort_at_once(ids: Tensor, found: _Routes, constants: dict[str, int], block_m: int) -> None:
    from moe_compiler.runtime.triton_layer_kernels import moeflex_align

    num_routes = ids.numel()
    chunk = _MAX_CHUNK
    if isinstance(num_routes, int):
        chunk = min(_MAX_CHUNK, max(_MIN_CHUNK, 1 << (num_routes - 1).bit_length()))
    launchable(moeflex_align)[(constants["E"],)](
        ids,
        found.routes,
        *found.tiles,
        num_routes,
        **constants,
        BM=block_m,
        CHUNK=chunk,
        num_warps=4,
    )


def _sort_in_parts(ids: Tensor, found: _Routes, constants: dict[str, int], block_m: int) -> None:
    from moe_compiler.runtime.triton_layer_kernels import (
        moeflex_count,
        moeflex_place,
        moeflex_plan,
    )

    num_routes, num_bins = ids.numel(), constants["BINS"]
    num_blocks = (num_routes + _MAX_CHUNK - 1) // _MAX_CHUNK
    counts = torch.empty((num_blocks, num_bins), dtype=torch.int32, device=ids.device)
    before = torch.empty_like(counts)
    # Blocks of one step of the plan: as many as fit into registers.
    blocks = max(1, 8192 // num_bins)
    grid = at_least_one(num_blocks)
    launchable(moeflex_count)[(grid,)](
        ids, counts, num_routes, **constants, CHUNK=_MAX_CHUNK, num_warps=4
    )
    launchable(moeflex_plan)[(1,)](
        counts,
        before,
        *found.tiles,
        num_blocks,
        **constants,
        BM=block_m,
        BLOCKS=blocks,
        num_warps=8,
    )
    launchable(moeflex_place)[(-(-constants["E"] // _EXPERTS_AT_ONCE), grid)](
        ids,
        before,
        found.routes,
        num_routes,
        **constants,
        CHUNK=_MAX_CHUNK,
        EXPERTS=_EXPERTS_AT_ONCE,
        num_warps=4,
    )


def _gate_up(
    plan: MoEPlan,
    tile: Tile,
    x: Tensor,
    weights: Tensor,
    tensors: dict[str, Tensor],
    routes: _Routes,
    top_k: int,
) -> Tensor:
    from moe_compiler.runtime.triton_layer_kernels import moeflex_gate_up

    spec = plan.experts
    separate = spec.gate_layout is GateLayout.SEPARATE
    gate = tensors[spec.tensor_roles[0]]
    up = tensors["w3"] if separate else gate
    gate_b, up_b = x, x
    if spec.has_b13:
        gate_b = tensors["b13" if "b13" in tensors else "b1"].contiguous()
        up_b = tensors["b3"].contiguous() if separate else gate_b
    gate_strides = _strides(gate, spec.w13_orientation)
    up_strides = _strides(up, spec.w13_orientation)
    gate_row, up_row = _first_rows(spec)
    interleaved = spec.gate_layout in (GateLayout.INTERLEAVED, GateLayout.INTERLEAVED_UP_FIRST)
    k_major = spec.w13_orientation is Orientation.OUT_IN and not separate
    num_routes = routes.routes.shape[0]
    h = torch.empty((num_routes, spec.intermediate), dtype=x.dtype, device=x.device)
    num_n = -(-spec.intermediate // tile.block_n)
    launchable(moeflex_gate_up)[(at_least_one(routes.max_tiles * num_n),)](
        x,
        gate,
        up,
        gate_b,
        up_b,
        weights,
        h,
        routes.routes,
        *routes.tiles,
        x.stride(0),
        *gate_strides,
        # An interleaved tile starts at row 0 and is split afterwards.
        0 if interleaved else gate_row * gate_strides[1],
        *up_strides,
        up_row * up_strides[1],
        gate_b.stride(0),
        gate_row,
        up_row,
        H=spec.hidden,
        I=spec.intermediate,
        K=top_k,
        GATED=spec.gated,
        PAIRED=spec.gated and (interleaved or k_major),
        INTERLEAVED=interleaved,
        UP_FIRST=spec.gate_layout is GateLayout.INTERLEAVED_UP_FIRST,
        HAS_BIAS=spec.has_b13,
        WEIGHT_AT=spec.weight_position.value,
        ROUND=plan.round_gemms,
        **_activation(spec.activation),
        **_tile(tile),
    )
    return h


def _strides(weight: Tensor, orientation: Orientation) -> tuple[Any, Any, Any]:
    """Strides of expert, output and input axis of a stacked weight."""
    expert, first, second = weight.stride()
    out_in = orientation is Orientation.OUT_IN
    return (expert, first, second) if out_in else (expert, second, first)


def _first_rows(spec: ExpertSpec) -> tuple[int, int]:
    """Where gate and up begin along the axis of 2I."""
    return {
        GateLayout.CONCAT: (0, spec.intermediate),
        GateLayout.CONCAT_UP_FIRST: (spec.intermediate, 0),
        GateLayout.INTERLEAVED: (0, 1),
        GateLayout.INTERLEAVED_UP_FIRST: (1, 0),
    }.get(spec.gate_layout, (0, 0))


def _down(
    spec: ExpertSpec, tile: Tile, h: Tensor, tensors: dict[str, Tensor], routes: _Routes
) -> Tensor:
    from moe_compiler.runtime.triton_layer_kernels import moeflex_down

    w2 = tensors["w2"]
    b2 = tensors["b2"].contiguous() if spec.has_b2 else h
    y = torch.empty((h.shape[0], spec.hidden), dtype=h.dtype, device=h.device)
    num_n = -(-spec.hidden // tile.block_n)
    launchable(moeflex_down)[(at_least_one(routes.max_tiles * num_n),)](
        h,
        w2,
        b2,
        y,
        routes.routes,
        *routes.tiles,
        *_strides(w2, spec.w2_orientation),
        b2.stride(0),
        H=spec.hidden,
        I=spec.intermediate,
        HAS_BIAS=spec.has_b2,
        **_tile(tile),
    )
    return y


def _combine(spec: ExpertSpec, y: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
    from moe_compiler.runtime.triton_layer_kernels import moeflex_combine

    num_tokens, top_k = ids.shape
    few = isinstance(num_tokens, int) and num_tokens <= 64
    block = 256 if few else 1024
    launchable(moeflex_combine)[(at_least_one(num_tokens), -(-spec.hidden // block))](
        y,
        ids,
        weights,
        out,
        num_tokens,
        H=spec.hidden,
        E=spec.num_experts,
        K=top_k,
        WEIGHTED=spec.weight_position is WeightPosition.OUTPUT,
        BLOCK=block,
        num_warps=4,
    )


def _tile(tile: Tile) -> dict[str, int]:
    return {
        "BM": tile.block_m,
        "BN": tile.block_n,
        "BK": tile.block_k,
        "GROUP": tile.group,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _activation(spec: ActivationSpec) -> dict[str, Any]:
    def limit(value: float) -> float:
        return max(-_NO_LIMIT, min(_NO_LIMIT, value))

    return {
        "KIND": spec.kind.value,
        "ALPHA": spec.alpha,
        "GATE_MIN": limit(spec.gate_min),
        "GATE_MAX": limit(spec.gate_max),
        "UP_MIN": limit(spec.up_min),
        "UP_MAX": limit(spec.up_max),
        "UP_SHIFT": spec.up_shift,
    }
