"""The Hopper kernels of one plan: which kernel for which number of tokens, rendered, and what the launcher must know.

`choose_config` says which kernel a number of tokens wants; here its answers become ranges of T.
"""

from __future__ import annotations

import bisect
import functools
import itertools

from moe_compiler.codegen.cuda import CudaConfig, Kernel, choose_config, render
from moe_compiler.codegen.layer_codes import layer_entries
from moe_compiler.errors import PlanError, UnsupportedError
from moe_compiler.ir import CudaKernel, CudaProgram, MoEPlan, Score

# T * K and tile numbers are 32-bit in the kernels.
MAX_TOKENS = 1 << 20
# Between neighbours of this grid at most one change of the kernel is looked for.
_GRID = sorted({*range(1, 17), *(round(16 * 1.125**i) for i in range(95)), MAX_TOKENS} - {0})

_ABI = 1
_DTYPE_CODES = {"bf16": 0, "fp16": 1, "fp32": 2}
_INDEX_BYTES = {"int64": 8, "int32": 4}


@functools.lru_cache(maxsize=256)
def ranges(
    plan: MoEPlan, dtype: str, weight_dtype: str, index_dtype: str
) -> tuple[tuple[int, int, CudaConfig], ...]:
    """`(first T, last T, kernel)`, without gaps from 1 to `MAX_TOKENS`.

    Raises:
        UnsupportedError: no kernel for the plan.
    """

    def config(tokens: int) -> CudaConfig:
        return choose_config(
            plan, tokens, dtype, weight_dtype=weight_dtype, index_dtype=index_dtype
        )

    starts = [(1, config(1))]
    for low, high in itertools.pairwise(_GRID):
        before, after = starts[-1][1], config(high)
        if after == before:
            continue
        span = range(low + 1, high + 1)
        first = span[bisect.bisect_left(span, True, key=lambda t: config(t) != before)]
        starts.append((first, after))
    ends = [start - 1 for start, _ in starts[1:]] + [MAX_TOKENS]
    return tuple((start, end, found) for (start, found), end in zip(starts, ends, strict=True))


def unsupported(
    plan: MoEPlan, dtype: str, weight_dtypes: tuple[str, ...], combine_dtype: str, index_dtype: str
) -> str:
    """Why the kernels cannot compute this plan with these dtypes, or "".

    A plan that rounds between its GEMMs is taken: the fp32 sums of the kernels are nearer to the exact result.
    """
    if plan.router.score is not Score.EXTERNAL:
        return (
            "the sm_90a layer kernel takes ids and weights from the graph; this plan holds a router"
        )
    if set(weight_dtypes) != {dtype}:
        others = ", ".join(sorted(set(weight_dtypes) - {dtype}))
        return f"the sm_90a layer kernel needs one dtype for x and the experts; got {dtype} and {others}"
    if combine_dtype not in _DTYPE_CODES:
        return (
            f"the sm_90a layer kernel takes combine weights in {', '.join(_DTYPE_CODES)}; got "
            f"{combine_dtype}"
        )
    if index_dtype not in _INDEX_BYTES:
        return f"the sm_90a layer kernel takes int64 or int32 ids; got {index_dtype}"
    try:
        choose_config(plan, 1, dtype)
    except (UnsupportedError, PlanError) as error:
        return str(error)
    return ""


def make_program(
    plan: MoEPlan,
    dtype: str,
    template: str,
    *,
    combine_dtype: str,
    index_dtype: str,
    num_tokens: int = 0,
) -> CudaProgram:
    """The kernels of `plan`, rendered.

    Args:
        plan: the plan.
        dtype: of x and the experts.
        template: text of `templates/cuda/layer.cu.tmpl`.
        combine_dtype: of the combine weights.
        index_dtype: of the ids.
        num_tokens: T where it is known: then only the kernel for it; 0 for all.

    Raises:
        UnsupportedError: no kernel for the plan.
    """
    # `MoeflexCudaLayerSpec` of templates/cuda/op_table.h
    layer = {
        "abi": _ABI,
        **layer_entries(plan),
        "dtype": _DTYPE_CODES[dtype],
        "out_dtype": _DTYPE_CODES[plan.out_dtype or dtype],
        "combine_dtype": _DTYPE_CODES[combine_dtype],
        "index_bytes": _INDEX_BYTES[index_dtype],
    }
    found = ranges(plan, dtype, combine_dtype, index_dtype)
    kernels = tuple(
        _kernel(config, first, last, template)
        for first, last, config in found
        if not num_tokens or first <= num_tokens <= last
    )
    return CudaProgram(
        plan_key=plan.key,
        layer=tuple((name, int(entry)) for name, entry in layer.items()),
        kernels=kernels,
    )


def _kernel(config: CudaConfig, first: int, last: int, template: str) -> CudaKernel:
    return CudaKernel(
        name=config.name,
        source=render(config, template),
        entry=config.entry,
        first_tokens=first,
        last_tokens=last,
        launch=tuple(_LAUNCHES[config.kernel](config).items()),
    )


def _decode_launch(config: CudaConfig) -> dict[str, int | tuple[int, ...]]:
    """Fields of `MoeflexCudaKernel` of templates/cuda/op_table.h; those that are 0 may be left out."""
    rows = 64 * config.num_slabs
    return {
        "num_threads": config.num_threads,
        "slab_rows": rows,
        "pair_rows": rows,
        "whole_rows": rows,
        "down_rows": rows,
        "box_k": config.block_k,
        "rows_per_route": 1,
        "control": 96 + config.max_tiles,
    }


def _prefill_launch(config: CudaConfig) -> dict[str, int | tuple[int, ...]]:
    return {
        "cooperative": 1,
        "num_threads": config.num_threads,
        "pair_rows": 128,
        "whole_rows": 256,
        "down_rows": 256,
        "box_k": config.block_k,
        "num_row_maps": 3,
        "row_map_of": (0, 0, 1),
        "row_map_rows": (128, 64, 64),
        "tile_rows": config.block_m,
        "rows_per_tile": config.block_m,
        "control": 128,
        "control_per_expert": 1,
        "control_per_tile": 1 + config.num_slices,
        "routes": 1,
        "routes_per_route": 1,
        "routes_per_expert": 1,
        "routes_per_tile": 2,
        "routes_per_row": 2,
    }


_LAUNCHES = {
    Kernel.DECODE: _decode_launch,
    Kernel.PREFILL: _prefill_launch,
}
