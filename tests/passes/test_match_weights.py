"""Where expert weights may come from: arguments, parts of a parameter, storage formats."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_compiler.ir import Score
from tests.passes import graphs
from tests.passes.test_match_moe import Small


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_weights_that_are_arguments_of_a_function(dynamic: bool) -> None:
    def moe(x, gate, w1, w3, w2):
        weights, ids = torch.softmax(x @ gate.t(), -1).topk(2)
        hidden = torch.einsum("th,tkih->tki", x, w1[ids])
        hidden = torch.nn.functional.silu(hidden) * torch.einsum("th,tkih->tki", x, w3[ids])
        return torch.einsum("tki,tkhi,tk->th", hidden, w2[ids], weights)

    model, x = Small(), torch.randn(9, 12)
    given = [p.detach() for p in (model.gate, model.w1, model.w3, model.w2)]
    for weight in given:
        torch._dynamo.mark_static(weight)
    (block,) = graphs.match(moe, x, *given, dynamic=dynamic).matches
    assert block.region.router.score is Score.SOFTMAX
    result, _, count = graphs.replaced(moe, x, *given, dynamic=dynamic)
    assert count == 1
    torch.testing.assert_close(result, model(x), rtol=1e-5, atol=1e-6)


def packed(model: Small) -> tuple[torch.Tensor, ...]:
    both = model.pack.view(6, 10, 36)
    return both[..., :12], both[..., 12:24], both[..., 24:].transpose(1, 2)


def split(model: Small) -> tuple[torch.Tensor, ...]:
    w1, w3, w2 = model.pack.view(6, 10, 36).split(12, -1)
    return w1, w3, w2.transpose(1, 2)


def a_range(model: Small) -> tuple[torch.Tensor, ...]:
    return tuple(torch.cat([w, w])[3:9] for w in (model.w1, model.w3, model.w2))


def a_table(model: Small) -> tuple[torch.Tensor, ...]:
    return tuple(w[model.table] for w in (model.w1, model.w3, model.w2))


def stored_in_eight_bits(model: Small) -> tuple[torch.Tensor, ...]:
    return model.small.float(), model.w3, model.w2


@pytest.mark.parametrize("weights_of", [packed, split, a_range, a_table, stored_in_eight_bits])
@pytest.mark.parametrize("loop", [False, True], ids=["gathered", "loop"])
def test_parts_of_a_parameter_are_experts(weights_of, loop: bool) -> None:
    class Parts(Small):
        def __init__(self) -> None:
            super().__init__()
            pack = torch.cat([self.w1, self.w3, self.w2.transpose(1, 2)], -1).detach()
            self.pack = nn.Parameter(pack.flatten())
            self.register_buffer("table", torch.tensor([3, 1, 0, 2, 5, 4]))
            self.register_buffer("small", self.w1.detach().to(torch.float8_e4m3fn))

        def forward(self, x: torch.Tensor):
            _, weights, ids = self.route(x)
            w1, w3, w2 = weights_of(self)
            if not loop:
                hidden = torch.nn.functional.silu(torch.einsum("th,tkih->tki", x, w1[ids]))
                hidden = hidden * torch.einsum("th,tkih->tki", x, w3[ids])
                return torch.einsum("tki,tkhi,tk->th", hidden, w2[ids], weights)
            out = torch.zeros_like(x)
            for e in range(6):
                token, slot = torch.where(ids == e)
                rows = x[token]
                hidden = torch.nn.functional.silu(rows @ w1[e].t()) * (rows @ w3[e].t())
                out.index_add_(0, token, hidden @ w2[e].t() * weights[token, slot, None])
            return out

    model, x = Parts().requires_grad_(False), torch.randn(9, 12)
    result, _, count = graphs.replaced(model, x)
    assert count == 1
    torch.testing.assert_close(result, model(x), rtol=1e-5, atol=1e-6)
