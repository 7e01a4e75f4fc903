"""Which known router a sub-graph is, found by probing and decided by running it.

Three steps. *Probe*: `router_probe` records in fp64 what the router answers to designed logits. *Explain*: every
selection rule (score, bias, groups) that explains all recorded ids is paired with every normalisation that explains
all recorded weights; scale, eps and jitter are solved for, the literals of the graph only round them. *Prove*: the
survivors must reproduce fresh random batches in fp64, and are then compared in the dtypes of the graph, where they
must select exactly the same experts. Names of operations only order equal survivors.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from moe_compiler.ir import GroupScore, Normalize, RouterSpec, Score
from moe_compiler.passes.router_fit import fit_sparsemixer, fit_weights
from moe_compiler.passes.router_probe import (
    Observation,
    Recorder,
    RefusedError,
    RouterProblem,
    SubgraphFunction,
    check_repeatable,
    native_observations,
    precise_observations,
)
from moe_compiler.passes.router_reasons import explain_selection, explain_weights
from moe_compiler.reference import (
    combine_weights,
    group_scores,
    route,
    score_logits,
    selection_scores,
)

__all__ = [
    "NoMatchReason",
    "RouterMatch",
    "RouterProblem",
    "SubgraphFunction",
    "match_router",
]

# Two fp64 spellings of one function differ by less than this; two different functions by more on some probe.
WEIGHT_TOLERANCE = 1e-9
TIE_TOLERANCE = 1e-11
SCORES = (Score.SOFTMAX, Score.SIGMOID, Score.SQRTSOFTPLUS, Score.IDENTITY)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterMatch:
    """A proven router.

    Attributes:
        spec: the router.
        exact_ids: in the dtypes of the graph `reference.route` selects exactly the same experts, ties included, and
            its weights differ by rounding only. When False the spec holds in exact arithmetic alone.
        num_runs: how often the sub-graph was executed.
        max_error: largest relative error of a combine weight in fp64.
        note: why `exact_ids` is False, or "".
    """

    spec: RouterSpec
    exact_ids: bool
    num_runs: int
    max_error: float
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class NoMatchReason:
    """Why a router was not recognised: one sentence for the user."""

    reason: str


def match_router(problem: RouterProblem) -> RouterMatch | NoMatchReason:
    """Recognise a router, or say why it is none that is known.

    The global random state is left as it was; no gradient is recorded.
    """
    recorder = Recorder(problem)
    on_cpu = (
        contextlib.nullcontext()
        if torch.get_default_device().type == "cpu"
        else torch.device("cpu")
    )
    with torch.no_grad(), torch.random.fork_rng(devices=[]), on_cpu:
        try:
            return _match(problem, recorder)
        except RefusedError as error:
            return NoMatchReason(str(error))


def _match(problem: RouterProblem, recorder: Recorder) -> RouterMatch | NoMatchReason:
    seen = precise_observations(recorder, seed=0)
    check_repeatable(recorder, seen[0])
    fresh = precise_observations(recorder, seed=1)
    native: list[Observation] = []
    best: RouterMatch | None = None
    selected: list[RouterSpec] = []
    for rules in _rule_sets(problem, seen, selected):
        for spec in _by_hint(problem, _explanations(problem, recorder, rules, seen)):
            error = _error(spec, fresh)
            if error > WEIGHT_TOLERANCE:
                continue
            native = native or native_observations(recorder, seed=2)
            match = _in_graph_dtypes(problem, spec, native, max(error, _error(spec, seen)))
            if match.exact_ids:
                return dataclasses.replace(match, num_runs=recorder.num_runs)
            best = best or match
        selected.extend(rules)
    if best is not None:
        return dataclasses.replace(best, num_runs=recorder.num_runs)
    if selected:
        return NoMatchReason(explain_weights(recorder, selected, seen))
    return NoMatchReason(explain_selection(problem, seen))


def _explanations(
    problem: RouterProblem,
    recorder: Recorder,
    rules: Sequence[RouterSpec],
    seen: Sequence[Observation],
) -> Iterator[RouterSpec]:
    """Every spec that explains all observations `seen`, given selection rules that explain their ids."""
    for rule in rules:
        yield from (s for s in fit_weights(problem, rule, seen) if _error(s, seen) < WEIGHT_TOLERANCE)
    if any(r.score is Score.IDENTITY and r.num_groups == 1 and not r.has_bias for r in rules):
        yield from (s for s in fit_sparsemixer(recorder) if _error(s, seen) < WEIGHT_TOLERANCE)


def _by_hint(problem: RouterProblem, specs: Iterable[RouterSpec]) -> list[RouterSpec]:
    """Equal specs ordered by what the operations suggest: the score that is computed first."""
    hint = Score.IDENTITY
    for name in problem.ops:
        lowered = name.lower()
        if any(word in lowered for word in ("topk", "argmax", "sort")):
            break
        found = [s for s in SCORES[:2] if s.value in lowered]
        if found or "softplus" in lowered:
            hint = found[0] if found else Score.SQRTSOFTPLUS
            break
    return sorted(specs, key=lambda spec: (spec.score is not hint, spec.num_groups > 1))


# Selection rules


def _rule_sets(
    problem: RouterProblem, seen: Sequence[Observation], selected: Sequence[RouterSpec]
) -> Iterator[list[RouterSpec]]:
    """Sets of selection rules that explain all recorded ids: without groups, groups hinted, any groups.

    The last set is costly and is tried only while `selected` shows that no rule has explained the ids.
    """
    scores = _Scores(seen)
    plain = [
        RouterSpec(
            score=score,
            top_k=problem.top_k,
            num_experts=problem.num_experts,
            has_bias=has_bias,
            score_dtype="fp32",
        )
        for has_bias in ((False, True) if problem.has_bias else (False,))
        for score in SCORES
    ]
    yield [rule for rule in plain if scores.legal(rule)]
    hinted = _group_shapes(problem, seen[0], problem.int_constants)
    yield [rule for rule in _grouped(plain, hinted) if scores.legal(rule)]
    if not selected:
        every = _group_shapes(problem, seen[0], range(1, problem.num_experts))
        others = [shape for shape in every if shape not in hinted]
        yield [rule for rule in _grouped(plain, others) if scores.legal(rule)]


def _group_shapes(
    problem: RouterProblem, observation: Observation, candidates: Iterable[int]
) -> list[tuple[int, int]]:
    """Pairs (groups, kept groups) with which most rows of an observation agree."""
    num_experts, numbers = problem.num_experts, set(candidates)
    assert observation.ids is not None
    shapes = []
    for size in range(1, num_experts):
        num_groups, rest = divmod(num_experts, size)
        if rest or num_groups < 2 or not numbers & {num_groups, size}:
            continue
        groups = (observation.ids // size).sort(-1).values
        used = (groups.diff(dim=-1) != 0).sum(-1) + 1
        # A fill of 0.0 lets lost groups win on the rows whose scores are negative: not all rows need agree.
        typical = int(used.sort().values[used.numel() * 3 // 5])
        kept_range = range(max(typical, -(-problem.top_k // size)), num_groups)
        shapes += [(num_groups, kept) for kept in kept_range if kept in numbers]
    return shapes


def _grouped(
    plain: Sequence[RouterSpec], shapes: Iterable[tuple[int, int]]
) -> Iterator[RouterSpec]:
    for num_groups, kept in shapes:
        for rule in plain:
            # Without a bias, scores are positive and the fill value cannot be seen.
            signed = rule.has_bias or rule.score is Score.IDENTITY
            for fill in (float("-inf"), 0.0) if signed else (float("-inf"),):
                for group_score in GroupScore:
                    if group_score is GroupScore.TOP2_SUM and num_groups == rule.num_experts:
                        continue
                    yield dataclasses.replace(
                        rule,
                        num_groups=num_groups,
                        top_k_groups=kept,
                        group_score=group_score,
                        group_fill=fill,
                    )


class _Scores:
    """The scores of all observations, computed once a score function."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        self._observations = observations
        self._scores: dict[Score, list[Tensor]] = {}

    def of(self, score: Score) -> list[Tensor]:
        """Scores [n, E], one tensor an observation."""
        if score not in self._scores:
            self._scores[score] = [score_logits(score, o.logits) for o in self._observations]
        return self._scores[score]

    def legal(self, rule: RouterSpec) -> bool:
        """Whether all recorded ids are a top-k under this rule; a few rows are tried first."""
        scores = self.of(rule.score)
        first = self._observations[0]
        few = slice(0, 7)
        return bool(_legal_rows(rule, scores[0][few], first, few).all()) and all(
            bool(_legal_rows(rule, s, o).all())
            for s, o in zip(scores, self._observations, strict=True)
        )


def _legal_rows(
    rule: RouterSpec, scores: Tensor, observation: Observation, rows: slice = slice(None)
) -> Tensor:
    """Which rows [n] are explained by a rule: the ids are a top-k, or the tie of two groups leaves it open."""
    assert observation.ids is not None
    bias = observation.bias if rule.has_bias else None
    choice = selection_scores(rule, scores, bias)
    best = choice.topk(rule.top_k, dim=-1).values
    picked = choice.gather(-1, observation.ids[rows]).sort(-1, descending=True).values
    absorbed = 0.0 if bias is None else 1e-15 * float(bias.abs().max())
    legal = torch.isclose(picked, best, rtol=TIE_TOLERANCE, atol=absorbed).all(-1)
    if rule.num_groups > 1:
        of_groups = group_scores(rule, scores if bias is None else scores + bias)
        ranked = of_groups.sort(-1, descending=True).values
        last, next_one = ranked[:, rule.top_k_groups - 1], ranked[:, rule.top_k_groups]
        legal |= torch.isclose(last, next_one, rtol=TIE_TOLERANCE, atol=absorbed)
    return legal


# Proof


def _error(spec: RouterSpec, observations: Sequence[Observation]) -> float:
    """Largest relative error of the weights over all observations; inf where other experts are selected."""
    error = 0.0
    for observation in observations:
        if spec.score is Score.SPARSEMIXER:
            found = _sparsemixer_error(spec, observation)
        else:
            scores = score_logits(spec.score, observation.logits)
            if not bool(_legal_rows(spec, scores, observation).all()):
                return float("inf")
            assert observation.ids is not None
            found = relative_error(
                combine_weights(spec, scores, observation.ids), observation.weights
            )
        error = max(error, found)
    return error


def relative_error(weights: Tensor, expected: Tensor) -> float:
    """Largest elementwise relative difference of two fp64 tensors; inf when not finite."""
    size = torch.maximum(weights.abs(), expected.abs()).clamp(min=1e-290)
    error = float(((weights - expected).abs() / size).max())
    return error if error == error else float("inf")


def _sparsemixer_error(spec: RouterSpec, observation: Observation) -> float:
    """As `_error`; rows with ties among the leading logits are left out, since the order of the slots counts."""
    assert observation.ids is not None
    leading = min(spec.top_k + 1, spec.num_experts)
    top = observation.logits.topk(leading, dim=-1).values
    clear = ~torch.isclose(top[:, 1:], top[:, :-1], rtol=TIE_TOLERANCE, atol=0.0).any(-1)
    ids, weights = route(spec, observation.logits[clear])
    shape = (ids.shape[0], spec.num_experts)
    expected = torch.zeros(shape, dtype=weights.dtype).scatter(-1, ids, weights)
    found = torch.zeros(shape, dtype=weights.dtype).scatter(
        -1, observation.ids[clear], observation.weights[clear]
    )
    return relative_error(expected, found)


def _in_graph_dtypes(
    problem: RouterProblem, spec: RouterSpec, native: Sequence[Observation], error: float
) -> RouterMatch:
    """Compare with the reference in the dtypes of the graph; choose the dtype of the scores."""
    low = problem.logits_dtype in (torch.bfloat16, torch.float16)
    fills = (0.0, float("-inf")) if spec.num_groups > 1 and not spec.has_bias else (spec.group_fill,)
    notes = []
    for score_dtype in ("fp32", "") if low else ("fp32",):
        for fill in fills:
            candidate = dataclasses.replace(spec, score_dtype=score_dtype, group_fill=fill)
            wrong_ids, wrong_weights, num_rows = _count_wrong(problem, candidate, native)
            if not wrong_ids and not wrong_weights:
                return RouterMatch(
                    spec=candidate, exact_ids=True, num_runs=0, max_error=error
                )
            dtype_name = score_dtype or "the dtype of the logits"
            notes.append(
                (
                    wrong_ids + wrong_weights,
                    f"proven in exact arithmetic; with scores in {dtype_name}, {wrong_ids} of "
                    f"{num_rows} rows select other experts and {wrong_weights} round differently",
                    candidate,
                )
            )
    _, note, candidate = min(notes, key=lambda entry: entry[0])
    return RouterMatch(spec=candidate, exact_ids=False, num_runs=0, max_error=error, note=note)


def _count_wrong(
    problem: RouterProblem, spec: RouterSpec, native: Sequence[Observation]
) -> tuple[int, int, int]:
    """Rows with other experts, rows with other weights (beyond rounding), rows in all."""
    wrong_ids = wrong_weights = num_rows = 0
    for observation in native:
        ids, weights = route(spec, observation.logits, observation.bias if spec.has_bias else None)
        rounding = 4 * torch.finfo(problem.weights_dtype).eps
        if weights.is_floating_point() and not spec.score_dtype:
            rounding = max(rounding, 4 * torch.finfo(problem.logits_dtype).eps)
        weights = weights.to(problem.weights_dtype)
        expected = torch.zeros(observation.logits.shape, dtype=torch.float64)
        found = expected.clone()
        expected.scatter_(-1, ids, weights.double())
        if observation.ids is None:
            found = observation.weights.double()
            other = ((found != 0) != (expected != 0)).any(-1)
        else:
            found.scatter_(-1, observation.ids, observation.weights.double())
            other = (ids.sort(-1).values != observation.ids.sort(-1).values).any(-1)
        smallest = torch.finfo(problem.weights_dtype).tiny
        close = torch.isclose(found, expected, rtol=rounding, atol=smallest).all(-1)
        if spec.num_groups > 1 and not spec.has_bias:
            close |= _underflows(spec, observation.logits, ids)
        wrong_ids += int(other.sum())
        wrong_weights += int((~close & ~other).sum())
        num_rows += ids.shape[0]
    return wrong_ids, wrong_weights, num_rows


def _underflows(spec: RouterSpec, logits: Tensor, ids: Tensor) -> Tensor:
    """Rows [n] where a kept expert underflows to the fill value: which weight a lost one gets is then open."""
    scores = score_logits(spec.score, logits.float() if spec.score_dtype else logits)
    return (scores.gather(-1, ids) == 0).any(-1) | (
        selection_scores(spec, scores).gather(-1, ids) == spec.group_fill
    ).any(-1)
