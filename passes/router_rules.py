"""Selection rules of routers: which experts are chosen, given scores, a bias and group limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from moe_compiler.ir import GroupScore, RouterSpec, Score
from moe_compiler.passes.router_probe import Observation, Recorder
from moe_compiler.reference import group_scores, score_logits, selection_scores

# Two spellings of one score differ by less in fp64; smaller differences count as ties.
TIE_TOLERANCE = 1e-11
SCORES = (Score.SOFTMAX, Score.SIGMOID, Score.SQRTSOFTPLUS, Score.IDENTITY)
# Rows on which group limits are guessed, and the share of them that has to agree.
_GUESS_ROWS = slice(0, 48)
_GUESS_SHARE = 0.6


class Rules:
    """The selection rules that explain every recorded id, cheapest first."""

    def __init__(self, recorder: Recorder, observations: Sequence[Observation]) -> None:
        self._recorder = recorder
        self._problem = recorder.problem
        self._observations = observations
        self._scores: dict[Score, list[Tensor]] = {}
        self._measured: dict[int, int | None] = {}

    def plain(self) -> list[RouterSpec]:
        """Rules without a group limit."""
        return [rule for rule in self._templates() if self._legal(rule)]

    def grouped(self, literals: Iterable[int] | None) -> list[RouterSpec]:
        """Rules with a group limit whose sizes are among `literals`, or any when None."""
        num_experts = self._problem.num_experts
        numbers = None if literals is None else set(literals)
        found = []
        for size in range(num_experts // 2, 0, -1):
            num_groups, rest = divmod(num_experts, size)
            if rest or not (numbers is None or numbers & {num_groups, size}):
                continue
            for rule in self._templates():
                found += [r for r in self._limits(rule, num_groups, numbers) if self._legal(r)]
        return found

    def _templates(self) -> Iterator[RouterSpec]:
        for has_bias in (False, True) if self._problem.has_bias else (False,):
            for score in SCORES:
                yield RouterSpec(
                    score=score,
                    top_k=self._problem.top_k,
                    num_experts=self._problem.num_experts,
                    has_bias=has_bias,
                )

    def _of(self, score: Score) -> list[Tensor]:
        """Scores [n, E], one tensor an observation."""
        if score not in self._scores:
            self._scores[score] = [score_logits(score, o.logits) for o in self._observations]
        return self._scores[score]

    def _legal(self, rule: RouterSpec) -> bool:
        scores = self._of(rule.score)
        few = slice(0, 7)
        return bool(legal_rows(rule, scores[0][few], self._observations[0], few).all()) and all(
            bool(legal_rows(rule, s, o).all())
            for s, o in zip(scores, self._observations, strict=True)
        )

    def _limits(
        self, rule: RouterSpec, num_groups: int, numbers: set[int] | None
    ) -> Iterator[RouterSpec]:
        """Group limits that most rows of the first observation agree with."""
        # Without a bias, scores are positive and the fill value cannot be seen.
        signed = rule.has_bias or rule.score is Score.IDENTITY
        fills = (float("-inf"), 0.0) if signed else (float("-inf"),)
        largest = dataclasses.replace(rule, num_groups=num_groups, group_score=GroupScore.MAX)
        best_two = dataclasses.replace(largest, group_score=GroupScore.TOP2_SUM)
        for limited, kept_groups in (
            (largest, self._kept_groups(largest, numbers)),
            (best_two, self._measured_kept(num_groups)),
        ):
            for kept in kept_groups:
                if kept * (rule.num_experts // num_groups) < rule.top_k:
                    continue
                for fill in fills:
                    yield dataclasses.replace(limited, top_k_groups=kept, group_fill=fill)

    def _measured_kept(self, num_groups: int) -> list[int]:
        """The number of kept groups, if groups are scored by the sum of their best two."""
        if num_groups == self._problem.num_experts:
            return []
        if num_groups not in self._measured:
            self._measured[num_groups] = self._measure_kept(num_groups)
        kept = self._measured[num_groups]
        return [] if kept is None else [kept]

    def _measure_kept(self, num_groups: int) -> int | None:
        """Bisect how many groups must be better than that of the best expert until it is lost.

        Row r has r groups of good experts; the best expert sits in the last group, beside low ones.
        """
        num_experts = self._problem.num_experts
        size = num_experts // num_groups
        num_points = max(8, min(self._problem.num_tokens, 64))
        bias = torch.ones(num_experts, dtype=torch.float64) if self._problem.has_bias else None
        wiggle = 1e-3 * torch.linspace(0, 1, num_experts, dtype=torch.float64)
        low, high = 0, num_groups - 1
        while True:
            even = torch.linspace(low, high, num_points).round().long()
            points = torch.tensor(sorted(set(even.tolist())))
            good = torch.arange(num_experts) // size < points.unsqueeze(-1)
            logits = torch.where(good, 0.9, 0.05) + wiggle
            logits[:, -1] = 1.0
            seen = self._recorder.observe(logits, bias)
            assert seen.ids is not None
            selected = (seen.ids == num_experts - 1).any(-1)
            count = int(selected.sum())
            if not 0 < count < len(points) or bool(selected[count:].any()):
                return None
            low, high = int(points[count - 1]), int(points[count])
            if high - low == 1:
                return high

    def _kept_groups(self, rule: RouterSpec, numbers: set[int] | None) -> list[int]:
        """Possible numbers of kept groups: all used ones, none with a better expert left unused."""
        first, num_groups = self._observations[0], rule.num_groups
        assert first.ids is not None
        ids, size = first.ids[_GUESS_ROWS], rule.num_experts // num_groups
        choice = self._of(rule.score)[0][_GUESS_ROWS]
        if rule.has_bias and first.bias is not None:
            choice = choice + first.bias
        # A fill of 0.0 lets experts of lost groups win where scores are negative.
        positive = (choice > 0).all(-1)
        if int(positive.sum()) >= 4:
            ids, choice = ids[positive], choice[positive]
        order = group_scores(rule, choice).argsort(-1, descending=True)
        rank = torch.empty_like(order).scatter_(
            -1, order, torch.arange(num_groups).expand_as(order)
        )
        lowest = rank.gather(-1, ids // size).amax(-1) + 1
        worst = choice.gather(-1, ids).amin(-1, keepdim=True)
        better = (choice > worst).scatter_(-1, ids, False)
        highest = torch.where(better, rank.repeat_interleave(size, -1), num_groups).amin(-1)
        kept = torch.arange(num_groups).unsqueeze(-1)
        votes = ((lowest <= kept) & (kept <= highest)).double().mean(-1)
        enough = max(_GUESS_SHARE, float(votes.max()) - 0.05)
        # The largest number leaves the least choice among lost experts that tie at the fill value.
        candidates = (votes >= enough).nonzero().flatten().tolist()[::-1]
        return [k for k in candidates if k > 0 and (numbers is None or k in numbers)][:8]


def legal_rows(
    rule: RouterSpec, scores: Tensor, observation: Observation, rows: slice = slice(None)
) -> Tensor:
    """Which rows [n] a rule explains: the ids are a top-k, or tied groups leave it open."""
    assert observation.ids is not None
    bias = observation.bias if rule.has_bias else None
    choice = selection_scores(rule, scores, bias)
    best = choice.topk(rule.top_k, dim=-1).values
    picked = choice.gather(-1, observation.ids[rows]).sort(-1, descending=True).values
    absorbed = 0.0 if bias is None else 1e-15 * float(bias.abs().max())
    legal = torch.isclose(picked, best, rtol=TIE_TOLERANCE, atol=absorbed).all(-1)
    if rule.num_groups > 1:
        legal |= open_groups(rule, scores if bias is None else scores + bias, absorbed)
    return legal


def open_groups(rule: RouterSpec, choice: Tensor, absorbed: float) -> Tensor:
    """Rows [n] where a kept and a lost group have the same score."""
    ranked = group_scores(rule, choice).sort(-1, descending=True).values
    last, next_one = ranked[:, rule.top_k_groups - 1], ranked[:, rule.top_k_groups]
    return torch.isclose(last, next_one, rtol=TIE_TOLERANCE, atol=absorbed)
