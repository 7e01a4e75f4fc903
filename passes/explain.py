"""Why a block holds no Mixture of Experts: one sentence, found by running it."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_compiler.passes.expert_run import (
    TOLERANCE,
    ExpertRun,
    distinct_ids,
    random_case,
    random_tensors,
    relative_error,
)


def explain_mismatch(run: ExpertRun) -> str:
    """Test the properties that every MoE block has, one by one; "" when all hold."""
    generator = torch.Generator().manual_seed(3)
    tensors = random_tensors(run, generator)
    x, ids, weights = random_case(run, generator, scale=1.0)
    base = run(x, ids, weights, tensors)
    if relative_error(run(x, ids, weights, tensors), base) > TOLERANCE:
        return "two runs on the same inputs differ: it draws random numbers"
    return (
        _tokens_talk(run, (x, ids, weights), tensors, base)
        or _not_a_sum(run, (x, ids, weights), tensors, base)
        or _experts_differ(run, generator, tensors)
    )


def _tokens_talk(
    run: ExpertRun, case: tuple[Tensor, Tensor, Tensor], tensors: list[Tensor], base: Tensor
) -> str:
    x, ids, weights = case
    if run.num_tokens < 2:
        return ""
    changed = x.clone()
    changed[0] = -2.0 * changed[0] + 1.0
    if relative_error(run(changed, ids, weights, tensors)[1:], base[1:]) > TOLERANCE:
        return "a token's result depends on the values of other tokens"
    rerouted = ids.clone()
    rerouted[0] = ids[1]
    packed = ids[1:2].expand_as(ids).contiguous()
    alone = run(x, rerouted, weights, tensors)[1:]
    crowd = run(x, packed, weights, tensors)[1:2]
    if relative_error(alone, base[1:]) > TOLERANCE or relative_error(crowd, base[1:2]) > TOLERANCE:
        return (
            "a token's result depends on where other tokens are routed: an expert has a capacity and "
            "drops tokens"
        )
    return ""


def _not_a_sum(
    run: ExpertRun, case: tuple[Tensor, Tensor, Tensor], tensors: list[Tensor], base: Tensor
) -> str:
    x, ids, weights = case
    total = torch.zeros_like(base)
    lost = False
    for slot in range(run.top_k):
        alone = torch.zeros_like(weights)
        alone[:, slot] = weights[:, slot]
        part = run(x, ids, alone, tensors)
        lost |= not bool(part.any())
        total += part
    if run.top_k > 1 and (lost or relative_error(total, base) > TOLERANCE):
        return (
            f"its {run.top_k} expert results a token are not summed (a write without accumulation "
            "keeps one of them, or the weights interact)"
        )
    return ""


def _experts_differ(run: ExpertRun, generator: torch.Generator, tensors: list[Tensor]) -> str:
    """With equal weights in every expert the ids must not matter."""
    operands = run.operands
    each = operands.num_experts
    if operands.stacked:
        equal = [t[:1].expand(t.shape).contiguous() for t in tensors]
    else:
        equal = [tensors[i - i % each] for i in range(len(tensors))]
    x = torch.randn(1, run.hidden, generator=generator, dtype=torch.float64).expand(
        run.num_tokens, -1
    )
    weights = torch.zeros(run.num_tokens, run.top_k, dtype=torch.float64)
    weights[:, 0] = 1.0
    ids = distinct_ids(run.num_tokens, each, run.top_k, generator)
    for first in range(0, each, run.num_tokens):
        used = min(run.num_tokens, each - first)
        ids[:used] = (torch.arange(first, first + used)[:, None] + torch.arange(run.top_k)) % each
        out = run(x, ids, weights, equal)[:used]
        apart = (out - out[:1]).abs().amax(-1) > TOLERANCE * out.abs().max()
        if bool(apart.any()):
            expert = first + int(apart.nonzero()[0])
            return (
                f"its experts are not equal: with the same weights, expert {expert} computes "
                f"another function than expert {first}"
            )
    return ""
