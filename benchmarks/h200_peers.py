"""What the Hopper layer kernel is compared with: the torch chain and a fused Triton kernel, both
in a CUDA graph.

The Triton kernel is of the kind that serving engines use: routes sorted by expert and padded to
the row tile, one grouped product a launch. Its sort is not timed (in its favour); the torch
chain's is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Run = Callable[[], Tensor]


@triton.jit
def _silu_mul(gate_up, h, I: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < I
    gate = tl.load(gate_up + row * 2 * I + col, mask=mask).to(tl.float32)
    up = tl.load(gate_up + row * 2 * I + I + col, mask=mask).to(tl.float32)
    tl.store(h + row * I + col, (gate * tl.sigmoid(gate) * up).to(h.dtype.element_ty), mask=mask)


@triton.jit
def _weighted_sum(y, row_of, weights, out, K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < H
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_of + token * K + k).to(tl.int64)
        part = tl.load(y + row * H + col, mask=mask).to(tl.float32)
        total += tl.load(weights + token * K + k) * part
    tl.store(out + token * H + col, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _grouped(
    a, w, c, sorted_routes, tile_expert, num_padded, num_routes,
    N: tl.constexpr, D: tl.constexpr, DIV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """c[route] = a[route // DIV] @ w[expert].T; rows of `sorted_routes` beyond num_routes are padding."""
    pid = tl.program_id(0)
    num_m, num_n = tl.cdiv(num_padded, BM), tl.cdiv(N, BN)
    per_group = GROUP * num_n
    first_m = pid // per_group * GROUP
    group = min(num_m - first_m, GROUP)
    pid_m = first_m + pid % per_group % group
    pid_n = pid % per_group // group
    route = tl.load(sorted_routes + pid_m * BM + tl.arange(0, BM)).to(tl.int64)
    valid = route < num_routes
    expert = tl.load(tile_expert + pid_m).to(tl.int64)
    cols = pid_n * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_ptr = a + (route // DIV)[:, None] * D + k[None, :]
    w_ptr = w + expert * N * D + (cols % N).to(tl.int64)[None, :] * D + k[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(D, BK)):
        in_k = k < D - step * BK
        x = tl.load(a_ptr, mask=valid[:, None] & in_k[None, :], other=0.0)
        total = tl.dot(x, tl.load(w_ptr, mask=in_k[:, None], other=0.0), total)
        a_ptr += BK
        w_ptr += BK
    mask = valid[:, None] & (cols < N)[None, :]
    tl.store(c + route[:, None] * N + cols[None, :], total.to(c.dtype.element_ty), mask=mask)


def grouped_chain(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor) -> Run:
    """Sort, `_grouped_mm`, SiLU times up, `_grouped_mm`, weighted sum in order of k."""
    (T, H), K, (E, _, I) = x.shape, ids.shape[1], w2.shape
    device, routes = x.device, ids.numel()
    h = torch.empty(routes, I, device=device, dtype=x.dtype)
    out = torch.empty_like(x)
    row_of = torch.empty(routes, dtype=torch.int64, device=device)
    iota = torch.arange(routes, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    first, second = w13.transpose(1, 2), w2.transpose(1, 2)

    def run() -> Tensor:
        flat = ids.reshape(-1)
        order = torch.sort(flat.to(torch.int16), stable=True).indices
        counts = torch.zeros(E, dtype=torch.int32, device=device)
        counts.scatter_add_(0, flat, one.expand(routes))
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        gate_up = torch._grouped_mm(x[order // K], first, offs=offsets)
        _silu_mul[(routes, triton.cdiv(I, 1024))](
            gate_up, h, I, min(1024, triton.next_power_of_2(I))
        )
        y = torch._grouped_mm(h, second, offs=offsets)
        row_of[order] = iota
        _weighted_sum[(T, triton.cdiv(H, 1024))](y, row_of, weights, out, K, H, 1024)
        return out

    return run


def triton_tiles(rows_per_expert: float) -> list[dict[str, int]]:
    """Row tile, column tile, k tile, group, warps, stages to try."""
    if rows_per_expert <= 16:
        picks = [(16, 64, 128, 1, 4, 4), (16, 128, 128, 1, 4, 4), (32, 128, 64, 8, 4, 4)]
    elif rows_per_expert <= 64:
        picks = [(64, 128, 64, 16, 4, 4), (64, 256, 64, 16, 8, 4), (32, 128, 64, 8, 4, 4)]
    else:
        picks = [(64, 256, 64, 16, 8, 4), (128, 128, 64, 16, 8, 4), (128, 256, 64, 16, 8, 3)]
    names = ("BM", "BN", "BK", "GROUP", "num_warps", "num_stages")
    return [dict(zip(names, pick, strict=True)) for pick in picks]


def triton_fused(
    x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, tile: dict[str, Any]
) -> Run:
    """Two grouped products, SiLU times up, weighted sum; the alignment of the routes is done once,
    outside.
    """
    (T, H), K, (E, _, I) = x.shape, ids.shape[1], w2.shape
    routes, block = ids.numel(), tile["BM"]
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=E)
    padded = (counts + block - 1) // block * block
    start, before = torch.cumsum(padded, 0) - padded, torch.cumsum(counts, 0) - counts
    num_padded = int(padded.sum())
    sorted_routes = torch.full((num_padded,), routes, dtype=torch.int32, device=x.device)
    rank = torch.arange(routes, device=x.device) - before[flat[order]]
    sorted_routes[start[flat[order]] + rank] = order.to(torch.int32)
    tile_expert = torch.repeat_interleave(torch.arange(E, device=x.device), padded // block).to(
        torch.int32
    )
    gate_up = torch.empty(routes, 2 * I, device=x.device, dtype=x.dtype)
    h = torch.empty(routes, I, device=x.device, dtype=x.dtype)
    y = torch.empty(routes, H, device=x.device, dtype=x.dtype)
    row_of = torch.arange(routes, device=x.device)
    out = torch.empty_like(x)

    def product(a: Tensor, w: Tensor, c: Tensor, div: int) -> None:
        N, D = w.shape[1], w.shape[2]
        grid = (num_padded // block * triton.cdiv(N, tile["BN"]),)
        _grouped[grid](a, w, c, sorted_routes, tile_expert, num_padded, routes, N, D, div, **tile)

    def run() -> Tensor:
        product(x, w13, gate_up, K)
        _silu_mul[(routes, triton.cdiv(I, 1024))](
            gate_up, h, I, min(1024, triton.next_power_of_2(I))
        )
        product(h, w2, y, 1)
        _weighted_sum[(T, triton.cdiv(H, 1024))](y, row_of, weights, out, K, H, 1024)
        return out

    return run


def batched_matmul(x: Tensor, w13: Tensor, w2: Tensor, num_routes: int) -> Run:
    """Two `bmm` of the layer's real FLOPs, perfectly balanced: what the products alone cost."""
    E, H, I = w2.shape
    rows = max(1, num_routes // E)
    a = torch.randn(E, rows, H, device=x.device, dtype=x.dtype)
    h = torch.randn(E, rows, I, device=x.device, dtype=x.dtype)
    gate_up = torch.empty(E, rows, 2 * I, device=x.device, dtype=x.dtype)
    y = torch.empty(E, rows, H, device=x.device, dtype=x.dtype)

    def run() -> Tensor:
        torch.bmm(a, w13.transpose(1, 2), out=gate_up)
        return torch.bmm(h, w2.transpose(1, 2), out=y)

    return run
