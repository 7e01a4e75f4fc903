"""Tile sizes of the Triton layer: by rows per expert, the shared memory of the GPU, and the plan.

No tuning run: the table below was chosen on paper and checked on one H200; what a GPU with less
shared memory cannot hold gets fewer stages, then a shorter k step.
"""

from __future__ import annotations

import dataclasses

from moe_compiler.ir import GateLayout, MoEPlan, Score

# Bytes of shared memory that one block may have, by compute capability.
_SHARED_BYTES = {(8, 0): 166912, (8, 7): 166912, (9, 0): 232448, (10, 0): 232448, (10, 3): 232448}
_SMALLEST_SHARED_BYTES = 101376  # sm_86, sm_89, sm_120
_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# Barriers and the transposition of an epilogue.
_RESERVED_BYTES = 2048

OLDEST = (8, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TritonTile:
    """One grouped product: BM rows of an expert times BN columns, BK at a time.

    Attributes:
        block_m, block_n, block_k: BM, BN, BK. BN counts columns of h in the gate/up product, which
            reads twice as many of the weights when gated.
        group: row tiles that share the columns they read.
        num_warps: warps of a program.
        num_stages: depth of the shared-memory ring.
    """

    block_m: int
    block_n: int
    block_k: int
    group: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, num_products: int, dtype: str) -> int:
        """Shared memory of the ring, `num_products` being 2 where gate and up are computed."""
        columns = self.block_m + self.block_n * num_products
        return self.num_stages * columns * self.block_k * _ELEMENT_BYTES[dtype]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TritonConfig:
    """The two products of a layer; `block_m` is the same in both, for they share the row tiles."""

    gate_up: TritonTile
    down: TritonTile

    @property
    def block_m(self) -> int:
        """Rows of a tile."""
        return self.gate_up.block_m


def unsupported(plan: MoEPlan, x_dtype: str, weight_dtypes: tuple[str, ...]) -> str:
    """Why the Triton layer cannot compute this plan, or ""; one sentence for the user."""
    if plan.router.score is not Score.EXTERNAL:
        return "the Triton layer takes ids and weights; its router is a launch of its own"
    if not plan.experts.stacked:
        return "the Triton layer takes stacked experts; these are a list of tensors"
    if x_dtype not in _ELEMENT_BYTES:
        return f"the Triton layer takes bf16, fp16 and fp32; x is {x_dtype}"
    others = sorted(set(weight_dtypes) - {x_dtype})
    if others:
        return f"the Triton layer takes experts in the dtype of x ({x_dtype}); some are {others[0]}"
    return ""


def choose_config(
    plan: MoEPlan, num_tokens: int, dtype: str, capability: tuple[int, int]
) -> TritonConfig:
    """The tiles of a layer.

    Args:
        plan: the plan.
        num_tokens: T, or a typical one where it is dynamic: every choice is right for every T.
        dtype: of x and the experts, "bf16" | "fp16" | "fp32".
        capability: compute capability of the GPU.
    """
    experts = plan.experts
    rows = 1 << 30 if plan.batch_invariant else num_tokens * plan.router.top_k / experts.num_experts
    gate_up, down = _tiles(rows, dtype)
    limit = _SHARED_BYTES.get(capability, _SMALLEST_SHARED_BYTES) - _RESERVED_BYTES
    num_products = 1 if experts.gate_layout is GateLayout.NONE else 2
    return TritonConfig(
        gate_up=_fit(gate_up, num_products, dtype, limit), down=_fit(down, 1, dtype, limit)
    )


def _tiles(rows: float, dtype: str) -> tuple[TritonTile, TritonTile]:
    """Gate/up and down tiles for so many rows an expert, on the largest GPU."""
    if dtype == "fp32":
        # No tensor cores: the accumulators of a large tile would not fit into registers.
        size = 16 if rows <= 16 else 64
        tile = TritonTile(block_m=size, block_n=32, block_k=32, group=8, num_warps=4, num_stages=3)
        return tile, dataclasses.replace(tile, block_n=64)
    if rows <= 16:
        tile = TritonTile(block_m=16, block_n=64, block_k=128, group=1, num_warps=4, num_stages=4)
        return dataclasses.replace(tile, block_n=32), tile
    if rows <= 64:
        tile = TritonTile(block_m=64, block_n=128, block_k=64, group=16, num_warps=4, num_stages=4)
        return dataclasses.replace(tile, block_n=64), tile
    tile = TritonTile(block_m=128, block_n=256, block_k=64, group=16, num_warps=8, num_stages=3)
    return dataclasses.replace(tile, block_n=128), tile


def _fit(tile: TritonTile, num_products: int, dtype: str, limit: int) -> TritonTile:
    """The tile with the depth, and then the k step, that fit into `limit` bytes."""
    while tile.shared_bytes(num_products, dtype) > limit:
        if tile.num_stages > 2:
            tile = dataclasses.replace(tile, num_stages=tile.num_stages - 1)
        else:
            tile = dataclasses.replace(tile, block_k=tile.block_k // 2, num_stages=3)
    return tile
