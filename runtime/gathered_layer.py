"""Expert parallelism by collectives alone: every rank sees all tokens, and adds what its experts give.

```
moeflex::gathered_moe_layer(Tensor x, Tensor[] router, Tensor[] experts, str plan, str out_dtype, str group,
                            int num_experts, int num_blocks) -> Tensor
```

It needs nothing but a process group, and sends R times what a dispatch by peer access sends. `plan`
is that of the narrow experts a rank holds, `num_blocks` for each of the model's (see `expert_blocks`);
ids are those of the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from moe_compiler.reference import DTYPES
from moe_compiler.runtime import op

c10d: Any = distributed_c10d
_registry: Any = torch.library
_library = _registry.Library("moeflex", "FRAGMENT")
# torch 2.13 gave the operation another name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _gathered(
    x: Tensor,
    router: Sequence[Tensor],
    experts: Sequence[Tensor],
    plan: str,
    out_dtype: str,
    group: str,
    num_experts: int,
    num_blocks: int,
) -> Tensor:
    process_group = c10d._resolve_process_group(group)
    rank, num_ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
    dtype = DTYPES[out_dtype] if out_dtype else x.dtype
    num_tokens = math.prod(x.shape[:-1])
    counts = _gather_counts(num_tokens, num_ranks, x.device, process_group)
    most = max(counts)
    if most == 0:
        return x.new_empty((0, x.shape[-1]), dtype=dtype)
    rows, ids, weights = (
        _gather_rows(t.reshape(num_tokens, t.shape[-1]), most, num_ranks, process_group)
        for t in (x, *router)
    )
    padding = torch.arange(most, device=x.device) >= torch.tensor(counts, device=x.device)[:, None]
    per_rank = -(-num_experts // num_ranks)
    local = ids.long() - rank * per_rank
    held = (local >= 0) & (local < per_rank) & (ids < num_experts) & ~padding.view(-1, 1)
    blocks = torch.arange(num_blocks, device=x.device)
    narrow = torch.where(held[..., None], local[..., None] * num_blocks + blocks, -1).flatten(1)
    spread = weights.repeat_interleave(num_blocks, dim=1)
    part = torch.ops.moeflex.moe_layer(rows, [narrow, spread], list(experts), plan)
    dist.all_reduce(part, group=process_group)
    first = rank * most
    mine: Tensor = part[first : first + num_tokens].to(dtype, copy=True)
    return mine


def _gather_counts(
    num_tokens: int, num_ranks: int, device: torch.device, group: dist.ProcessGroup
) -> list[int]:
    mine = torch.tensor([num_tokens], device=device)
    counts = torch.empty(num_ranks, dtype=mine.dtype, device=device)
    _all_gather(counts, mine, group=group)
    return [int(count) for count in counts.tolist()]


def _gather_rows(rows: Tensor, most: int, num_ranks: int, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, those of each padded with zeros to `most`."""
    padded = rows.new_zeros(most, rows.shape[1])
    padded[: len(rows)] = rows
    every = rows.new_empty(num_ranks * most, rows.shape[1])
    _all_gather(every, padded, group=group)
    return every


def _fake(
    x: Tensor,
    router: Sequence[Tensor],
    experts: Sequence[Tensor],
    plan: str,
    out_dtype: str,
    group: str,
    num_experts: int,
    num_blocks: int,
) -> Tensor:
    hidden = op.read_plan(plan).experts.hidden
    dtype = DTYPES[out_dtype] if out_dtype else x.dtype
    return x.new_empty((math.prod(x.shape[:-1]), hidden), dtype=dtype)


_library.define(
    "gathered_moe_layer(Tensor x, Tensor[] router, Tensor[] experts, str plan, str out_dtype, str group, "
    "int num_experts, int num_blocks) -> Tensor"
)
_registry.register_fake("moeflex::gathered_moe_layer", _fake, lib=_library)
for _key in ("CPU", "CUDA"):
    _library.impl("gathered_moe_layer", _gathered, _key)
