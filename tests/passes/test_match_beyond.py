"""What the few and ordinary values of a proof would not show: capacities, limits, weights without an id."""

from __future__ import annotations

import re

import pytest
import torch

from moe_compiler.ir import Score
from moe_compiler.passes.match_moe import find_regions
from tests.models import styles
from tests.passes import graphs
from tests.passes.test_match_moe import Small


class FixedCapacity(Small):
    """An expert takes its first 40 tokens and drops the others, behind the router."""

    capacity = 40

    def forward(self, x: torch.Tensor):
        _, weights, ids = self.route(x)
        chosen = torch.nn.functional.one_hot(ids, 6).sum(1)
        kept = chosen.cumsum(0) <= self.capacity
        out = torch.zeros_like(x)
        for expert in range(6):
            hidden = torch.nn.functional.silu(x @ self.w1[expert].t()) * (x @ self.w3[expert].t())
            weight = (weights * (ids == expert)).sum(-1) * kept[:, expert]
            out = out + hidden @ self.w2[expert].t() * weight[:, None]
        return out


@pytest.mark.parametrize(("num_tokens", "dynamic"), [(300, False), (20, True)])
def test_capacity_that_few_tokens_never_reach(num_tokens: int, dynamic: bool) -> None:
    """The number of the graph, not the tokens of a proof, says how many tokens show it."""
    result = graphs.match(FixedCapacity(), torch.randn(num_tokens, 12), dynamic=dynamic)
    assert not result.matches
    (refusal,) = result.refused
    assert "with 42 tokens at the same experts its result differs" in refusal.reason


def test_capacity_that_a_static_graph_cannot_reach() -> None:
    (block,) = graphs.match(FixedCapacity(), torch.randn(39, 12), dynamic=False).matches
    assert block.region.num_tokens == 39


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_router_with_a_fixed_capacity_stays_in_the_graph(dynamic: bool) -> None:
    class Dropping(Small):
        def forward(self, x: torch.Tensor):
            _, weights, ids = self.route(x)
            chosen = torch.nn.functional.one_hot(ids, 6)
            place = (chosen.flatten(0, 1).cumsum(0).view_as(chosen) * chosen).sum(-1)
            return self.experts(x, torch.where(place <= 40, weights, 0.0), ids)

    (block,) = graphs.match(Dropping(), torch.randn(300, 12), dynamic=dynamic).matches
    assert block.region.router.score is Score.EXTERNAL
    assert "depends on the other tokens of a batch of" in block.region.router_note


def test_weights_written_in_place_before_a_loop_over_experts() -> None:
    class Edited(Small):
        def forward(self, x: torch.Tensor):
            _, weights, ids = self.route(x)
            weights = weights.clone()
            weights.mul_(2.0).add_(0.1)
            out = torch.zeros_like(x)
            for expert in range(6):
                token, slot = torch.where(ids == expert)
                rows = x[token]
                hidden = torch.nn.functional.silu(rows @ self.w1[expert].t())
                hidden = hidden * (rows @ self.w3[expert].t())
                out.index_add_(0, token, hidden @ self.w2[expert].t() * weights[token, slot, None])
            return out

    result = graphs.match(Edited(), torch.randn(9, 12))
    assert [r.reason for r in result.refused] == []
    assert len(result.matches) == 1


@pytest.mark.parametrize("name", ["loop_stacked", "dense_einsum", "gathered_einsum"])
def test_graph_without_tokens_says_so(name: str) -> None:
    result = graphs.match(styles.build(name), styles.rows()[:, :0], dynamic=False)
    assert not result.matches
    assert [r.reason for r in result.refused] == [
        "it was captured without tokens, on which nothing can be proven"
    ]


class Dense(Small):
    """Every expert on every token, mixed by `gates` [T, E]."""

    def gates(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, weights, ids = self.route(x)
        return torch.zeros(x.shape[0], 6).scatter(1, ids, weights), ids

    def forward(self, x: torch.Tensor):
        gates, ids = self.gates(x)
        hidden = torch.nn.functional.silu(torch.einsum("th,eih->tei", x, self.w1))
        hidden = hidden * torch.einsum("th,eih->tei", x, self.w3)
        return torch.einsum("tei,ehi,te->th", hidden, self.w2, gates), ids


class OneAlways(Dense):
    """Expert 0 takes part besides the chosen ones."""

    def gates(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gates, ids = super().gates(x)
        return gates + torch.nn.functional.one_hot(
            torch.zeros(x.shape[0], dtype=torch.long), 6
        ), ids


class TwoNamesOneExpert(Dense):
    """Router columns 2 i and 2 i + 1 mean one expert, and the later weight overwrites the other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(6) // 2)

    def gates(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, weights, ids = self.route(x)
        ids = self.table[ids]
        return torch.zeros(x.shape[0], 6).scatter(1, ids, weights), ids


def test_dense_gates_are_matched_where_only_ids_count() -> None:
    assert len(graphs.match(Dense(), torch.randn(9, 12)).matches) == 1


@pytest.mark.parametrize(
    ("module", "reason"),
    [(OneAlways, "not zero elsewhere"), (TwoNamesOneExpert, "twice for one token|integers")],
)
def test_dense_gates_for_more_than_the_ids_are_left_alone(module: type[Dense], reason: str) -> None:
    result = graphs.match(module(), torch.randn(9, 12))
    assert not result.matches
    assert re.search(reason, " ".join(r.reason for r in result.refused))


def limited(limit: float):
    class Limited(Small):
        def experts(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor):
            gate = torch.einsum("th,tkih->tki", x, self.w1[ids]).clamp(max=limit)
            hidden = torch.nn.functional.silu(gate) * torch.einsum("th,tkih->tki", x, self.w3[ids])
            return torch.einsum("tki,tkhi,tk->th", hidden, self.w2[ids], weights)

    return Limited()


@pytest.mark.parametrize("limit", [7.0, 300.0, 65504.0])
def test_limit_that_ordinary_values_never_reach_is_found(limit: float) -> None:
    (block,) = graphs.match(limited(limit), torch.randn(9, 12)).matches
    assert block.region.experts.activation.gate_max == limit


def test_switch_that_ordinary_values_never_reach_is_no_activation() -> None:
    class Switching(Small):
        def experts(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor):
            gate = torch.einsum("th,tkih->tki", x, self.w1[ids])
            gate = torch.where(gate > 1000.0, 1.0, torch.nn.functional.silu(gate))
            hidden = gate * torch.einsum("th,tkih->tki", x, self.w3[ids])
            return torch.einsum("tki,tkhi,tk->th", hidden, self.w2[ids], weights)

    assert not graphs.match(Switching(), torch.randn(9, 12)).matches


class Detached(Small):
    """Stops gradients at one place of the block."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def stop(self, value: torch.Tensor, place: str) -> torch.Tensor:
        return value.detach() if place == self.place else value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, ids = self.route(x)
        weights = self.stop(weights, "weights")
        x = self.stop(x, "experts")
        with torch.set_grad_enabled(self.place != "gate"):
            gate = torch.einsum("th,tkih->tki", x, self.stop(self.w1, "w1")[ids])
        hidden = torch.nn.functional.silu(gate) * torch.einsum("th,tkih->tki", x, self.w3[ids])
        hidden = self.stop(hidden, "hidden")
        return torch.einsum("tki,tkhi,tk->th", hidden, self.w2[ids], weights)


def match_for_training(module: torch.nn.Module):
    ((graph, inputs),), _ = graphs.capture(module, torch.randn(9, 12, requires_grad=True))
    return find_regions(graph, inputs)


@pytest.mark.parametrize("place", ["experts", "gate", "hidden"])
def test_experts_that_stop_gradients_are_left_alone_in_training(place: str) -> None:
    result = match_for_training(Detached(place))
    assert not result.matches
    assert "stops gradients" in result.refused[0].reason
    assert len(graphs.match(Detached(place), torch.randn(9, 12)).matches) == 1


def test_router_that_stops_gradients_stays_in_the_graph_in_training() -> None:
    (block,) = match_for_training(Detached("weights")).matches
    assert block.region.router.score is Score.EXTERNAL
    assert "stops the gradient" in block.region.router_note
    (block,) = match_for_training(Detached("nowhere")).matches
    assert block.region.router.score is Score.SOFTMAX


def test_detached_expert_weight_reaches_the_op_detached() -> None:
    (block,) = match_for_training(Detached("w1")).matches
    assert any(node.target == "detach" for node in block.experts)


def test_function_with_a_gradient_of_its_own_is_named() -> None:
    class Tenfold(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 10 * grad

    class Scaled(Small):
        def experts(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor):
            return super().experts(Tenfold.apply(x), weights, ids)

    result = match_for_training(Scaled())
    assert not result.matches
    assert "it calls 'autograd_function_apply'" in result.refused[0].reason


@pytest.mark.parametrize("name", list(styles.STYLES))
def test_every_style_is_matched_in_training(name: str) -> None:
    x = styles.rows().requires_grad_()
    ((graph, inputs),), _ = graphs.capture(styles.build(name), x)
    (block,) = find_regions(graph, inputs).matches
    assert block.region.router.score is not Score.EXTERNAL, block.region.router_note
