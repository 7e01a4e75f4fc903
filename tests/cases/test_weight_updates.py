"""Kind: the next call must see the weights of that moment."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases.blocks import BACKEND, Block, loop, rand, renormalized
from tests.tolerances import assert_close_to_eager, assert_close_to_fp32


def check(compiled: Callable[..., Tensor], model: Block, x: Tensor) -> None:
    """The compiled call gives what eager gives now."""
    twin = copy.deepcopy(model).double()
    twin.form = "loop"
    assert_close_to_fp32(compiled(x), model(x), twin(x.double()))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("form", ["gather", "grouped"])
def test_every_way_to_replace_weights(
    context: Callable[[], AbstractContextManager[None]], form: str
) -> None:
    """Rollouts kept using the first policy after a load."""
    model, x = Block(form=form), rand(9, 16)
    compiled = torch.compile(model, backend=BACKEND)

    def state(seed: int) -> dict[str, Tensor]:
        return {k: v.detach().clone() for k, v in Block(seed=seed).state_dict().items()}

    def call() -> None:
        with context():
            check(compiled, model, x)

    call()
    model.load_state_dict(state(1))
    call()
    model.train()
    model.load_state_dict(state(2))
    model.eval()
    call()
    model.load_state_dict(state(3), assign=True)
    call()
    for name, value in state(4).items():
        getattr(model, name).data = value
    call()
    model.w13 = nn.Parameter(state(5)["w13"])
    call()


def test_refit_by_slices() -> None:
    """An RL trainer writes one expert at a time into the live storage."""
    model, x = Block(form="loop"), rand(24, 16)
    compiled = torch.compile(model, backend=BACKEND)
    with torch.no_grad():
        check(compiled, model, x)
        for expert in (0, 5, 7):
            model.w13[expert, :8].copy_(rand(8, 16, seed=expert))
            model.w2[expert].mul_(-2)
            check(compiled, model, x)
        model.gate[3:5].zero_()
        check(compiled, model, x)


class CachedView(Block):
    """A transposed view is kept as a plain attribute."""

    def __init__(self) -> None:
        super().__init__(form="gather")
        self.refresh()

    def refresh(self) -> None:
        self.w2_t = self.w2.detach().transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        ids, w = self.select(x)
        return loop(x, ids, w, self.w13, self.w2_t.transpose(1, 2), self.act)


def test_dtype_moves_and_cached_views() -> None:
    model, x = CachedView(), rand(9, 16)
    compiled = torch.compile(model, backend=BACKEND)

    def call(x: Tensor) -> None:
        twin = CachedView().double()
        twin.load_state_dict(model.state_dict())
        twin.refresh()
        assert_close_to_fp32(compiled(x), model(x), twin(x.double()))

    with torch.no_grad():
        call(x)
        model.w2.mul_(2)
        call(x)
        model.to(torch.bfloat16)
        model.refresh()
        call(x.bfloat16())
        model.float()
        model.refresh()
        call(x)


def test_a_copy_is_independent() -> None:
    model, x = Block(form="gather"), rand(9, 16)
    compiled = torch.compile(model, backend=BACKEND)
    with torch.no_grad():
        before = compiled(x)
        twin = copy.deepcopy(model)
        twin.w13.zero_()
        assert torch.equal(compiled(x), before)
        assert not torch.compile(twin, backend=BACKEND)(x).any()


class TiedLayers(nn.Module):
    """Two layers with routers of their own share their experts; a head is tied to a router."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(form="gather"), Block(form="gather", seed=1)
        self.b.w13, self.b.w2 = self.a.w13, self.a.w2

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(x)
        x = x + self.b(x)
        return F.linear(x, self.a.gate)


def test_experts_shared_between_layers() -> None:
    """An update reached one of the two users."""

    def train(model: TiedLayers, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        results, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            y = call(rand(8, 16, seed=step))
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append(y.detach())
        model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})
        with torch.no_grad():
            results.append(call(rand(8, 16)))
        assert model.a.w13 is model.b.w13
        assert len(list(model.parameters())) == 4
        return [*results, model.a.w13.detach().clone()]

    eager = TiedLayers()
    ours = TiedLayers()
    want = train(eager, eager)
    got = train(ours, torch.compile(ours, backend=BACKEND))
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["gather", "loop"])
def test_inference_then_training_with_one_object(form: str) -> None:
    """Gradients appear exactly when eager has them."""

    def go(model: Block, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        results = []
        with torch.inference_mode():
            made_inside = rand(9, 16)
            results.append(call(made_inside).clone())
        with torch.no_grad():
            y = call(rand(9, 16))
            assert y.grad_fn is None
            results.append(y)
        y = call(rand(9, 16))
        assert y.requires_grad
        y.square().sum().backward()
        results.append(model.w13.grad.clone())
        model.zero_grad()
        with torch.no_grad():
            results.append(call(made_inside).clone())
        model.gate.requires_grad_(False)
        call(rand(9, 16)).square().sum().backward()
        assert model.gate.grad is None
        results.append(model.w2.grad.clone())
        model.zero_grad()
        model.requires_grad_(False)
        model.gate.requires_grad_(True)
        call(rand(9, 16)).square().sum().backward()
        assert model.w13.grad is None
        results.append(model.gate.grad.clone())
        model.requires_grad_(False)
        assert not call(rand(9, 16)).requires_grad
        return [t.detach().clone() for t in results]

    eager, ours = Block(form=form), Block(form=form)
    want = go(eager, eager)
    for mine, theirs in zip(go(ours, torch.compile(ours, backend=BACKEND)), want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_bf16_training_step_moves_the_same_way() -> None:
    """A few optimizer steps in bf16 stay near an fp32 run."""
    losses = {}
    for name, dtype in (
        ("ours", torch.bfloat16),
        ("eager", torch.bfloat16),
        ("wide", torch.float64),
    ):
        model = Block(form="loop", dtype=torch.bfloat16).to(dtype)
        call = torch.compile(model, backend=BACKEND) if name == "ours" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, target = rand(16, 16).bfloat16().to(dtype), rand(16, 16, seed=2).bfloat16().to(dtype)
        losses[name] = []
        for _ in range(4):
            loss = F.mse_loss(call(x), target)
            losses[name].append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert losses["wide"][-1] < losses["wide"][0]
    for step in range(4):
        wide = torch.tensor([losses["wide"][step]])
        pair = [torch.tensor([losses[n][step]]).bfloat16() for n in ("ours", "eager")]
        assert_close_to_fp32(*pair, wide)


class Outer(nn.Module):
    """Weights are handed in from outside, as functional training does."""

    def forward(self, x: Tensor, gate: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        ids, w = renormalized(F.linear(x, gate), 2)
        return loop(x, ids, w, w13, w2, F.silu)


def test_weights_as_arguments() -> None:
    compiled = torch.compile(Outer(), backend=BACKEND)
    with torch.no_grad():
        for seed in range(3):
            block = Block(seed=seed)
            x = rand(9, 16, seed=seed)
            assert_close_to_eager(compiled(x, block.gate, block.w13, block.w2), block(x))
