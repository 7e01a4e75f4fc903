"""The kernels of the Triton layer. Import only where Triton is.

R = T * K routes; route r belongs to token r // K. Four launches:

```
moeflex_align     ids [R]                 -> routes [R] sorted by expert, tiles of BM rows of one expert
moeflex_gate_up   x [T, H] by route       -> h [R, I] in sorted order, activation applied
moeflex_down      h [R, I]                -> y [R, H] by route
moeflex_combine   y [R, H], weights [R]   -> out [T, H], summed in the order of k
```

Many routes are sorted by three launches instead of the first, which would read all ids once an expert:
`moeflex_count`, `moeflex_plan`, `moeflex_place`; the order is the same.

An id outside of [0, E) takes no row; its row of y does not count. No launch uses atomics, and no sum
depends on the order in which programs run: two calls give the same bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_compiler.runtime.triton_math import cast_to, dot_into, exact_sigmoid, rounded


@triton.jit
def moeflex_align(
    ids, routes, tile_expert, tile_row, tile_end, num_tiles, num_routes,
    E: tl.constexpr, BINS: tl.constexpr, BM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program e places the routes of expert e. BINS > E: the last bin takes invalid ids."""
    expert = tl.program_id(0)
    bins, step = tl.arange(0, BINS), tl.arange(0, CHUNK)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, num_routes, CHUNK):
        route = first + step
        found = tl.load(ids + route, mask=route < num_routes, other=E)
        bin_of = tl.where((found >= 0) & (found < E), found, E).to(tl.int32)
        counts += tl.histogram(bin_of, BINS)
    tiles = (counts + BM - 1) // BM
    row = tl.sum(tl.where(bins < expert, counts, 0), axis=0)
    tile = tl.sum(tl.where(bins < expert, tiles, 0), axis=0)
    own = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    if expert == 0:
        tl.store(num_tiles, tl.sum(tl.where(bins < E, tiles, 0), axis=0))
    for index in range(0, tl.cdiv(own, BM)):
        tl.store(tile_expert + tile + index, expert)
        tl.store(tile_row + tile + index, row + index * BM)
        tl.store(tile_end + tile + index, row + own)
    if own == 0:
        return
    for first in range(0, num_routes, CHUNK):
        route = first + step
        found = tl.load(ids + route, mask=route < num_routes, other=E)
        mine = (found == expert).to(tl.int32)
        rank = tl.cumsum(mine, axis=0) - mine
        tl.store(routes + row + rank, route, mask=mine != 0)
        row += tl.sum(mine, axis=0)


@triton.jit
def moeflex_count(
    ids, counts, num_routes,
    E: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """counts [block, BINS]: routes of every expert among CHUNK neighbours; the bin E takes invalid ids."""
    block = tl.program_id(0)
    route = block * CHUNK + tl.arange(0, CHUNK)
    found = tl.load(ids + route, mask=route < num_routes, other=E)
    bin_of = tl.where((found >= 0) & (found < E), found, E).to(tl.int32)
    tl.store(counts + block * BINS + tl.arange(0, BINS), tl.histogram(bin_of, BINS))


@triton.jit
def moeflex_plan(
    counts, before, tile_expert, tile_row, tile_end, num_tiles, num_blocks,
    E: tl.constexpr, BINS: tl.constexpr, BM: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program: before [block, BINS], the row of the block's first route of an expert; the tiles."""
    bins, block = tl.arange(0, BINS), tl.arange(0, BLOCKS)
    total = tl.zeros((BINS,), tl.int32)
    for first in range(0, num_blocks, BLOCKS):
        at = (first + block)[:, None] * BINS + bins[None, :]
        found = tl.load(counts + at, mask=(first + block < num_blocks)[:, None], other=0)
        total += tl.sum(found, axis=0)
    total = tl.where(bins < E, total, 0)
    start = tl.cumsum(total, axis=0) - total
    row = start
    for first in range(0, num_blocks, BLOCKS):
        at = (first + block)[:, None] * BINS + bins[None, :]
        mask = (first + block < num_blocks)[:, None]
        found = tl.load(counts + at, mask=mask, other=0)
        tl.store(before + at, row[None, :] + tl.cumsum(found, axis=0) - found, mask=mask)
        row += tl.sum(found, axis=0)
    tiles = (total + BM - 1) // BM
    tile = tl.cumsum(tiles, axis=0) - tiles
    tl.store(num_tiles, tl.sum(tiles, axis=0))
    for index in range(0, tl.max(tiles, axis=0)):
        mask = index < tiles
        tl.store(tile_expert + tile + index, bins, mask=mask)
        tl.store(tile_row + tile + index, start + index * BM, mask=mask)
        tl.store(tile_end + tile + index, start + total, mask=mask)


@triton.jit
def moeflex_place(
    ids, before, routes, num_routes,
    E: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Program (e, b) places the routes of EXPERTS experts among the CHUNK of block b."""
    block = tl.program_id(1)
    route = block * CHUNK + tl.arange(0, CHUNK)
    found = tl.load(ids + route, mask=route < num_routes, other=E)
    for index in range(EXPERTS):
        expert = tl.program_id(0) * EXPERTS + index
        mine = ((found == expert) & (expert < E)).to(tl.int32)
        rank = tl.cumsum(mine, axis=0) - mine
        first = tl.load(before + block * BINS + expert)
        tl.store(routes + first + rank, route, mask=mine != 0)


@triton.jit
def _tile_of(pid, num_m, num_n, GROUP: tl.constexpr):
    """Row tile and column tile: GROUP row tiles share the columns they read."""
    first = pid // (GROUP * num_n) * GROUP
    size = tl.minimum(num_m - first, GROUP)
    inside = pid % (GROUP * num_n)
    return first + inside % size, inside // size


@triton.jit
def _sigmoid(x, EXACT: tl.constexpr):
    return exact_sigmoid(x) if EXACT else tl.sigmoid(x)


@triton.jit
def _clamp(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Within [LOW, HIGH]; a limit beyond +-1e38 is none, and a NaN goes through."""
    if LOW > -1e38:
        x = tl.where(x < LOW, LOW, x)
    if HIGH < 1e38:
        x = tl.where(x > HIGH, HIGH, x)
    return x


@triton.jit
def _activate(
    gate, up, GATED: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, GATE_MIN: tl.constexpr,
    GATE_MAX: tl.constexpr, UP_MIN: tl.constexpr, UP_MAX: tl.constexpr, UP_SHIFT: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """f(clamp(gate)) * (clamp(up) + shift), fp32."""
    gate = _clamp(gate, GATE_MIN, GATE_MAX)
    if KIND == "silu":
        value = gate * _sigmoid(ALPHA * gate, EXACT)
    elif KIND == "gelu":
        value = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) is sigmoid(2 z).
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        value = gate * _sigmoid(z, EXACT)
    elif KIND == "relu":
        value = tl.where(gate < 0.0, 0.0, gate)
    elif KIND == "relu2":
        value = tl.where(gate < 0.0, 0.0, gate)
        value = value * value
    elif KIND == "sigmoid":
        value = _sigmoid(gate, EXACT)
    else:
        value = gate
    if GATED:
        value = value * (_clamp(up, UP_MIN, UP_MAX) + UP_SHIFT)
    return value


@triton.jit
def _bias_row(pointer, col, N: tl.constexpr, STEP: tl.constexpr):
    """Every STEP-th entry of a bias vector as [1, BN] fp32."""
    return tl.load(pointer + col * STEP, mask=col < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _rows_of_tile(pid_m, routes, tile_row, tile_end, BM: tl.constexpr):
    """(sorted positions [BM], which of them exist, their routes)."""
    row = tl.load(tile_row + pid_m) + tl.arange(0, BM)
    exists = row < tl.load(tile_end + pid_m)
    return row, exists, tl.load(routes + row, mask=exists, other=0)


@triton.jit
def moeflex_gate_up(
    x, gate_w, up_w, gate_b, up_b, weights, h, routes, tile_expert, tile_row, tile_end, num_tiles,
    x_stride, gate_expert, gate_out, gate_in, gate_offset, up_expert, up_out, up_in, up_offset,
    b_expert, gate_b_offset, up_b_offset,
    H: tl.constexpr, I: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr,
    PAIRED: tl.constexpr, INTERLEAVED: tl.constexpr, UP_FIRST: tl.constexpr, HAS_BIAS: tl.constexpr,
    WEIGHT_AT: tl.constexpr, ROUND: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, GATE_MIN: tl.constexpr,
    GATE_MAX: tl.constexpr, UP_MIN: tl.constexpr, UP_MAX: tl.constexpr, UP_SHIFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """h [rows of one expert, BN columns] = act(x @ W1, x @ W3).

    Gate rows lie in `gate_w + gate_offset`, up rows in `up_w + up_offset`. PAIRED: one product of
    twice the width in which gate and up alternate, split afterwards: wider products are faster, and
    where K is the contiguous axis the order of the rows costs nothing. INTERLEAVED: they alternate
    in memory. Otherwise, and where they are two tensors, two products.
    """
    num_m = tl.load(num_tiles)
    # The grid is as large as it may ever have to be.
    if tl.program_id(0) >= num_m * tl.cdiv(I, BN):
        return
    pid_m, pid_n = _tile_of(tl.program_id(0), num_m, tl.cdiv(I, BN), GROUP)
    expert = tl.load(tile_expert + pid_m).to(tl.int64)
    row, exists, route = _rows_of_tile(pid_m, routes, tile_row, tile_end, BM)
    k = tl.arange(0, BK)
    x_ptr = x + (route // K).to(tl.int64)[:, None] * x_stride + k[None, :]
    col = pid_n * BN + tl.arange(0, BN)
    gate_w += expert * gate_expert
    up_w += expert * up_expert
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    if PAIRED:
        wide = pid_n * 2 * BN + tl.arange(0, 2 * BN)
        if INTERLEAVED:
            w_ptr = gate_w + wide.to(tl.int64)[None, :] * gate_out + k[:, None] * gate_in
        else:
            pair = (wide // 2).to(tl.int64) * gate_out
            place = pair + gate_offset + (wide % 2).to(tl.int64) * (up_offset - gate_offset)
            w_ptr = gate_w + place[None, :] + k[:, None] * gate_in
        both = tl.zeros((BM, 2 * BN), tl.float32)
        for step in range(tl.cdiv(H, BK)):
            in_k = k < H - step * BK
            a = tl.load(x_ptr, mask=exists[:, None] & in_k[None, :], other=0.0)
            w = tl.load(w_ptr, mask=in_k[:, None] & (wide < 2 * I)[None, :], other=0.0)
            both = dot_into(a, w, both)
            x_ptr += BK
            w_ptr += BK * gate_in
        even, odd = tl.split(tl.reshape(both, (BM, BN, 2)))
        if UP_FIRST and INTERLEAVED:
            gate, up = odd, even
        else:
            gate, up = even, odd
    else:
        wide_col = col.to(tl.int64)[None, :]
        gate_ptr = gate_w + gate_offset + wide_col * gate_out + k[:, None] * gate_in
        up_ptr = up_w + up_offset + wide_col * up_out + k[:, None] * up_in
        for step in range(tl.cdiv(H, BK)):
            in_k = k < H - step * BK
            mask = in_k[:, None] & (col < I)[None, :]
            a = tl.load(x_ptr, mask=exists[:, None] & in_k[None, :], other=0.0)
            gate = dot_into(a, tl.load(gate_ptr, mask=mask, other=0.0), gate)
            if GATED:
                up = dot_into(a, tl.load(up_ptr, mask=mask, other=0.0), up)
            x_ptr += BK
            gate_ptr += BK * gate_in
            up_ptr += BK * up_in
    weight = tl.full((BM, 1), 1.0, tl.float32)
    if WEIGHT_AT != "output":
        weight = tl.load(weights + route, mask=exists, other=0.0).to(tl.float32)[:, None]
    if WEIGHT_AT == "input":
        gate, up = gate * weight, up * weight
    if HAS_BIAS:
        STEP: tl.constexpr = 2 if INTERLEAVED else 1
        gate += _bias_row(gate_b + expert * b_expert + gate_b_offset, col, I, STEP)
        if GATED:
            up += _bias_row(up_b + expert * b_expert + up_b_offset, col, I, STEP)
    DTYPE: tl.constexpr = h.dtype.element_ty
    EXACT: tl.constexpr = DTYPE == tl.float32  # noqa: SIM300
    if ROUND:
        gate, up = rounded(gate, DTYPE), rounded(up, DTYPE)
    value = _activate(
        gate,
        up,
        GATED,
        KIND,
        ALPHA,
        GATE_MIN,
        GATE_MAX,
        UP_MIN,
        UP_MAX,
        UP_SHIFT,
        EXACT,
    )
    if WEIGHT_AT == "hidden":
        value = value * weight
    h_ptr = h + row.to(tl.int64)[:, None] * I + col[None, :]
    tl.store(h_ptr, cast_to(value, DTYPE), mask=exists[:, None] & (col < I)[None, :])


@triton.jit
def moeflex_down(
    h, w2, b2, y, routes, tile_expert, tile_row, tile_end, num_tiles,
    w_expert, w_out, w_in, b_expert,
    H: tl.constexpr, I: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y [route, BN columns] = h @ W2 + b2, for the rows of one expert."""
    num_m = tl.load(num_tiles)
    # The grid is as large as it may ever have to be.
    if tl.program_id(0) >= num_m * tl.cdiv(H, BN):
        return
    pid_m, pid_n = _tile_of(tl.program_id(0), num_m, tl.cdiv(H, BN), GROUP)
    expert = tl.load(tile_expert + pid_m).to(tl.int64)
    row, exists, route = _rows_of_tile(pid_m, routes, tile_row, tile_end, BM)
    k, col = tl.arange(0, BK), pid_n * BN + tl.arange(0, BN)
    h_ptr = h + row.to(tl.int64)[:, None] * I + k[None, :]
    w_ptr = w2 + expert * w_expert + col.to(tl.int64)[None, :] * w_out + k[:, None] * w_in
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(I, BK)):
        in_k = k < I - step * BK
        a = tl.load(h_ptr, mask=exists[:, None] & in_k[None, :], other=0.0)
        w = tl.load(w_ptr, mask=in_k[:, None] & (col < H)[None, :], other=0.0)
        total = dot_into(a, w, total)
        h_ptr += BK
        w_ptr += BK * w_in
    if HAS_BIAS:
        total += _bias_row(b2 + expert * b_expert, col, H, 1)
    y_ptr = y + route.to(tl.int64)[:, None] * H + col[None, :]
    tl.store(y_ptr, cast_to(total, y.dtype.element_ty), mask=exists[:, None] & (col < H)[None, :])


@triton.jit
def moeflex_combine(
    y, ids, weights, out, num_tokens,
    H: tl.constexpr, E: tl.constexpr, K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [T, H] = sum over k, in order, of (weight *) y; an invalid id adds nothing."""
    token = tl.program_id(0).to(tl.int64)
    # A grid has at least one program.
    if token >= num_tokens:
        return
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(K):
        route = token * K + k
        found = tl.load(ids + route)
        valid = (found >= 0) & (found < E)
        part = tl.load(y + route * H + col, mask=col < H, other=0.0).to(tl.float32)
        if WEIGHTED:
            part = part * tl.load(weights + route).to(tl.float32)
        # Nobody wrote this row of y, and the weight may be NaN.
        part = tl.where(valid, part, 0.0)
        total += part
    tl.store(out + token * H + col, cast_to(total, out.dtype.element_ty), mask=col < H)
