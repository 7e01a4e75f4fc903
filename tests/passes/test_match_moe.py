"""Blocks in other people's styles are found whole, look-alikes are left alone with a reason."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from moe_compiler.ir import GateLayout, MoEPlan, Score, WeightPosition
from moe_compiler.passes.match_moe import find_regions, may_hold_moe
from tests.models import styles
from tests.passes import graphs


@pytest.mark.parametrize("name", list(styles.STYLES))
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_style_is_matched_whole(name: str, dynamic: bool) -> None:
    result = graphs.match(styles.build(name), styles.rows(), dynamic=dynamic)
    assert [r.reason for r in result.refused] == []
    (block,) = result.matches
    region = block.region
    assert region.router.score is not Score.EXTERNAL, region.router_note
    assert region.experts.gate_layout is GateLayout.SEPARATE
    assert region.proof.precision == "fp64"
    assert region.proof.max_error < 1e-9
    assert (region.num_tokens == 0) == dynamic


@pytest.mark.parametrize("name", list(styles.UNKNOWN_ROUTERS))
def test_unknown_router_stays_in_the_graph(name: str) -> None:
    (block,) = graphs.match(styles.build(name), styles.rows()).matches
    assert block.region.router.score is Score.EXTERNAL
    assert block.region.router_note


REASONS = {
    "switch_capacity": "not summed|other tokens",
    "scatter_overwrites": "not summed",
    "unequal_experts": "not equal",
    "identity_experts": "id 8",
    "mixed_activations": "expert 7",
    "norm_between": "activation",
    "tokens_talk": "other tokens",
}


@pytest.mark.parametrize("name", list(styles.LOOKALIKES))
def test_look_alike_is_left_alone(name: str) -> None:
    result = graphs.match(styles.build(name), styles.rows())
    assert not result.matches
    if name in REASONS:
        (refusal,) = result.refused
        assert re.search(REASONS[name], refusal.reason), refusal.reason
    else:
        assert not result.refused  # nothing in it looks like two layers of experts


class Small(nn.Module):
    """Softmax, top-2, gathered experts; with choices that surround the block differently."""

    def __init__(self, hidden: int = 12, experts: int = 6, inter: int = 10) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(0.3 * torch.randn(*shape, generator=generator))

        self.gate = parameter(experts, hidden)
        self.w1, self.w3 = parameter(experts, inter, hidden), parameter(experts, inter, hidden)
        self.w2 = parameter(experts, hidden, inter)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = x @ self.gate.t()
        weights, ids = torch.softmax(logits, -1).topk(2)
        return logits, weights, ids

    def experts(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        gate = torch.einsum("th,tkih->tki", x, self.w1[ids])
        up = torch.einsum("th,tkih->tki", x, self.w3[ids])
        hidden = torch.nn.functional.silu(gate) * up
        return torch.einsum("tki,tkhi,tk->th", hidden, self.w2[ids], weights)

    def forward(self, x: torch.Tensor):
        _, weights, ids = self.route(x)
        return self.experts(x, weights, ids)


def test_loss_over_the_logits_does_not_hide_the_block() -> None:
    class WithLoss(Small):
        def forward(self, x: torch.Tensor):
            logits, weights, ids = self.route(x)
            load = torch.nn.functional.one_hot(ids, 6).float().mean((0, 1))
            loss = (load * torch.softmax(logits, -1).mean(0)).sum()
            return self.experts(x, weights, ids), loss, ids

    (block,) = graphs.match(WithLoss(), torch.randn(9, 12)).matches
    assert set(block.region.escaping) == {"logits", "ids"}


def test_block_inside_of_residuals_norms_and_a_gated_shared_expert() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.moe = nn.LayerNorm(12), Small()
            self.up, self.down, self.open = nn.Linear(12, 20), nn.Linear(20, 12), nn.Linear(12, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x).view(-1, 12)
            shared = torch.sigmoid(self.open(y)) * self.down(torch.relu(self.up(y)))
            return x + (self.moe(y) + shared).view(x.shape)

    (block,) = graphs.match(Layer(), torch.randn(2, 5, 12)).matches
    region = block.region
    assert (region.shared_expert, region.shared_intermediate) == ("gated", 20)
    assert region.name == "moe"
    assert region.module_class == "Small"
    assert region.num_tokens == 10


def test_attention_like_top_k_is_no_candidate() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.q(x) @ self.k(x).t()
            values, ids = scores.topk(2)
            return (torch.softmax(values, -1)[..., None] * x[ids]).sum(1)

    result = graphs.match(Sparse(), torch.randn(9, 12))
    assert not result.matches
    assert not result.refused


def test_random_numbers_in_the_experts_are_refused() -> None:
    class Noisy(Small):
        def experts(self, x, weights, ids):
            return super().experts(torch.nn.functional.dropout(x, 0.3, True), weights, ids)

    result = graphs.match(Noisy(), torch.randn(9, 12))
    assert not result.matches
    assert "random" in result.refused[0].reason or "activation" in result.refused[0].reason


def test_computed_weights_are_taken_as_they_are() -> None:
    class Adapted(Small):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (
                nn.Parameter(torch.randn(6, 10, 3)),
                nn.Parameter(torch.randn(6, 3, 12)),
            )

        def experts(self, x, weights, ids):
            w1 = self.w1 + self.a @ self.b
            gate = torch.einsum("th,tkih->tki", x, w1[ids])
            hidden = torch.nn.functional.silu(gate) * torch.einsum("th,tkih->tki", x, self.w3[ids])
            return torch.einsum("tki,tkhi,tk->th", hidden, self.w2[ids], weights)

    x = torch.randn(9, 12)
    module = Adapted()
    with torch.no_grad():
        result, _, count = graphs.replaced(module, x)
        torch.testing.assert_close(result, module(x), rtol=1e-4, atol=1e-5)
    assert count == 1


@pytest.mark.parametrize(
    ("tokens", "hidden", "inter"),
    [
        (128, 128, 96),
        (256, 96, 128),
        (131, 130, 70),
        (96, 192, 96),
        (70, 67, 71),
        (1, 128, 96),
        (2048, 256, 128),
    ],
)
def test_static_sizes_that_coincide_or_divide_nothing(tokens: int, hidden: int, inter: int) -> None:
    (block,) = graphs.match(Small(hidden, 8, inter), torch.randn(tokens, hidden)).matches
    region = block.region
    assert (region.num_tokens, region.experts.hidden, region.experts.intermediate) == (
        tokens,
        hidden,
        inter,
    )
    assert region.proof.peak_bytes < 64 << 20


def test_exported_program_is_matched_too() -> None:
    module = Small()
    program = torch.export.export(
        module, (torch.randn(9, 12),), dynamic_shapes=({0: torch.export.Dim("t", min=2, max=64)},)
    )
    signature = program.graph_signature
    weights = set(signature.inputs_to_parameters) | set(signature.inputs_to_buffers)
    for graph in (program, program.run_decompositions({})):
        nodes = [n for n in graph.graph_module.graph.nodes if n.name in weights]
        result = find_regions(graph.graph_module, parameters=nodes)
        (block,) = result.matches
        assert block.region.router.kind == "softmax>top2"
        assert block.region.experts.weight_position is WeightPosition.OUTPUT


def test_graph_without_a_selection_is_skipped_at_once() -> None:
    collected, _ = graphs.capture(nn.Linear(4, 4), torch.randn(2, 4))
    assert not may_hold_moe(collected[0][0])
    assert not find_regions(*collected[0]).refused


def test_plan_of_a_region_travels_as_text() -> None:
    (block,) = graphs.match(Small(), torch.randn(9, 12)).matches
    plan = MoEPlan(router=block.region.router, experts=block.region.experts)
    assert MoEPlan.from_key(plan.key) == plan


@pytest.mark.parametrize("inside", [True, False], ids=["in the model", "around the call"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_is_seen(inside: bool, weights: torch.dtype) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = Small().to(weights)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(
                "cpu", torch.bfloat16, enabled=inside or torch.is_autocast_enabled("cpu")
            ):
                return self.moe(x)

    module, x = Cast(), torch.randn(9, 12)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        expected = module(x)
        (block,) = graphs.match(module, x).matches
        result, _, count = graphs.replaced(module, x)
    assert count == 1
    assert block.region.gemm_dtype == "bf16"
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=5e-2, atol=5e-2)
