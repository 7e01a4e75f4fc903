"""Solve for the numbers of a router: scale, eps of the normalisation, jitter of the sparsemixer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from moe_compiler.ir import Normalize, RouterSpec, Score
from moe_compiler.passes.router_probe import Observation, Recorder, RefusedError, RouterProblem
from moe_compiler.reference import score_logits

FIT_TOLERANCE = 1e-9


def fit_weights(
    problem: RouterProblem, rule: RouterSpec, observations: Sequence[Observation]
) -> Iterator[RouterSpec]:
    """Specs with the selection of `rule` whose weights agree with all observations."""
    chosen, weights = [], []
    for observation in observations:
        assert observation.ids is not None
        scores = score_logits(rule.score, observation.logits)
        chosen.append(scores.gather(-1, observation.ids))
        weights.append(observation.weights)
    values, target = torch.cat(chosen), torch.cat(weights)
    for normalize in Normalize:
        if normalize is Normalize.SUM and rule.score is Score.IDENTITY and rule.top_k == 1:
            continue  # 1 for every logit but 0, where it is not a number: SOFTMAX says the same
        if normalize in (Normalize.SIGMOID, Normalize.SIGMOID_SUM):
            base = values.sigmoid()
        elif normalize is Normalize.SOFTMAX:
            base = values.softmax(-1)
        else:
            base = values
        if normalize in (Normalize.SUM, Normalize.SIGMOID_SUM):
            solutions = list(_solve_sum(base, target, problem.constants))
        else:
            scale = _constant(target / base, problem.constants)
            solutions = [] if scale is None else [(scale, 0.0, False)]
        for scale, eps, clamps in solutions:
            yield dataclasses.replace(
                rule, normalize=normalize, scale=scale, eps=eps, eps_clamps=clamps
            )


def _constant(ratio: Tensor, literals: Iterable[float]) -> float | None:
    """The one positive number that all entries are, or None."""
    middle = float(ratio.median())
    if not middle > 0 or not bool(((ratio / middle - 1).abs() < FIT_TOLERANCE).all()):
        return None
    return _round(middle, literals, 1e-10)


def _round(number: float, literals: Iterable[float], tolerance: float) -> float:
    """A literal of the graph, its inverse, or a short decimal close to `number`."""
    for literal in (1.0, *literals):
        for candidate in (literal, 1 / literal if literal else 0.0):
            if candidate and abs(number / candidate - 1) < tolerance:
                return float(candidate)
    whole = round(1 / number)
    if 1 < whole <= 1024 and abs(number * whole - 1) < tolerance * 0.01:
        return 1 / whole
    short = float(f"{number:.7g}")
    return short if abs(number / short - 1) < tolerance * 0.01 else number


def _solve_sum(
    values: Tensor, weights: Tensor, literals: Sequence[float]
) -> Iterator[tuple[float, float, bool]]:
    """(scale, eps, eps_clamps) with weights = scale * values / (sum + eps), or / max(sum, eps)."""
    divisors = values / weights
    first = divisors[:, :1]
    if not bool(((divisors / first - 1).abs() < FIT_TOLERANCE).all()):
        return
    sums, divisor = values.sum(-1), first[:, 0]
    scale = _constant(sums / divisor, literals)
    if scale is not None:
        yield scale, 0.0, False
        return
    high, low = int(sums.argmax()), int(sums.argmin())
    slope = float((sums[high] - sums[low]) / (divisor[high] - divisor[low]))
    clamp_slope = float(sums[high] / divisor[high])
    for clamps, exact in ((False, slope), (True, clamp_slope)):
        scale = _round(exact, literals, 1e-10)
        eps = scale * float(divisor[low]) - (0.0 if clamps else float(sums[low]))
        if not 0 < eps < float("inf"):
            continue
        eps = _round(eps, literals, 1e-6)
        bound = sums.clamp(min=eps) if clamps else sums + eps
        if bool(((bound / (scale * divisor) - 1).abs() < FIT_TOLERANCE).all()):
            yield scale, eps, clamps


def fit_sparsemixer(recorder: Recorder) -> Iterator[RouterSpec]:
    """The sparsemixer with the threshold that the router shows, if it shows one."""
    problem = recorder.problem
    if problem.num_experts < 2 or problem.has_bias:
        return
    try:
        threshold = _find_threshold(recorder)
    except RefusedError:
        return
    if threshold is None:
        return
    literals = (*problem.constants, *(c / 2 for c in problem.constants))
    yield RouterSpec(
        score=Score.SPARSEMIXER,
        top_k=problem.top_k,
        num_experts=problem.num_experts,
        jitter_eps=_round(threshold / 2, literals, 1e-7),
    )


def _find_threshold(recorder: Recorder) -> float | None:
    """Gap to the best logit 1.0 beyond which the runner-up does not lower the winner's weight."""
    problem = recorder.problem
    size = max(8, problem.num_tokens)
    low, high = 0.0, 0.999
    logits = torch.full((size, problem.num_experts), -1000.0, dtype=torch.float64)
    logits -= torch.arange(problem.num_experts, dtype=torch.float64)
    logits[:, 0] = 1.0
    for _ in range(24):
        gaps = torch.linspace(low, high, size, dtype=torch.float64)
        logits[:, 1] = 1.0 - gaps
        seen = recorder.observe(logits, None)
        assert seen.ids is not None
        weight = torch.where(seen.ids == 0, seen.weights, 0.0).sum(-1)
        shared = weight < 1 - 1e-9
        last = int(shared.sum()) - 1
        if not 0 <= last < size - 1 or bool(shared[last + 1 :].any()):
            return None
        low, high = float(gaps[last]), float(gaps[last + 1])
        if high - low < 1e-12:
            return high
    return high
