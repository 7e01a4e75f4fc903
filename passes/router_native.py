"""Compare a proven router with its sub-graph in the dtypes of the graph, where scores tie."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe_compiler.ir import RouterSpec, Score
from moe_compiler.passes.router_probe import Observation, RouterProblem
from moe_compiler.passes.router_rules import open_groups
from moe_compiler.reference import DTYPES, combine_weights, route, score_logits, selection_scores


@dataclasses.dataclass(frozen=True, slots=True)
class NativeResult:
    """How a spec fares in the dtypes of the graph.

    Attributes:
        illegal: rows whose experts are no top-k of the spec's scores.
        wrong: rows whose weights differ by more than rounding.
        other_ties: rows with another legal choice among tied scores than `torch.topk` makes.
        ties: rows where the spec leaves a choice.
        num_rows: rows compared.
    """

    illegal: int
    wrong: int
    other_ties: int
    ties: int
    num_rows: int

    @property
    def agrees(self) -> bool:
        """Same experts up to the order of tied ones, weights within rounding."""
        return not self.illegal and not self.wrong


def native_variants(problem: RouterProblem, spec: RouterSpec) -> Iterator[RouterSpec]:
    """The spec with every dtype of the scores and every fill that exact arithmetic cannot see."""
    low = problem.logits_dtype in (torch.bfloat16, torch.float16)
    hidden_fill = spec.num_groups > 1 and not spec.has_bias and spec.score is not Score.IDENTITY
    fills = (0.0, float("-inf")) if hidden_fill else (spec.group_fill,)
    if hidden_fill and float("-inf") in problem.constants:
        fills = fills[::-1]
    for score_dtype in ("fp32", "") if low else ("fp32",):
        for fill in fills:
            yield dataclasses.replace(spec, score_dtype=score_dtype, group_fill=fill)


def compare_native(
    problem: RouterProblem, spec: RouterSpec, native: Sequence[Observation]
) -> NativeResult:
    """Count the rows on which spec and sub-graph differ."""
    totals = [0, 0, 0, 0, 0]
    for observation in native:
        for i, rows in enumerate(_compare(problem, spec, observation)):
            totals[i] += int(rows.sum())
        totals[4] += observation.logits.shape[0]
    return NativeResult(*totals)


def _compare(
    problem: RouterProblem, spec: RouterSpec, observation: Observation
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows [n] that are illegal, wrong, tied otherwise, tied."""
    bias = observation.bias if spec.has_bias else None
    expected_ids, expected_weights = route(spec, observation.logits, bias)
    ids, weights, complete = _sparse(observation, expected_ids)
    other = (ids.sort(-1).values != expected_ids.sort(-1).values).any(-1) | ~complete
    if spec.score is Score.SPARSEMIXER:
        ties = _leading_ties(observation.logits, spec)
        weights = weights.gather(-1, ids.argsort(-1))
        expected = expected_weights.gather(-1, expected_ids.argsort(-1))
        close = _close(problem, spec, weights, expected) | ties
        illegal = other & ~ties
    else:
        logits = observation.logits
        if spec.score_dtype and logits.dtype is not torch.float64:
            logits = logits.to(DTYPES[spec.score_dtype])
        scores = score_logits(spec.score, logits)
        choice = selection_scores(spec, scores, bias)
        ranked = choice.sort(-1, descending=True).values
        picked = choice.gather(-1, ids).sort(-1, descending=True).values
        open_rows = _open_rows(spec, scores, bias)
        illegal = ((picked != ranked[:, : spec.top_k]).any(-1) & ~open_rows) | ~complete
        ties = open_rows
        if spec.top_k < spec.num_experts:
            ties = ties | (ranked[:, spec.top_k - 1] == ranked[:, spec.top_k])
        close = _close(problem, spec, weights, combine_weights(spec, scores, ids))
        if spec.num_groups > 1 and not spec.has_bias:
            # A kept expert that underflows ties with the fill value; which weight a lost expert
            # gets is open.
            fill = choice.gather(-1, ids) == spec.group_fill
            close |= (fill | (scores.gather(-1, ids) == 0)).any(-1)
    return illegal, ~close & ~illegal, other & ~illegal, ties


def _open_rows(spec: RouterSpec, scores: Tensor, bias: Tensor | None) -> Tensor:
    if spec.num_groups == 1:
        return torch.zeros(scores.shape[0], dtype=torch.bool)
    choice = scores if bias is None else scores + bias
    return open_groups(spec, choice.double(), 0.0)


def _sparse(observation: Observation, expected_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and weights [n, K] that were seen, and which rows [n] could be read.

    A weight that underflows to 0 hides its expert in a dense answer: such rows take the ids that
    are expected, if all experts that can be seen are among them.
    """
    if observation.ids is not None:
        return observation.ids, observation.weights, torch.ones_like(observation.ids[:, 0]) == 1
    dense, top_k = observation.weights, expected_ids.shape[-1]
    present = dense != 0
    counts = present.sum(-1)
    ids = expected_ids.clone()
    full = counts == top_k
    ids[full] = present[full].nonzero()[:, 1].reshape(-1, top_k)
    hidden = present.scatter(-1, ids, False).any(-1)
    return ids, dense.gather(-1, ids), ~hidden


def _leading_ties(logits: Tensor, spec: RouterSpec) -> Tensor:
    """Rows [n] with equal logits among the leading K + 1."""
    leading = min(spec.top_k + 1, spec.num_experts)
    return (logits.topk(leading, dim=-1).values.diff(dim=-1) == 0).any(-1)


def _close(problem: RouterProblem, spec: RouterSpec, found: Tensor, expected: Tensor) -> Tensor:
    """Rows [n] whose weights agree within the rounding of the coarsest dtype on the way."""
    finfo = torch.finfo(problem.weights_dtype)
    eps = finfo.eps
    if not spec.score_dtype:
        eps = max(eps, torch.finfo(problem.logits_dtype).eps)
    expected = expected.to(problem.weights_dtype).double()
    error = (found.double() - expected).abs()
    # Scores that are subnormal numbers have few bits: they count against the largest weight.
    largest = expected.abs().amax(-1, keepdim=True)
    allowed = 4 * eps * (expected.abs() + 1e-3 * largest) + finfo.tiny
    return ((error <= allowed) | (found.isnan() & expected.isnan())).all(-1)
