"""Kind: what is, and what is not, an MoE block."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases.blocks import (
    FORMS,
    Block,
    compare,
    grouped,
    loop,
    plain_softmax,
    rand,
    renormalized,
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("top_k", [1, 3])
def test_every_form_is_taken(form: str, top_k: int) -> None:
    compare(Block(form=form, top_k=top_k), rand(9, 16), replaced=True)


class SplitByCounts(Block):
    """Rows per expert are read back with `.tolist()` to split the sorted rows."""

    def forward(self, x: Tensor) -> Tensor:
        ids, w = self.select(x)
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.gate.shape[0]).tolist()
        pieces = []
        for expert, rows in enumerate(torch.split(x[order // self.top_k], counts)):
            gate, up = F.linear(rows, self.w13[expert]).chunk(2, -1)
            pieces.append(F.linear(F.silu(gate) * up, self.w2[expert]))
        y = torch.cat(pieces) * w.reshape(-1)[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, order // self.top_k, y)


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_counts_read_back_on_the_host(num_tokens: int) -> None:
    """With few tokens some experts get none: their pieces are empty."""
    compare(SplitByCounts(), rand(num_tokens, 16, seed=num_tokens))


class HitExpertsOnly(Block):
    """The loop runs over the experts that were chosen, which only the data knows."""

    def forward(self, x: Tensor) -> Tensor:
        ids, w = self.select(x)
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            token, slot = torch.where(ids == expert)
            gate, up = F.linear(x[token], self.w13[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.w2[expert])
            out.index_add_(0, token, y * w[token, slot, None].to(x.dtype))
        return out


def test_loop_over_hit_experts() -> None:
    compare(HitExpertsOnly(), rand(3, 16))


class OneOfManyWins(Block):
    """`out[token] += rows` with repeated tokens keeps one of the rows: a bug, kept as it is."""

    def rows(self, x: Tensor) -> Tensor:
        ids, w = self.select(x)
        gate, up = torch.einsum("th,tkih->tki", x, self.w13[ids]).chunk(2, -1)
        return torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, self.w2[ids]) * w[..., None]

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows(x)
        token = torch.arange(x.shape[0]).repeat_interleave(self.top_k)
        out = torch.zeros_like(x)
        out[token] += rows.flatten(0, 1)
        return out


@pytest.mark.parametrize("top_k", [2, 3])
def test_a_scatter_that_does_not_add_is_no_combine(top_k: int) -> None:
    from tests.cases.blocks import BACKEND, num_replaced

    model, x = OneOfManyWins(top_k=top_k), rand(9, 16)
    with torch.no_grad():
        got = torch.compile(model, backend=BACKEND)(x)
        distance = (got[:, None] - model.rows(x)).abs().amax(-1)
    assert (distance.min(1).values < 1e-5).all()
    assert num_replaced() == 0


class LastWins(Block):
    """`scatter` in place of `scatter_add`: only one route of each token survives."""

    def forward(self, x: Tensor) -> Tensor:
        ids, w = self.select(x)
        out = torch.zeros_like(x)
        for expert in range(self.gate.shape[0]):
            chosen = (ids == expert).any(-1, keepdim=True)
            gate, up = F.linear(x, self.w13[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.w2[expert])
            out = torch.where(chosen, y * (w * (ids == expert)).sum(-1, keepdim=True), out)
        return out


def test_overwriting_loop_is_no_sum() -> None:
    compare(LastWins(num_experts=4), rand(9, 16), replaced=False)


class MaskedLoop(Block):
    """Every expert on every token, times a weight that is mostly zero; no gather in the graph."""

    def forward(self, x: Tensor) -> Tensor:
        ids, w = self.select(x)
        out = torch.zeros_like(x)
        for expert in range(self.gate.shape[0]):
            gate, up = F.linear(x, self.w13[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.w2[expert])
            out = out + y * (w * (ids == expert)).sum(-1, keepdim=True).to(x.dtype)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_masked_loop(dtype: torch.dtype) -> None:
    compare(MaskedLoop(num_experts=4, dtype=dtype), rand(6, 16, dtype=dtype))


class ManyOutputs(Block):
    """The logits go to a loss, the ids to a recorder, the weights to a log."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        logits = F.linear(x, self.gate)
        ids, w = renormalized(logits, self.top_k)
        used = F.one_hot(ids, self.gate.shape[0]).to(x.dtype).mean((0, 1))
        balance = (used * logits.softmax(-1).mean(0)).sum()
        return self.experts(x, ids, w), logits, ids, w, balance


@pytest.mark.parametrize("form", ["loop", "gather"])
@pytest.mark.parametrize("grad", [False, True])
def test_router_values_with_other_users(form: str, grad: bool) -> None:
    """Fusing lost, rounded or soft-maxed twice what the loss was computed from."""
    ours = compare(ManyOutputs(form=form), rand(9, 16), grad=grad)
    assert ours[2].dtype is torch.int64


class Adapted(Block):
    """Low-rank adapters on the stacked experts; the effective weight is computed in the graph."""

    def __init__(self, form: str, rank: int = 2) -> None:
        super().__init__(form=form)
        num_experts, wide_, hidden = self.w13.shape
        self.down = nn.Parameter(rand(num_experts, rank, hidden, seed=5) * 0.2)
        self.up = nn.Parameter(rand(num_experts, wide_, rank, seed=6) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        ids, w = self.select(x)
        w13 = self.w13 + torch.bmm(self.up, self.down)
        return (grouped if self.form == "grouped" else loop)(x, ids, w, w13, self.w2, self.act)


@pytest.mark.parametrize("form", ["grouped", "loop"])
def test_adapters_on_experts_are_seen_at_every_call(form: str) -> None:
    from tests.cases.blocks import BACKEND
    from tests.tolerances import assert_close_to_fp32

    model, x = Adapted(form), rand(12, 16)
    compiled = torch.compile(model, backend=BACKEND)
    with torch.no_grad():
        for factor in (1.0, -3.0, 0.0):
            model.up.mul_(factor)
            twin = Adapted("loop").double()
            twin.load_state_dict(model.state_dict())
            assert_close_to_fp32(compiled(x), model(x), twin(x.double()))


class IdentityExperts(Block):
    """The router knows more experts than there are weights; the others hand x through."""

    def __init__(self, form: str, num_identity: int = 4) -> None:
        super().__init__(form=form, top_k=3)
        self.gate = nn.Parameter(rand(8 + num_identity, 16, seed=7) * 0.25)

    def forward(self, x: Tensor) -> Tensor:
        ids, w = self.select(x)
        real = ids < self.w13.shape[0]
        if self.form == "loop":
            y = self.experts(x, torch.where(real, ids, -1), w)
        else:
            y = self.experts(x, torch.where(real, ids, 0), torch.where(real, w, 0.0))
        return y + x * (w * ~real).sum(-1, keepdim=True).to(x.dtype)


@pytest.mark.parametrize("form", ["loop", "gather"])
def test_identity_experts(form: str) -> None:
    compare(IdentityExperts(form), rand(24, 16))


@pytest.mark.parametrize("route", [plain_softmax, renormalized])
@pytest.mark.parametrize("top_k", [1, 2])
def test_scattered_gates_keep_their_normalisation(route, top_k: int) -> None:
    """Soft-max over all experts, scattered into a zero matrix, with and without renormalising."""
    compare(Block(route, "dense", top_k=top_k), rand(8, 16))


class UnequalExperts(Block):
    """Experts of different width cannot be stacked."""

    def __init__(self) -> None:
        super().__init__(num_experts=4)
        self.ups = nn.ParameterList(rand(2 * (4 + i), 16, seed=i) * 0.25 for i in range(4))
        self.downs = nn.ParameterList(rand(16, 4 + i, seed=9 + i) * 0.4 for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        ids, w = self.select(x)
        out = torch.zeros_like(x)
        for expert in range(4):
            token, slot = torch.where(ids == expert)
            gate, up = F.linear(x[token], self.ups[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.downs[expert])
            out.index_add_(0, token, y * w[token, slot, None].to(x.dtype))
        return out


def test_unequal_experts_are_left_alone() -> None:
    compare(UnequalExperts(), rand(9, 16), replaced=False)


class Capacity(Block):
    """At most two tokens an expert; the others are dropped."""

    def forward(self, x: Tensor) -> Tensor:
        ids, w = self.select(x)
        hot = F.one_hot(ids.flatten(), self.gate.shape[0])
        place = (hot.cumsum(0) * hot).sum(-1).view_as(ids)
        return self.experts(x, ids, torch.where(place <= 2, w, 0.0))


@pytest.mark.parametrize("form", ["loop", "gather"])
def test_dropped_tokens_stay_dropped(form: str) -> None:
    compare(Capacity(form=form, num_experts=4), rand(12, 16))


class ResidualInside(Block):
    """The residual is added before the reshape, between combine and output."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return (rows + self.experts(rows, *self.select(rows))).view(x.shape)


@pytest.mark.parametrize("form", ["loop", "gather"])
def test_residual_next_to_the_combine(form: str) -> None:
    compare(ResidualInside(form=form), rand(2, 5, 16), replaced=True)


class Nested(nn.Module):
    """One block's output is the other's input, with equal shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(form="gather", seed=1), Block(plain_softmax, "loop", seed=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_two_blocks_in_a_row() -> None:
    compare(Nested(), rand(9, 16), replaced=True)


class NoMixture(nn.Module):
    """top-k of a classifier, an embedding lookup and a batched matmul: all parts, no MoE."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(rand(8, 16))
        self.table = nn.Parameter(rand(8, 16, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.head)
        best = scores.topk(2).indices
        return torch.einsum("th,tkhi->tki", x, self.table[best]), scores


def test_topk_without_experts() -> None:
    compare(NoMixture(), rand(5, 16), replaced=False)
