"""The router kernel: one program of one warp a token. Import only where Triton is.

Lanes: the E experts of a token lie in `LANES = GROUPS * SIZE` lanes, group g of `GROUP_SIZE` experts
in lanes [g * SIZE, g * SIZE + GROUP_SIZE); without a group limit there is one group. A lane without
an expert has the key `_NO_LANE`, below that of -inf, and is never chosen while K <= E.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_compiler.runtime.triton_math import (
    cast_to,
    exact_exp,
    exact_sigmoid,
    exact_softplus,
    first_of_max,
    key_value,
    order_key,
    rounded,
)

_NO_LANE = tl.constexpr(-0x80000000)


@triton.jit
def _score(logits, valid, SCORE: tl.constexpr, DTYPE: tl.constexpr):
    """Scores [LANES] fp32, every step rounded to DTYPE as in eager."""
    if SCORE == "softmax":
        best = key_value(tl.max(tl.where(valid, order_key(logits), _NO_LANE), axis=0))
        e = tl.where(valid, exact_exp(logits - best), 0.0)
        return rounded(tl.div_rn(e, tl.sum(e, axis=0) + tl.zeros_like(e)), DTYPE)
    elif SCORE == "sigmoid":
        return rounded(exact_sigmoid(logits), DTYPE)
    elif SCORE == "sqrtsoftplus":
        return rounded(tl.sqrt_rn(rounded(exact_softplus(logits), DTYPE)), DTYPE)
    else:
        return logits


@triton.jit
def _group_key(
    key, TOP2: tl.constexpr, DTYPE: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr
):
    """Order keys of the group scores [GROUPS]."""
    by_group = tl.reshape(key, (GROUPS, SIZE))
    best = tl.max(by_group, axis=1)
    if TOP2:
        lane = tl.arange(0, SIZE)[None, :]
        first = tl.min(tl.where(by_group == best[:, None], lane, SIZE), axis=1)
        second = tl.max(tl.where(lane == first[:, None], _NO_LANE, by_group), axis=1)
        return order_key(rounded(key_value(best) + key_value(second), DTYPE))
    else:
        return best


@triton.jit
def _limit_groups(
    key, valid, ZERO_FILL: tl.constexpr, TOP2: tl.constexpr, DTYPE: tl.constexpr,
    NUM_GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Keys [LANES] in which the experts of groups that lost have the score 0 or -inf."""
    group = tl.arange(0, GROUPS)
    left = tl.where(group < NUM_GROUPS, _group_key(key, TOP2, DTYPE, GROUPS, SIZE), _NO_LANE)
    lost = group >= 0
    for _ in range(KEPT):
        _, chosen = first_of_max(left, GROUPS)
        left = tl.where(group == chosen, _NO_LANE, left)
        lost = lost & (group != chosen)
    fill = order_key(tl.full((GROUPS, SIZE), 0.0 if ZERO_FILL else float("-inf"), tl.float32))
    limited = tl.where(lost[:, None], fill, tl.reshape(key, (GROUPS, SIZE)))
    return tl.where(valid, tl.reshape(limited, (GROUPS * SIZE,)), _NO_LANE)


@triton.jit
def _normalize(
    w, used, NORMALIZE: tl.constexpr, EPS: tl.constexpr, CLAMPS: tl.constexpr, SCALE: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Combine weights [SLOTS] of the selected scores; slots that are not `used` are ignored."""
    if NORMALIZE == "softmax":
        best = key_value(tl.max(tl.where(used, order_key(w), _NO_LANE), axis=0))
        e = tl.where(used, exact_exp(w - best), 0.0)
        w = rounded(tl.div_rn(e, tl.sum(e, axis=0) + tl.zeros_like(e)), DTYPE)
    elif NORMALIZE == "sigmoid" or NORMALIZE == "sigmoid_sum":
        w = rounded(exact_sigmoid(w), DTYPE)
    if NORMALIZE == "sum" or NORMALIZE == "sigmoid_sum":
        total = rounded(tl.sum(tl.where(used, w, 0.0), axis=0), DTYPE)
        if CLAMPS:
            # torch.clamp hands a NaN on.
            total = tl.where(total < EPS, rounded(tl.full((), EPS, tl.float32), DTYPE), total)
        else:
            total = rounded(total + EPS, DTYPE)
        w = rounded(tl.div_rn(w, total + tl.zeros_like(w)), DTYPE)
    if SCALE != 1.0:
        w = rounded(w * SCALE, DTYPE)
    return w


@triton.jit
def _top_k(key, scores, K: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr):
    """(lanes [SLOTS] of the K largest keys, their scores): descending, lowest lane first on ties."""
    lane, slot = tl.arange(0, LANES), tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), tl.int32)
    for k in range(K):
        _, first = first_of_max(key, LANES)
        chosen = tl.where(slot == k, first, chosen)
        key = tl.where(lane == first, _NO_LANE, key)
    return chosen, tl.gather(scores, chosen, 0)


@triton.jit
def _sparsemixer(
    logits, valid, TWICE_JITTER: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr,
    LANES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """(lanes [SLOTS], weights [SLOTS]): see `reference._sparsemixer`."""
    lane, slot = tl.arange(0, LANES), tl.arange(0, SLOTS)
    chosen, weights = tl.zeros((SLOTS,), tl.int32), tl.zeros((SLOTS,), tl.float32)
    remaining = tl.where(valid, logits, float("-inf"))
    # To torch.max, unlike torch.topk, both zeros are equal.
    key = tl.where(valid, order_key(tl.where(logits == 0.0, 0.0, logits)), _NO_LANE)
    taken = order_key(tl.full((LANES,), float("-inf"), tl.float32))
    for k in range(K):
        best_key, first = first_of_max(key, LANES)
        best = key_value(best_key)
        size = tl.abs(logits)
        # torch.clamp hands a NaN of either side on.
        factor = tl.where(size < best, best, tl.where(best != best, best, size))
        distance = rounded(best - logits, DTYPE)
        far = rounded(tl.div_rn(distance, factor), DTYPE) > TWICE_JITTER
        e = tl.where(far, 0.0, tl.where(valid, exact_exp(remaining - best), 0.0))
        own = tl.sum(tl.where(lane == first, e, 0.0), axis=0)
        weight = rounded(tl.div_rn(own, tl.sum(e, axis=0)), DTYPE)
        chosen = tl.where(slot == k, first, chosen)
        weights = tl.where(slot == k, weight, weights)
        remaining = tl.where(lane == first, float("-inf"), remaining)
        key = tl.where(lane == first, taken, key)
    return chosen, weights


@triton.jit
def moeflex_route(
    logits, bias, ids, weights, counts, num_tokens, token_stride, expert_stride,
    SCORE: tl.constexpr, HAS_BIAS: tl.constexpr, WIDE_CHOICE: tl.constexpr,
    NUM_GROUPS: tl.constexpr, KEPT_GROUPS: tl.constexpr, GROUP_TOP2: tl.constexpr,
    ZERO_FILL: tl.constexpr, NORMALIZE: tl.constexpr, EPS: tl.constexpr, EPS_CLAMPS: tl.constexpr,
    SCALE: tl.constexpr, TWICE_JITTER: tl.constexpr, HAS_COUNTS: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Logits [T, E] -> ids [T, K], weights [T, K] in the score dtype; counts [E] += 1 a route."""
    LANES: tl.constexpr = GROUPS * SIZE
    GROUP_SIZE: tl.constexpr = E // NUM_GROUPS
    DTYPE: tl.constexpr = weights.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    # A grid has at least one program.
    if token >= num_tokens:
        return
    lane, slot = tl.arange(0, LANES), tl.arange(0, SLOTS)
    expert = (lane // SIZE) * GROUP_SIZE + lane % SIZE
    valid = (lane % SIZE < GROUP_SIZE) & (lane // SIZE < NUM_GROUPS)
    row = logits + token * token_stride
    value = tl.load(row + expert * expert_stride, mask=valid, other=0.0).to(tl.float32)
    value = rounded(value, DTYPE)
    if SCORE == "sparsemixer":
        chosen, w = _sparsemixer(value, valid, TWICE_JITTER, K, SLOTS, LANES, DTYPE)
    else:
        scores = _score(value, valid, SCORE, DTYPE)
        choice = scores
        CHOICE: tl.constexpr = tl.float32 if WIDE_CHOICE else DTYPE
        if HAS_BIAS:
            added = tl.load(bias + expert, mask=valid, other=0.0).to(tl.float32)
            choice = rounded(scores + added, CHOICE)
        key = tl.where(valid, order_key(choice), _NO_LANE)
        if NUM_GROUPS > 1:
            key = _limit_groups(
                key, valid, ZERO_FILL, GROUP_TOP2, CHOICE, NUM_GROUPS, KEPT_GROUPS, GROUPS, SIZE
            )
        chosen, w = _top_k(key, scores, K, SLOTS, LANES)
        w = _normalize(w, slot < K, NORMALIZE, EPS, EPS_CLAMPS, SCALE, DTYPE)
    chosen = (chosen // SIZE) * GROUP_SIZE + chosen % SIZE
    tl.store(ids + token * K + slot, chosen.to(ids.dtype.element_ty), mask=slot < K)
    tl.store(weights + token * K + slot, cast_to(w, DTYPE), mask=slot < K)
    if HAS_COUNTS:
        tl.atomic_add(counts + chosen, 1, mask=slot < K, sem="relaxed")
