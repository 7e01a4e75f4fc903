"""Tile sizes of the Triton layer: by rows per expert, the shared memory of the GPU, and the plan.

No tuning run: the table below was measured on one H200 (`benchmarks/h200_router.py`); a GPU with
less shared memory gets fewer stages, then narrower tiles.
"""

from __future__ import annotations

import dataclasses

from moe_compiler.ir import MoEPlan, Score

# Bytes of shared memory that one block may have, by compute capability.
_SHARED_BYTES = {(8, 0): 166912, (8, 7): 166912, (9, 0): 232448, (10, 0): 232448, (10, 3): 232448}
_SMALLEST_SHARED_BYTES = 101376  # sm_86, sm_89, sm_120
_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# Barriers and the transposition of an epilogue.
_RESERVED_BYTES = 2048

OLDEST = (8, 0)
# Above this, one launch of the sort would read the ids so often that three are faster.
_MANY_ROUTES = 4096


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


def _tile(m: int, n: int, k: int, group: int, warps: int, stages: int) -> TritonTile:
    return TritonTile(
        block_m=m, block_n=n, block_k=k, group=group, num_warps=warps, num_stages=stages
    )


# (most rows an expert on average, tile). Measured at 4, 8, 16, 128, 256 and 512 rows.
TILES = (
    (12, _tile(16, 64, 128, 1, 4, 4)),
    (24, _tile(32, 128, 64, 8, 4, 4)),
    (96, _tile(64, 128, 64, 16, 4, 4)),
    (float("inf"), _tile(128, 256, 64, 16, 8, 3)),
)
# No tensor cores: the accumulators of a large tile would not fit into registers.
FP32_TILES = ((16, _tile(16, 64, 32, 8, 4, 3)), (float("inf"), _tile(64, 64, 32, 8, 4, 3)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TritonConfig:
    """The launches of a layer.

    Attributes:
        gate_up, down: tiles of the two products; `block_m` is the same in both.
        sort_in_parts: routes are sorted by three launches instead of one that reads all of them
            once an expert.
    """

    gate_up: TritonTile
    down: TritonTile
    sort_in_parts: bool = False

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
    down = _tiles(rows, dtype)
    return fit(plan, down, num_tokens, dtype, capability)


def fit(
    plan: MoEPlan, down: TritonTile, num_tokens: int, dtype: str, capability: tuple[int, int]
) -> TritonConfig:
    """A layer with this tile, made to fit the GPU; gate and up have half of its columns each."""
    experts = plan.experts
    gate_up = dataclasses.replace(down, block_n=down.block_n // 2) if experts.gated else down
    limit = _SHARED_BYTES.get(capability, _SMALLEST_SHARED_BYTES) - _RESERVED_BYTES
    num_products = 2 if experts.gated else 1
    return TritonConfig(
        gate_up=_fit(gate_up, num_products, dtype, limit),
        down=_fit(down, 1, dtype, limit),
        sort_in_parts=num_tokens * plan.router.top_k > _MANY_ROUTES,
    )


def _tiles(rows: float, dtype: str) -> TritonTile:
    """The down tile for so many rows an expert, on the largest GPU."""
    table = FP32_TILES if dtype == "fp32" else TILES
    return next(tile for most_rows, tile in table if rows <= most_rows)


def _fit(tile: TritonTile, num_products: int, dtype: str, limit: int) -> TritonTile:
    """The tile that fits into `limit` bytes: fewer stages down to three, then half of the columns."""
    for block_n in (tile.block_n, tile.block_n // 2, tile.block_n // 4):
        for num_stages in range(tile.num_stages, 2, -1):
            smaller = dataclasses.replace(tile, block_n=block_n, num_stages=num_stages)
            if smaller.shared_bytes(num_products, dtype) <= limit:
                return smaller
    raise AssertionError(f"no form of {tile} fits into {limit} bytes of shared memory")
