"""Run a router on designed logits and record what it does.

The router is a black box here: `Recorder` executes it, in chunks of the number of tokens its graph
was built for, and refuses a router that is random, mixes tokens, or returns something that is no
routing. `precise_observations` and `native_observations` choose the logits; each kind of row makes
one property of a router visible:

* rows of several spreads and offsets: the score function, the normalisation, the scale, the added
  or clamping eps;
* duplicated values: how ties are treated;
* one expert far above all others, every expert in turn: ids above 255, renumbered ids;
* biases that are small, large, and negative enough to push all scores below zero: selection-only
  bias, fill values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class SubgraphFunction(Protocol):
    """A router as a function of its leaves, callable any number of times."""

    def __call__(
        self, logits: Tensor, bias: Tensor | None, *, precise: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Run it on logits [T', E] and bias [E].

        Args:
            logits: [T', E], in fp64 when `precise`, otherwise in the dtype of the graph.
            bias: [E] or None.
            precise: every float dtype of the graph is replaced by fp64.

        Returns:
            ids [T', K], or None when the graph has none, and weights [T', K], or [T', E] when
            dense.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterProblem:
    """What is known of a router before it is run.

    Attributes:
        run: the router.
        num_experts: E.
        top_k: K.
        num_tokens: T', the number of rows `run` must be called with.
        has_bias: a second float leaf of shape [E] exists; whether it is a selection bias is to be
            found out.
        dense: the weights come as [T', E], zero where not routed.
        logits_dtype, bias_dtype, weights_dtype: dtypes in the graph.
        ops: names of the operations in graph order; they order the hypotheses and prove nothing.
        constants: float literals of the graph: candidates for eps, scale and jitter.
        int_constants: integer literals of the graph: candidates for the number of groups and of
            kept groups.
    """

    run: SubgraphFunction
    num_experts: int
    top_k: int
    num_tokens: int
    has_bias: bool
    dense: bool
    logits_dtype: torch.dtype
    bias_dtype: torch.dtype
    weights_dtype: torch.dtype
    ops: tuple[str, ...] = ()
    constants: tuple[float, ...] = ()
    int_constants: tuple[int, ...] = ()


class RefusedError(Exception):
    """The router cannot be matched; the text is the reason for the user."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """What the router answered to some rows under one bias.

    Attributes:
        logits: [n, E].
        bias: [E] or None.
        ids: [n, K] int64; None for a dense router in its own dtypes.
        weights: [n, K], or [n, E] where `ids` is None.
    """

    logits: Tensor
    bias: Tensor | None
    ids: Tensor | None
    weights: Tensor


class Recorder:
    """Executes the router of one problem and counts the executions."""

    def __init__(self, problem: RouterProblem) -> None:
        self.problem = problem
        self.num_runs = 0

    def observe(self, rows: Tensor, bias: Tensor | None) -> Observation:
        """Run fp64 rows [n, E]; the answer is checked to be a routing.

        Raises:
            RefusedError: it is not.
        """
        ids, weights = self._run(rows, bias, precise=True)
        if self.problem.dense:
            ids, weights = self._sparse(weights)
        elif ids is None:
            raise RefusedError("the router sub-graph yields no expert ids")
        self._check(ids, weights, rows.shape[0])
        return Observation(rows, bias, ids, weights)

    def observe_native(self, rows: Tensor, bias: Tensor | None) -> Observation:
        """Run rows [n, E] in the dtypes of the graph."""
        ids, weights = self._run(rows, bias, precise=False)
        return Observation(rows, bias, None if self.problem.dense else ids, weights)

    def _run(
        self, rows: Tensor, bias: Tensor | None, *, precise: bool
    ) -> tuple[Tensor | None, Tensor]:
        size = self.problem.num_tokens
        ids_parts: list[Tensor] = []
        weights_parts: list[Tensor] = []
        for start in range(0, rows.shape[0], size):
            chunk = rows[start : start + size]
            missing = size - chunk.shape[0]
            if missing:
                chunk = torch.cat([chunk, rows[torch.arange(missing) % rows.shape[0]]])
            ids, weights = self._call(chunk, bias, precise)
            kept = size - missing
            weights_parts.append(weights.reshape(size, -1)[:kept])
            if ids is not None:
                ids_parts.append(ids.reshape(size, -1)[:kept].long())
        return (torch.cat(ids_parts) if ids_parts else None), torch.cat(weights_parts)

    def _call(
        self, chunk: Tensor, bias: Tensor | None, precise: bool
    ) -> tuple[Tensor | None, Tensor]:
        self.num_runs += 1
        # A router may write in place: it gets its own copy.
        given = bias if bias is None else bias.clone()
        try:
            return self.problem.run(chunk.clone(), given, precise=precise)
        except Exception as error:  # arbitrary user code: whatever it raises is the reason
            mode = "in fp64" if precise else "by itself"
            text = str(error).strip().splitlines()
            raise RefusedError(
                f"the router sub-graph does not run {mode}: {type(error).__name__}: "
                f"{text[0][:160] if text else ''}"
            ) from error

    def _sparse(self, dense: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and weights [n, K] of dense weights [n, E], ids ascending."""
        top_k = self.problem.top_k
        present = dense != 0
        counts = present.sum(-1)
        if bool((counts != top_k).any()):
            raise RefusedError(
                f"dense weights have {int(counts.min())} to {int(counts.max())} nonzero entries a "
                f"token, {top_k} are needed"
            )
        ids = present.nonzero()[:, 1].reshape(-1, top_k)
        return ids, dense.gather(-1, ids)

    def _check(self, ids: Tensor, weights: Tensor, num_rows: int) -> None:
        top_k, num_experts = self.problem.top_k, self.problem.num_experts
        if ids.shape != (num_rows, top_k) or weights.shape != ids.shape:
            raise RefusedError(
                f"ids {tuple(ids.shape)} and weights {tuple(weights.shape)} of the router are not "
                f"both [{num_rows}, {top_k}]"
            )
        if bool(((ids < 0) | (ids >= num_experts)).any()):
            raise RefusedError(f"expert ids lie outside of 0..{num_experts - 1}")
        if top_k > 1 and bool((ids.sort(-1).values.diff(dim=-1) == 0).any()):
            raise RefusedError("a token selects the same expert twice")
        if not bool(weights.isfinite().all()):
            raise RefusedError("combine weights are not finite for some finite logits")


def check_repeatable(recorder: Recorder, first: Observation) -> None:
    """Refuse a router that is random or lets tokens influence each other.

    Raises:
        RefusedError: with the reason.
    """
    size = recorder.problem.num_tokens
    rows = first.logits[:size]
    again = recorder.observe(rows, first.bias)
    if not _same(again, first, torch.arange(rows.shape[0])):
        raise RefusedError("the router is random: two runs on equal logits differ")
    if size == 1:
        return
    order = torch.arange(rows.shape[0]).flip(0)
    order[::3] = order[0]
    mixed = recorder.observe(rows[order], first.bias)
    if not _same(mixed, first, order):
        raise RefusedError("the routing of a token depends on the other tokens of the batch")


def _same(observation: Observation, reference: Observation, order: Tensor) -> bool:
    assert observation.ids is not None
    assert reference.ids is not None
    if not torch.equal(observation.ids, reference.ids[order]):
        return False
    return bool(torch.isclose(observation.weights, reference.weights[order], rtol=1e-12).all())


def precise_observations(recorder: Recorder, seed: int) -> list[Observation]:
    """Answers to fp64 rows: one observation a bias, one in all without a bias.

    The first observation holds rows that show group limits, and every score plus bias of most of
    its rows is positive.
    """
    problem = recorder.problem
    num_experts, top_k = problem.num_experts, problem.top_k
    generator = torch.Generator().manual_seed(seed)
    few = problem.num_tokens < 8
    num_rows = 32 if few or seed else 64

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows = torch.cat(
        [
            _group_rows(noise, num_experts),
            _ladder_rows(noise(12, num_experts)),
            _mixed_rows(noise(num_rows, num_experts)),
        ]
    )
    if not problem.has_bias:
        return [recorder.observe(rows, None)]
    # Nearly constant, larger than every score, as large as scores, below every score.
    biases = [1 + 1e-3 * noise(num_experts), 4 + 0.3 * noise(num_experts)]
    biases += [3 * noise(num_experts), -4 + 0.3 * noise(num_experts)]
    seen = [recorder.observe(rows, biases[0])]
    seen += [
        recorder.observe(_mixed_rows(noise(num_rows // 2, num_experts)), b) for b in biases[1:]
    ]
    # The bias alone selects the first K experts, however small their scores are.
    forced = torch.where(torch.arange(num_experts) < top_k, 1000.0, 0.0).double()
    rows = noise(16, num_experts)
    rows[:, :top_k] = _ladder_rows(rows[:, :top_k])
    return [*seen, recorder.observe(rows, forced)]


def _mixed_rows(noise: Tensor) -> Tensor:
    """Logits [n, E] of eight kinds, within +-320 so that no score underflows; no logit is 0."""
    num_rows, num_experts = noise.shape
    makers: Sequence[Callable[[Tensor, Tensor], Tensor]] = (
        lambda r, i: 3 * r,
        lambda r, i: r + 8,
        lambda r, i: 30 * r.clamp(-5, 5),
        lambda r, i: 0.01 * r,
        lambda r, i: (r * 2).round().clamp(-6, 6) + 0.125,
        lambda r, i: _with_winners(r, i, num_experts),
        lambda r, i: r - 20,
        lambda r, i: 3 + 1e-6 * r,
    )
    kinds = torch.arange(num_rows) % len(makers)
    rows = noise.clone()
    for kind, maker in enumerate(makers):
        chosen = (kinds == kind).nonzero().flatten()
        rows[chosen] = maker(rows[chosen], chosen)
    return rows


def _ladder_rows(noise: Tensor) -> Tensor:
    """Logits [n, E] at offsets from -280 to 20: the sum of scores passes every possible eps."""
    return noise + torch.linspace(-280, 20, noise.shape[0], dtype=torch.float64).unsqueeze(-1)


def _with_winners(rows: Tensor, numbers: Tensor, num_experts: int) -> Tensor:
    """One expert far above the others; it walks over all experts, the last ones first."""
    winner = (num_experts - 1 - numbers // 8 * max(1, num_experts // 12)) % num_experts
    return rows.scatter_add(-1, winner.unsqueeze(-1), torch.full_like(rows[:, :1], 20.0))


def _group_rows(noise: Callable[..., Tensor], num_experts: int) -> Tensor:
    """Logits [n, E] in 0..1, two rows for every group size.

    Row one spreads the leading experts over all groups. Row two puts the best expert into a group
    of low ones, so that by the sum of its best two the group is the last.
    """
    rows = [torch.empty(0, num_experts, dtype=torch.float64)]
    for size in range(2, num_experts):
        if num_experts % size:
            continue
        num_groups = num_experts // size
        spread = 0.05 + 0.001 * noise(num_groups, size)
        leaders = noise(num_groups, size).argmax(-1, keepdim=True)
        spread.scatter_(-1, leaders, 1 + 0.03 * noise(num_groups, 1))
        lonely = 0.875 + 0.02 * noise(num_groups, size).clamp(-3, 3)
        group = int(noise(num_groups).argmax())
        lonely[group] = 0.05
        lonely[group, int(noise(size).argmax())] = 1.0
        rows += [spread.reshape(1, -1), lonely.reshape(1, -1)]
    return torch.cat(rows)


def native_observations(recorder: Recorder, seed: int) -> list[Observation]:
    """Answers to rows in the dtypes of the graph, rich in ties, near ties and saturated scores."""
    problem = recorder.problem
    num_experts = problem.num_experts
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32)

    def rows(num_rows: int) -> Tensor:
        made = noise(num_rows, num_experts)
        kinds = torch.arange(num_rows) % 8
        scales = torch.tensor([1.0, 3.0, 12.0, 200.0, 1.0, 1.0, 0.02, 0.02])[kinds]
        offsets = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 9.0, 1.0, -0.5])[kinds]
        made = made * scales.unsqueeze(-1) + offsets.unsqueeze(-1)
        coarse = kinds == 4
        made[coarse] = (made[coarse] * 2).round() / 2
        return made.to(problem.logits_dtype)

    few = problem.num_tokens < 8
    if not problem.has_bias:
        return [recorder.observe_native(rows(32 if few else 96), None)]
    # Sizes at which the bias decides between scores that a lower precision rounds together; the
    # last one makes most of them negative, so that experts of lost groups win where the fill is 0.
    biases = (
        0.1 * noise(num_experts),
        0.5 + 1e-4 * (4 * noise(num_experts)).round(),
        1e-3 * noise(num_experts),
        0.02 / num_experts * noise(num_experts),
        -3 + 0.1 * noise(num_experts),
    )
    return [
        recorder.observe_native(rows(16 if few else 32), bias.to(problem.bias_dtype))
        for bias in biases
    ]
