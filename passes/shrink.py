"""Choose small sizes under which a slice still computes the same function.

Shapes that Dynamo left symbolic get small values. Static sizes stand in the graph as integers;
those of T, H and I are replaced consistently (2 I by twice the small I, T K by the small T times K,
and so on). Where a choice makes an operator or a proof fail, the sizes as they are decide: shrinking
can cost time and never correctness.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from torch import fx

from moe_compiler.passes.nodes import shape_hint
from moe_compiler.passes.operands import Operands
from moe_compiler.passes.subgraph import Sizes, Slice, free_symbols

SMALL_TOKENS = 16
SMALL_HIDDEN = 40
SMALL_INTERMEDIATE = 36
LARGE = 64
"""Static sizes up to this one stay as they are."""


def candidate_sizes(
    part: Slice,
    *,
    x: fx.Node,
    ids: fx.Node,
    operands: Operands | None,
    num_tokens: int = SMALL_TOKENS,
) -> Iterator[Sizes]:
    """Sizes to try, smallest first; the last one changes no static size.

    `num_tokens` is about the number of tokens that the runs shall have; a static T is not enlarged.
    """
    symbols = small_symbols(part, num_tokens)
    seen = []
    for literals in (
        _explicit(part, x, ids, operands, num_tokens, shrink_weights=True),
        _by_divisor(part, x, ids, operands),
        _explicit(part, x, ids, operands, num_tokens, shrink_weights=False),
        {},
    ):
        if literals is not None and literals not in seen:
            seen.append(literals)
            yield Sizes(symbols=symbols, literals=literals)


def small_symbols(part: Slice, num_tokens: int = SMALL_TOKENS) -> dict[str, int]:
    """Small values for the size symbols: the product of any two is about `num_tokens`."""
    names = sorted(free_symbols(part.leaves))
    if len(names) <= 1:
        return dict.fromkeys(names, num_tokens)
    return {name: 2 if i == 0 else -(-num_tokens // 2) for i, name in enumerate(names)}


def _static(node: fx.Node) -> list[int]:
    return [s for s in shape_hint(node) if s is not None]


def _weight_sizes(operands: Operands | None) -> tuple[int, int] | None:
    """(wide, inter): the sizes of the first up and of the down projection that are not E."""
    if operands is None:
        return None
    up, down = _static(operands.up[0][0])[-2:], _static(operands.down[0])[-2:]
    return math.prod(up), math.prod(down)


def _explicit(
    part: Slice,
    x: fx.Node,
    ids: fx.Node,
    operands: Operands | None,
    num_tokens: int,
    *,
    shrink_weights: bool,
) -> dict[int, int] | None:
    """T, H and I each get a small value of their own; None when two of them collide."""
    shape = _static(x)
    hidden, top_k = shape[-1], _static(ids)[-1]
    tokens = math.prod(shape[:-1])
    fixed = {top_k} | ({operands.num_experts} if operands else set())
    mapping: dict[int, int] = {}

    def put(old: int, new: int) -> bool:
        if old <= LARGE:
            return True
        if old in fixed or mapping.get(old, new) != new:
            return False
        mapping[old] = new
        return True

    good = True
    if tokens > max(LARGE, num_tokens):
        good &= _put_tokens(part, tokens, top_k, num_tokens, put)
    else:
        fixed |= {tokens, tokens * top_k}
    inter = wide = 0
    areas = _weight_sizes(operands)
    if areas is not None:
        wide, inter = areas[0] // hidden, areas[1] // hidden
    if shrink_weights and areas is not None and hidden > LARGE and inter > LARGE:
        good &= put(hidden, SMALL_HIDDEN) and put(inter, SMALL_INTERMEDIATE)
        good &= put(2 * inter, 2 * SMALL_INTERMEDIATE)
    elif {hidden, inter, wide, 2 * inter} & set(mapping):
        return None
    return mapping if good else None


def _put_tokens(
    part: Slice, tokens: int, top_k: int, num_tokens: int, put: Callable[[int, int], bool]
) -> bool:
    batch = 1
    # a [B, S, H] tensor somewhere in the slice tells how T splits
    for node in (*part.inputs, *part.outputs):
        shape = _static(node)
        if len(shape) == 3 and shape[0] * shape[1] == tokens:
            batch = shape[0]
            break
    if batch > num_tokens:
        return False
    small = -(-num_tokens // batch)
    return (
        put(tokens // batch, small)
        and put(tokens, small * batch)
        and put(tokens * top_k, small * batch * top_k)
    )


def _by_divisor(
    part: Slice, x: fx.Node, ids: fx.Node, operands: Operands | None
) -> dict[int, int] | None:
    """T, H and I are all divided by one number, so that equal sizes stay equal."""
    if operands is None:
        return None
    shape = _static(x)
    hidden, tokens, top_k = shape[-1], math.prod(shape[:-1]), _static(ids)[-1]
    areas = _weight_sizes(operands)
    assert areas is not None
    wide, inter = areas[0] // hidden, areas[1] // hidden
    large = [v for v in (tokens, hidden, inter) if v > LARGE]
    divisor = math.gcd(*large) if large else 1
    while divisor > 1 and min(large) // divisor < 8:
        divisor //= 2
    if divisor < 2 or any(v % divisor for v in large):
        return None
    mapping: dict[int, int] = {}
    for base in {*large, wide if wide > LARGE else hidden}:
        for factor in (1, 2, top_k, operands.num_experts):
            mapping[base * factor] = base * factor // divisor
    for node in (*part.inputs, *part.outputs):
        for size in _static(node)[:-1]:
            if size > LARGE and size % divisor == 0 and size in (tokens, *_splits(tokens)):
                mapping[size] = size // divisor
    return None if {operands.num_experts, top_k} & set(mapping) else mapping


def _splits(tokens: int) -> Sequence[int]:
    return [tokens // b for b in range(2, 33) if tokens % b == 0]
