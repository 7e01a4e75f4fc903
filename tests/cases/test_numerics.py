"""Kind: numerics of the router, the activation and the combine."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases.blocks import (
    BACKEND,
    Block,
    Route,
    compare,
    gather,
    grouped_matmul,
    loop,
    plain_softmax,
    rand,
    renormalized,
    sigmoid_renormalized,
    softmax_after,
)
from tests.tolerances import assert_close_to_fp32


def scaled(score: str, renormalize: bool, scale: float) -> Route:
    """Scores, perhaps divided by their sum, times a factor."""

    def route(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
        weights, ids = scores.topk(k)
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights * scale

    return route


def sigmoid_after(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, ids = logits.topk(k)
    return ids, values.sigmoid()


@pytest.mark.parametrize(
    "route", [renormalized, plain_softmax, softmax_after, sigmoid_renormalized, sigmoid_after]
)
@pytest.mark.parametrize("form", ["loop", "gather"])
def test_the_order_of_normalisation_is_kept(route: Route, form: str) -> None:
    """Large logits, so that the ways to weigh differ a lot."""
    compare(Block(route, form, top_k=3), 3 * rand(9, 16), replaced=True)


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_scale_applies_with_and_without_renormalising(score: str, renormalize: bool) -> None:
    compare(Block(scaled(score, renormalize, 1.8), "gather"), rand(9, 16), replaced=True)


class GroupLimited(Block):
    """DeepSeek's routers: groups compete first."""

    def __init__(
        self, num_groups: int, kept: int, top_k: int, best_two: bool, fill: float, **more: object
    ) -> None:
        super().__init__(top_k=top_k, **more)
        self.num_groups, self.kept, self.best_two, self.fill = num_groups, kept, best_two, fill
        self.register_buffer("bias", torch.rand(self.gate.shape[0]) * 0.5)

    def select(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.gate).sigmoid()
        choice = (scores + self.bias).view(x.shape[0], self.num_groups, -1)
        worth = choice.topk(2, dim=-1).values.sum(-1) if self.best_two else choice.amax(-1)
        groups = worth.topk(self.kept, dim=-1, sorted=False).indices
        mask = torch.zeros_like(worth).scatter_(1, groups, 1.0).bool()
        choice = choice.masked_fill(~mask[..., None], self.fill).flatten(1)
        ids = choice.topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        return ids, weights / weights.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, w = self.select(x)
        return self.experts(x, ids, w), ids


@pytest.mark.parametrize(
    ("num_groups", "kept", "top_k", "best_two", "fill"),
    [
        (4, 4, 3, True, 0.0),  # every group is kept
        (1, 1, 2, True, 0.0),  # one group
        (8, 3, 3, False, -math.inf),  # one expert a group
        (4, 2, 4, True, -math.inf),  # the kept groups are filled exactly
        (2, 1, 2, False, 0.0),
    ],
)
def test_edges_of_the_group_limit(
    num_groups: int, kept: int, top_k: int, best_two: bool, fill: float
) -> None:
    model = GroupLimited(num_groups, kept, top_k, best_two, fill, form="gather")
    _, ids = compare(model, rand(24, 16))
    assert all(len(set(row)) == top_k for row in ids.tolist())


class Tied(Block):
    """Experts in pairs with one score."""

    def __init__(self, top_k: int, form: str) -> None:
        super().__init__(form=form, top_k=top_k)
        with torch.no_grad():
            self.gate[1::2] = self.gate[0::2]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, w = self.select(x)
        return self.experts(x, ids, w), ids


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("form", ["loop", "gather"])
def test_exact_ties(top_k: int, form: str) -> None:
    """Any legal selection will do, but the result must be that of the ids that are shown."""
    model, x = Tied(top_k, form), rand(9, 16)
    compiled = torch.compile(model, backend=BACKEND)
    with torch.no_grad():
        y, ids = compiled(x)
        for _ in range(4):
            again, same_ids = compiled(x)
            assert torch.equal(again, y)
            assert torch.equal(same_ids, ids)
        scores = F.linear(x, model.gate).softmax(-1)
        chosen = scores.gather(1, ids)
        assert torch.equal(chosen, scores.topk(top_k).values)
        weights = chosen / chosen.sum(-1, keepdim=True)
        assert all(len(set(row)) == top_k for row in ids.tolist())
        experts = (model.w13, model.w2)
        wide = gather(x.double(), ids, weights.double(), *(t.double() for t in experts), model.act)
        assert_close_to_fp32(y, gather(x, ids, weights, *experts, model.act), wide)


@pytest.mark.parametrize("options", [None, {"batch_invariant": True}])
def test_a_row_does_not_depend_on_its_batch(options: dict[str, bool] | None) -> None:
    if options and BACKEND != "moeflex":
        pytest.skip("an option of moeflex")
    model, x = Block(form="gather"), rand(48, 16)
    compiled = torch.compile(model, backend=BACKEND, options=options, dynamic=True)
    with torch.no_grad():
        whole = compiled(x)
        for few in (5, 2, 1):
            part = compiled(x[:few])
            # the router's matmul is the library's and rounds by its row count; that the experts are
            # equal bit for bit is tested in tests/runtime/test_cpu_target.py
            torch.testing.assert_close(part, whole[:few], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("route", [softmax_after, plain_softmax])
def test_top1_and_its_router_gradient(route: Route) -> None:
    """Soft-max over one value is 1 and has no gradient; the order must not be swapped."""
    x = rand(9, 16)
    results = compare(Block(route, "gather", top_k=1), x, grad=True, replaced=None)
    gate_gradient = results[2]
    assert gate_gradient.shape == (8, 16)
    assert bool(gate_gradient.abs().max() > 1e-6) == (route is plain_softmax)


class FarWinners(Block):
    """The best experts lie behind the first 256."""

    def __init__(self, num_experts: int, top_k: int, first: int) -> None:
        super().__init__(form="gather", num_experts=num_experts, top_k=top_k, hidden=8)
        self.first = first
        self.register_buffer("lift", 20.0 * (torch.arange(num_experts) >= first))

    def select(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return renormalized(F.linear(x, self.gate) + self.lift, self.top_k)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, w = self.select(x)
        return self.experts(x, ids, w), ids


@pytest.mark.parametrize(
    ("num_experts", "top_k", "first"), [(512, 10, 300), (256, 8, 0), (257, 1, 256)]
)
def test_winners_behind_the_first_256_experts(num_experts: int, top_k: int, first: int) -> None:
    _, ids = compare(FarWinners(num_experts, top_k, first), rand(6, 8))
    assert int(ids.min()) >= first


class Clamped(Block):
    """gpt-oss: interleaved, clamped on one side, a slope inside the sigmoid, biases, up + 1."""

    def __init__(self, form: str = "gather") -> None:
        super().__init__(softmax_after, form)
        wide = self.w13.shape[1]
        self.w13 = nn.Parameter(self.w13.detach().transpose(1, 2).contiguous())
        self.w2 = nn.Parameter(self.w2.detach().transpose(1, 2).contiguous())
        self.b13, self.b2 = nn.Parameter(rand(8, wide, seed=3)), nn.Parameter(rand(8, 16, seed=4))

    def forward(self, x: Tensor) -> Tensor:
        ids, w = self.select(x)
        both = torch.einsum("th,tkhi->tki", x, self.w13[ids]) + self.b13[ids]
        gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
        hidden = gate * torch.sigmoid(gate * 1.702) * (up + 1)
        y = torch.einsum("tki,tkih->tkh", hidden, self.w2[ids]) + self.b2[ids]
        return (y * w[..., None]).sum(1)


def test_clamped_and_plain_blocks_of_one_shape() -> None:
    """One model's activation was hard-wired for all; the inputs are large enough to clamp."""
    compare(Clamped(), 12 * rand(9, 16), replaced=True)
    compare(Block(softmax_after, "gather"), 12 * rand(9, 16), replaced=True)


def quick_gelu(z: Tensor) -> Tensor:
    return z * torch.sigmoid(1.702 * z)


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "relu2": lambda z: F.relu(z).square(),
    "sigmoid": torch.sigmoid,
    "mish": F.mish,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_told_apart(name: str) -> None:
    """What cannot be expressed is left to Inductor, never taken for SiLU."""
    compare(Block(form="gather", act=ACTIVATIONS[name]), 4 * rand(8, 16))


class NotGated(Block):
    """Nemotron: one projection, squared ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        ids, w = self.select(x)
        hidden = F.relu(torch.einsum("th,tkih->tki", x, self.w13[ids])).square()
        w2 = torch.cat([self.w2, self.w2], -1)
        return (torch.einsum("tki,tkhi->tkh", hidden, w2[ids]) * w[..., None]).sum(1)


def test_without_a_gate() -> None:
    compare(NotGated(), 4 * rand(8, 16))


class Shared(Block):
    """A dense expert of another width beside the routed ones, with or without a gate."""

    def __init__(self, gated: bool, form: str) -> None:
        super().__init__(form=form)
        self.shared13 = nn.Parameter(rand(48, 16, seed=2) * 0.25)
        self.shared2 = nn.Parameter(rand(16, 24, seed=3) * 0.2)
        self.shared_gate = nn.Parameter(rand(1, 16, seed=4)) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.shared13).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, self.shared2)
        if self.shared_gate is not None:
            y = torch.sigmoid(F.linear(x, self.shared_gate)) * y
        return self.experts(x, *self.select(x)) + y


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("form", ["loop", "gather"])
def test_the_gate_of_the_shared_expert_is_applied(gated: bool, form: str) -> None:
    compare(Shared(gated, form), rand(9, 16), replaced=True)


class Square(nn.Module):
    """All matrices are square: the shape does not say which way they lie."""

    def __init__(self, flip_up: bool, flip_down: bool, gated: bool) -> None:
        super().__init__()
        inner = 8 if gated else 16
        self.gate = nn.Parameter(rand(4, 16, seed=1))
        self.up = nn.Parameter(rand(4, 16, 16, seed=2) * 0.3)
        shape = (16, inner) if flip_down else (inner, 16)
        self.down = nn.Parameter(rand(4, *shape, seed=3) * 0.3)
        self.flip_up, self.flip_down, self.gated = flip_up, flip_down, gated

    def forward(self, x: Tensor) -> Tensor:
        ids, w = renormalized(F.linear(x, self.gate), 2)
        up, down = self.up[ids], self.down[ids]
        z = torch.einsum("th,tkih->tki" if self.flip_up else "th,tkhi->tki", x, up)
        if self.gated:
            gate, other = z.chunk(2, -1)
            z = F.silu(gate) * other
        else:
            z = F.silu(z)
        y = torch.einsum("tki,tkhi->tkh" if self.flip_down else "tki,tkih->tkh", z, down)
        return (y * w[..., None]).sum(1)


@pytest.mark.parametrize("flip_up", [True, False])
@pytest.mark.parametrize("flip_down", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_orientation_of_square_matrices(flip_up: bool, flip_down: bool, gated: bool) -> None:
    compare(Square(flip_up, flip_down, gated), rand(7, 16), replaced=True)


class Dropping(Block):
    """The model itself marks routes as dropped by an id that nobody has."""

    far = 8

    def forward(self, x: Tensor, drop: Tensor) -> Tensor:
        ids, w = self.select(x)
        return self.experts(x, torch.where(drop, self.far, ids), w)


@pytest.mark.parametrize("far", [8, -1, 4096, 2**31 + 1, -(2**40)])
def test_ids_that_nobody_has(far: int) -> None:
    """No read out of bounds, no contribution."""
    model = Dropping()
    model.far = far
    compare(model, rand(12, 16), rand(12, 2, seed=5) > 0.4)


def test_every_route_dropped() -> None:
    ours = compare(Dropping(), rand(12, 16), torch.ones(12, 2, dtype=torch.bool))
    assert not ours[0].any()


class PaddedRows(nn.Module):
    """Rows behind the last offset are never written by the grouped matmul; the model masks them."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(rand(6, 16, 16, seed=1) * 0.3)
        self.w2 = nn.Parameter(rand(6, 16, 8, seed=2) * 0.3)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0).int()
        valid = (torch.arange(rows.shape[0]) < ends[-1])[:, None]
        gate, up = grouped_matmul(rows, self.w13.transpose(1, 2), ends).chunk(2, -1)
        hidden = torch.where(valid, F.silu(gate) * up, 0.0)
        return torch.where(valid, grouped_matmul(hidden, self.w2.transpose(1, 2), ends), 0.0)


@pytest.mark.parametrize("counts", [(0, 5, 0, 0, 7, 0), (0,) * 6, (24, 0, 0, 0, 0, 0)])
def test_rows_behind_the_last_offset(counts: tuple[int, ...]) -> None:
    model, rows = PaddedRows(), rand(24, 16)
    with torch.no_grad():
        got = torch.compile(model, backend=BACKEND)(rows, torch.tensor(counts))
        want = model(rows, torch.tensor(counts))
    assert not got[sum(counts) :].any()
    assert got.isfinite().all()
    torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)


class OneRank(Block):
    """What one of two ranks computes: routes to the other's experts have weight 0."""

    def forward(self, x: Tensor) -> Tensor:
        ids, w = self.select(x)
        mine = ids < 4
        w13, w2 = self.w13[:4], self.w2[:4]
        if self.form == "loop":
            return loop(x, torch.where(mine, ids, -1), w, w13, w2, self.act)
        return gather(x, torch.where(mine, ids, 0), torch.where(mine, w, 0.0), w13, w2, self.act)


@pytest.mark.parametrize("form", ["loop", "gather"])
def test_foreign_routes_do_not_reach_the_router_gradient(form: str) -> None:
    compare(OneRank(form=form), rand(10, 16), grad=True)


def test_infinite_and_nan_rows_stay_in_their_row() -> None:
    model, x = Block(form="loop"), rand(9, 16)
    x[3], x[5] = math.inf, math.nan
    with torch.no_grad():
        got = torch.compile(model, backend=BACKEND)(x)
        want = model(x)
    healthy = [i for i in range(9) if i not in (3, 5)]
    torch.testing.assert_close(got[healthy], want[healthy], rtol=1e-4, atol=1e-5)
    assert got[5].isnan().all()
