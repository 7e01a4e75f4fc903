"""Which known router a sub-graph is: found by probing, decided by running it.

Three steps. *Probe*: `router_probe` records in fp64 what the router answers to designed logits.
*Explain*: every selection rule (score, bias, groups: `router_rules`) that explains all recorded
ids is paired with every normalisation that explains all recorded weights (`router_fit`); scale,
eps and jitter are solved for, the literals of the graph only round them. *Prove*: the survivors
must reproduce fresh random batches in fp64 and are then compared in the dtypes of the graph
(`router_native`). Names of operations only order survivors that nothing else tells apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe_compiler.ir import RouterSpec, Score
from moe_compiler.passes.router_fit import fit_sparsemixer, fit_weights
from moe_compiler.passes.router_native import NativeResult, compare_native, native_variants
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
from moe_compiler.passes.router_rules import TIE_TOLERANCE, Rules, legal_rows
from moe_compiler.reference import combine_weights, route, score_logits

__all__ = [
    "NoMatchReason",
    "RouterMatch",
    "RouterProblem",
    "SubgraphFunction",
    "match_router",
]

# Two fp64 spellings of one function differ by less than this; two different functions by more on
# some probe.
WEIGHT_TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterMatch:
    """A proven router.

    Attributes:
        spec: the router; its `score_dtype` is the one that agrees in the dtypes of the graph.
        exact_ids: in those dtypes too, `reference.route` selects the same experts, and its weights
            differ by rounding only. When False the spec holds in exact arithmetic alone.
        same_ties: experts with equal scores are chosen as `torch.topk` chooses them on a CPU.
        num_runs: how often the sub-graph was executed.
        max_error: largest relative error of a combine weight in fp64.
        note: what differs when `exact_ids` or `same_ties` is False, or "".
    """

    spec: RouterSpec
    exact_ids: bool
    same_ties: bool
    num_runs: int
    max_error: float
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class NoMatchReason:
    """Why a router was not recognised: one sentence for the user."""

    reason: str


def match_router(problem: RouterProblem) -> RouterMatch | NoMatchReason:
    """Recognise a router, or say why it is none that is known.

    The router runs on CPU tensors. The global random state is left as it was; no gradient is
    recorded.
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


def crowd_reason(problem: RouterProblem, spec: RouterSpec) -> str:
    """Why a proven router does not hold for as many equal tokens as `problem` has, or ""."""
    recorder = Recorder(problem)
    generator = torch.Generator().manual_seed(3)
    row = torch.randn(1, problem.num_experts, generator=generator, dtype=torch.float64)
    bias = 1 + 1e-3 * row[0].flip(0) if problem.has_bias else None
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        try:
            seen = recorder.observe(row.expand(problem.num_tokens, -1).contiguous(), bias)
        except RefusedError as error:
            return str(error)
    if _error(spec, [seen]) <= WEIGHT_TOLERANCE:
        return ""
    return f"the routing of a token depends on the other tokens of a batch of {problem.num_tokens}"


def _match(problem: RouterProblem, recorder: Recorder) -> RouterMatch | NoMatchReason:
    seen = precise_observations(recorder, seed=0)
    check_repeatable(recorder, seen[0])
    fresh = precise_observations(recorder, seed=1)
    native: list[Observation] = []
    proven: list[tuple[RouterSpec, float]] = []
    explained: list[RouterSpec] = []
    for rules in _rule_sets(recorder, seen, proven):
        explained.extend(rules)
        for spec in _explanations(problem, recorder, rules, seen):
            error = _error(spec, fresh)
            if error <= WEIGHT_TOLERANCE:
                proven.append((spec, max(error, _error(spec, seen))))
        if proven:
            native = native or native_observations(recorder, seed=2)
            match = _best_native(problem, proven, native, recorder)
            if match.exact_ids:
                return match
    if proven:
        return match
    if explained:
        return NoMatchReason(explain_weights(recorder, explained, seen))
    return NoMatchReason(explain_selection(problem, seen))


def _rule_sets(
    recorder: Recorder, seen: Sequence[Observation], proven: Sequence[object]
) -> Iterator[list[RouterSpec]]:
    """Sets of selection rules to try in turn; the last one only while `proven` stays empty."""
    rules = Rules(recorder, seen)
    yield rules.plain()
    yield rules.grouped(recorder.problem.int_constants)
    if not proven:
        yield rules.grouped(None)


def _explanations(
    problem: RouterProblem,
    recorder: Recorder,
    rules: Sequence[RouterSpec],
    seen: Sequence[Observation],
) -> Iterator[RouterSpec]:
    """Every spec that explains all observations, given rules that explain their ids."""
    fitted = [spec for rule in rules for spec in fit_weights(problem, rule, seen)]
    if not fitted and any(r.score is Score.IDENTITY and r.num_groups == 1 for r in rules):
        fitted = list(fit_sparsemixer(recorder))
    for spec in fitted:
        if _error(spec, seen) <= WEIGHT_TOLERANCE:
            yield spec


# Exact arithmetic


def _error(spec: RouterSpec, observations: Sequence[Observation]) -> float:
    """Largest relative error of the weights; inf where other experts are selected."""
    error = 0.0
    for observation in observations:
        assert observation.ids is not None
        if spec.score is Score.SPARSEMIXER:
            error = max(error, _sparsemixer_error(spec, observation))
            continue
        scores = score_logits(spec.score, observation.logits)
        if not bool(legal_rows(spec, scores, observation).all()):
            return float("inf")
        weights = combine_weights(spec, scores, observation.ids)
        error = max(error, _relative_error(weights, observation.weights))
    return error


def _relative_error(weights: Tensor, expected: Tensor) -> float:
    """Largest elementwise relative difference of two fp64 tensors; inf when not finite."""
    size = torch.maximum(weights.abs(), expected.abs()).clamp(min=1e-290)
    error = float(((weights - expected).abs() / size).max())
    return error if error == error else float("inf")


def _sparsemixer_error(spec: RouterSpec, observation: Observation) -> float:
    """As `_error`, without rows with ties among the leading logits: the order of slots counts."""
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
    return _relative_error(expected, found)


# The dtypes of the graph


def _best_native(
    problem: RouterProblem,
    proven: Sequence[tuple[RouterSpec, float]],
    native: Sequence[Observation],
    recorder: Recorder,
) -> RouterMatch:
    """The proven spec that agrees best in the dtypes of the graph."""
    hint = _hinted_score(problem.ops)
    ranked: list[tuple[tuple[int, ...], NativeResult, RouterSpec, float]] = []
    for spec, error in proven:
        for variant in native_variants(problem, spec):
            result = compare_native(problem, variant, native)
            # Where ties are broken in another way, the spec with fewer ties says more.
            undecided = result.ties if result.other_ties else 0
            unlike = int(variant.score is not hint)
            rank = (result.illegal, result.wrong, result.other_ties, undecided, unlike, len(ranked))
            ranked.append((rank, result, variant, error))
    _, result, spec, error = min(ranked, key=lambda entry: entry[0])
    return RouterMatch(
        spec=spec,
        exact_ids=result.agrees,
        same_ties=result.agrees and not result.other_ties,
        num_runs=recorder.num_runs,
        max_error=error,
        note=_note(result, spec),
    )


def _hinted_score(ops: Sequence[str]) -> Score:
    """The score function whose operation comes before the selection, IDENTITY when none does."""
    for name in ops:
        lowered = name.lower()
        if "softmax" in lowered:
            return Score.SOFTMAX
        if "sigmoid" in lowered:
            return Score.SIGMOID
        if "softplus" in lowered:
            return Score.SQRTSOFTPLUS
        if any(word in lowered for word in ("topk", "argmax", "sort")):
            break
    return Score.IDENTITY


def _note(result: NativeResult, spec: RouterSpec) -> str:
    if not result.agrees:
        dtype = spec.score_dtype or "the dtype of the logits"
        return (
            f"proven in exact arithmetic; with scores in {dtype}, {result.illegal} of "
            f"{result.num_rows} rows select other experts and {result.wrong} have other weights"
        )
    if result.other_ties:
        return (
            f"tied scores are broken otherwise than by torch.topk ({result.other_ties} of "
            f"{result.num_rows} rows)"
        )
    return ""
