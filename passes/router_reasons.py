"""Say in one sentence why a router is none that is known."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_compiler.ir import RouterSpec
from moe_compiler.passes.router_probe import Observation, Recorder, RefusedError, RouterProblem


def explain_selection(problem: RouterProblem, seen: Sequence[Observation]) -> str:
    """Why no selection rule explains the recorded ids."""
    first = seen[0]
    assert first.ids is not None
    logits, ids, top_k = first.logits, first.ids, problem.top_k
    if _selects(-logits, ids, top_k):
        return f"the router selects the {top_k} smallest logits, not the largest"
    if _selects(logits.abs(), ids, top_k):
        return f"the router selects the {top_k} logits of largest magnitude, not the largest logits"
    if _renumbered(logits, ids, problem):
        return "the expert ids are renumbered after the top-k"
    return (
        f"the selected experts are not the top {top_k} of identity, softmax, sigmoid or "
        f"sqrtsoftplus scores{' plus bias' if problem.has_bias else ''}, with or without groups"
    )


def _selects(choice: Tensor, ids: Tensor, top_k: int) -> bool:
    """Whether ids are a top-k of `choice` on every row."""
    best = choice.topk(top_k, dim=-1).values
    picked = choice.gather(-1, ids).sort(-1, descending=True).values
    return bool(torch.isclose(picked, best, rtol=1e-11, atol=0.0).all())


def _renumbered(logits: Tensor, ids: Tensor, problem: RouterProblem) -> bool:
    """Whether one fixed map of expert numbers turns the top-k of the logits into ids."""
    ranked = logits.sort(-1, descending=True)
    clear = (ranked.values.diff(dim=-1) != 0).all(-1)
    top = ranked.indices[clear, : problem.top_k]
    shape = (top.shape[0], problem.num_experts)
    wanted = torch.zeros(shape).scatter(-1, top, 1.0)
    got = torch.zeros(shape).scatter(-1, ids[clear], 1.0)
    together = wanted.t() @ got
    seen = wanted.sum(0) > 0
    partner = together.argmax(-1)
    always = together.gather(-1, partner.unsqueeze(-1)).squeeze(-1) == wanted.sum(0)
    return bool(always[seen].all()) and len(set(partner[seen].tolist())) == int(seen.sum())


def explain_weights(
    recorder: Recorder, rules: Sequence[RouterSpec], seen: Sequence[Observation]
) -> str:
    """Why no normalisation explains the recorded weights although a rule explains the ids."""
    if recorder.problem.has_bias and _bias_changes_weights(recorder, seen[0]):
        return (
            "the tensor [E] beside the logits changes the combine weights, not only the selection"
        )
    norms = [torch.linalg.vector_norm(o.weights, dim=-1) for o in seen]
    length = torch.cat(norms)
    if recorder.problem.top_k > 1 and bool((length / length[0] - 1).abs().max() < 1e-9):
        return "combine weights are normalised to a constant 2-norm, not to a constant sum"
    kinds = " or ".join(sorted({rule.kind for rule in rules}))
    return (
        f"experts are selected as by {kinds}, but the combine weights are no known function of the "
        "scores (normalised by nothing, sum, softmax or sigmoid; times a constant)"
    )


def _bias_changes_weights(recorder: Recorder, first: Observation) -> bool:
    """Whether a small change of the second tensor changes weights where the ids stay."""
    assert first.bias is not None
    assert first.ids is not None
    try:
        other = recorder.observe(first.logits, first.bias * (1 + 1e-4))
    except RefusedError:
        return False
    assert other.ids is not None
    same = (other.ids == first.ids).all(-1)
    change = (other.weights[same] / first.weights[same] - 1).abs()
    return change.numel() > 0 and bool(change.max() > 1e-9)
