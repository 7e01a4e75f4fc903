"""Prove that tokens stay independent where many of them meet.

A capacity is a number that stands in the graph: an expert that takes at most 64 tokens drops none of
the few that a proof runs on. A block is therefore run again on more tokens than any number that it
reads, all of them at the same experts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import torch
from torch import fx

from moe_compiler.ir import ExpertSpec
from moe_compiler.passes.candidates import Candidate
from moe_compiler.passes.expert_run import (
    TOLERANCE,
    ExpertRun,
    random_case,
    random_tensors,
    reference,
    relative_error,
    run_bytes,
    run_of,
    too_large_to_prove,
)
from moe_compiler.passes.nodes import CONTRACTIONS, VIEWS, num_rows, op_name
from moe_compiler.passes.operands import NoSpecError, Operands
from moe_compiler.passes.shrink import candidate_sizes
from moe_compiler.passes.subgraph import Sizes, Slice, SliceError, free_symbols

MAX_NUMBER = 1 << 17
"""Larger numbers are fill values and sentinels, not numbers of tokens."""

CHEAP_BYTES = 64 << 20
"""What a run may take that is made to be sure, and not because a number asks for it."""

# Their numbers are shapes and axes: none of them decides about a token.
_SHAPES = (VIEWS - {"narrow", "slice", "select"}) | CONTRACTIONS | {"chunk", "sum", "softmax"}


class CapacityError(NoSpecError):
    """Tokens that are alone are computed as a spec says, and tokens in a crowd are not."""


def check_crowd(candidate: Candidate, run: ExpertRun, spec: ExpertSpec) -> int:
    """Compare the experts with their spec where many tokens choose the same ones.

    Args:
        candidate: the block.
        run: its experts at the sizes of the proof, under the proven roles.
        spec: what was proven there.

    Returns:
        The number of runs.

    Raises:
        CapacityError: they differ.
        NoSpecError: they cannot be run on so many tokens.
    """
    numbers = numbers_in(run.runner.part, run.sizes.literals)
    # The sizes of the block itself hardly are capacities: they are looked at where that is cheap.
    for found, cheap in ((numbers, True), (numbers - _usual(run), False)):
        needed = tokens_beyond(found, candidate.x)
        if needed <= run.num_tokens:
            return 0
        reason = f"it cannot be run on the {needed} tokens that its numbers ask for"
        for sizes in larger_sizes(candidate.part, candidate.x, candidate.ids, needed, run.operands):
            try:
                return _compare(run_of(candidate, sizes, run.operands), spec, cheap)
            except SliceError as error:
                reason = str(error)
    raise NoSpecError(reason)


def _usual(run: ExpertRun) -> set[int]:
    """The sizes of the block: H, I, E, K and what is cut from them."""
    experts = run.operands.num_experts
    inter = math.prod(run.sizes.shape(run.operands.down[0])[-2:]) // run.hidden
    return {run.hidden, inter, 2 * inter, experts - 1, experts, experts + 1, run.top_k}


def tokens_beyond(numbers: set[int], x: fx.Node) -> int:
    """More tokens than any of these numbers, as far as a graph of static size has so many."""
    needed = max(numbers, default=0) + 2
    if free_symbols([x]):
        return needed
    return min(needed, num_rows(x) or 0)


def numbers_in(part: Slice, literals: Mapping[int, int]) -> set[int]:
    """The numbers of a slice, as it is run under `literals`, that may count tokens."""
    found: set[int] = set()

    def visit(argument: object) -> None:
        if isinstance(argument, (list, tuple)):
            for entry in argument:
                visit(entry)
        elif isinstance(argument, slice):
            visit((argument.start, argument.stop))
        elif type(argument) is int:
            found.add(literals.get(argument, argument))
        elif type(argument) is float and math.isfinite(argument):
            found.add(math.ceil(argument))

    for node in part.body:
        of_weights = part.flow.constant[node] and part.flow.uses_parameters(node)
        if op_name(node) not in _SHAPES and not of_weights:
            visit((*node.args, *node.kwargs.values()))
    return {number for number in found if 0 < number <= MAX_NUMBER}


def larger_sizes(
    part: Slice, x: fx.Node, ids: fx.Node, needed: int, operands: Operands | None
) -> Iterator[Sizes]:
    """Sizes under which `x` has at least `needed` rows, smallest first."""
    symbols = sorted(free_symbols([x]))
    for sizes in candidate_sizes(part, x=x, ids=ids, operands=operands, num_tokens=needed):
        while _rows(sizes, x) < needed and symbols:
            grown = {**sizes.symbols, symbols[-1]: 2 * sizes.symbols[symbols[-1]]}
            sizes = dataclasses.replace(sizes, symbols=grown)
        if _rows(sizes, x) >= needed:
            yield sizes


def _rows(sizes: Sizes, x: fx.Node) -> int:
    return math.prod(sizes.shape(x)[:-1])


def _compare(crowd: ExpertRun, spec: ExpertSpec, cheap: bool) -> int:
    """Compare under one set of experts for all tokens; the number of runs."""
    too_large = too_large_to_prove(crowd)
    if too_large or (cheap and run_bytes(crowd) > CHEAP_BYTES):
        raise SliceError(too_large)
    generator = torch.Generator().manual_seed(4)
    tensors = random_tensors(crowd, generator)
    x, ids, weights = random_case(crowd, generator, scale=1.0)
    case = (x, ids[:1].expand_as(ids).contiguous(), weights)
    error = relative_error(reference(spec, case, tensors), crowd(*case, tensors))
    if not error < TOLERANCE:
        raise CapacityError(
            f"with {crowd.num_tokens} tokens at the same experts its result differs (relative error "
            f"{error:.1e}), with few it does not: an expert has a capacity and drops tokens, or "
            "tokens are told by their position"
        )
    return crowd.num_runs
