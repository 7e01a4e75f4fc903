"""Training through the backend: gradients of the whole model, steps, freezing, no tokens."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import moe_compiler
from tests.models import styles, zoo
from tests.tolerances import relative_error

# What summation in another order may change, for sums of some hundred fp32 terms.
CLOSE = 1e-5


class Layer(nn.Module):
    """A residual MoE block between two linear layers, so that gradients flow into and out of it."""

    def __init__(self, block):
        super().__init__()
        self.inside, self.block, self.outside = nn.Linear(64, 64), block, nn.Linear(64, 4)

    def forward(self, x):
        x = self.inside(x)
        return self.outside(x + self.block(x))


def gradients(call, model, x):
    """Result and gradients, of x and of every parameter."""
    model.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    y = call(x)
    y.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


def check(got, expected):
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        if want is None:
            assert got[name] is None, name
        else:
            assert got[name].dtype is want.dtype
            assert relative_error(got[name], want) < CLOSE, name


def replaced():
    return [report.num_replaced for report in moe_compiler.reports()]


@pytest.mark.parametrize(
    "style", ["gathered_einsum", "dense_unrolled", "loop_stacked", "dense_einsum"]
)
def test_gradients_agree_with_eager(style):
    model = Layer(styles.build(style))
    x = styles.rows(3, 5, 64)
    # Without Inductor the graph that holds the op is differentiated by eager autograd.
    options = {"disable": ("inductor",)}
    compiled = torch.compile(model, backend="moeflex", options=options)
    got = gradients(compiled, model, x)
    assert replaced() == [1]
    check(got, gradients(model, model, x))


def test_gradients_through_inductor_for_changing_token_counts():
    model = Layer(styles.build("gathered_einsum"))
    compiled = torch.compile(model, backend="moeflex", dynamic=True)
    for count in (6, 9, 3):
        x = styles.rows(count, 64, seed=count)
        check(gradients(compiled, model, x), gradients(model, model, x))
    assert replaced()[-1] == 1


def test_frozen_experts_and_frozen_router_get_no_gradient():
    model = Layer(styles.build("gathered_einsum"))
    x = styles.rows(6, 64)
    options = {"disable": ("inductor",)}
    compiled = torch.compile(model, backend="moeflex", options=options)
    for frozen in (("gate",), ("w1", "w2", "w3"), ("w2", "gate")):
        for name, parameter in model.block.named_parameters():
            parameter.requires_grad_(name not in frozen)
        got = gradients(compiled, model, x)
        assert all(got[f"block.{name}"] is None for name in frozen)
        check(got, gradients(model, model, x))
    assert set(replaced()) == {1}


def test_steps_of_an_optimizer_follow_eager():
    model = Layer(styles.build("gathered_einsum"))
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="moeflex")
    pairs = [(model, compiled), (twin, twin)]
    losses = []
    for module, call in pairs:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        for step in range(4):
            loss = call(styles.rows(8, 64, seed=step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    for got, want in zip(losses[:4], losses[4:], strict=True):
        assert relative_error(got, want) < CLOSE
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert relative_error(ours, theirs) < CLOSE
    assert replaced()[-1] == 1


def test_gradients_accumulate_over_calls():
    model = styles.build("gathered_einsum")
    options = {"disable": ("inductor",)}
    compiled = torch.compile(model, backend="moeflex", options=options)
    totals = []
    for call in (compiled, model):
        model.zero_grad()
        for step in range(3):
            call(styles.rows(4, 64, seed=step)).sum().backward()  # an expanded gradient
        totals.append([p.grad.clone() for p in model.parameters()])
    for got, want in zip(*totals, strict=True):
        assert relative_error(got, want) < CLOSE


def test_no_tokens_give_zero_gradients_and_the_next_step_is_right():
    model = styles.build("gathered_einsum")
    options = {"disable": ("inductor",)}
    compiled = torch.compile(model, backend="moeflex", options=options)
    for count in (0, 5):
        x = styles.rows(count, 64)
        got = gradients(compiled, model, x)
        if count == 0:
            assert all(v is None or not v.any() for v in got.values())
        else:
            check(got, gradients(model, model, x))


def test_inference_then_training_with_one_object():
    model = styles.build("gathered_einsum")
    options = {"disable": ("inductor",)}
    compiled = torch.compile(model, backend="moeflex", options=options)
    x = styles.rows(5, 64)
    with torch.inference_mode():
        first = compiled(x).clone()
    with torch.no_grad():
        assert compiled(x).grad_fn is None
    y = compiled(x)
    assert y.requires_grad
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert relative_error(y, first) < CLOSE


@pytest.mark.slow
def test_a_step_of_a_hugging_face_model():
    pytest.importorskip("transformers")
    model = zoo.build("qwen3_moe", "grouped_mm").train()
    ids = zoo.token_ids(2, 9)

    def step(call):
        model.zero_grad()
        loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return loss.detach(), grads

    loss, grads = step(torch.compile(model, backend="moeflex"))
    assert max(replaced()) == 2
    expected, expected_grads = step(model)
    assert relative_error(loss, expected) < CLOSE
    assert grads.keys() == expected_grads.keys()
    for name, want in expected_grads.items():
        assert relative_error(grads[name], want) < 1e-4, name


STEP = """
    import torch
    from tests.models import styles

    model = styles.build("gathered_einsum")
    twin = styles.build("gathered_einsum")

    def step(model):
        loss = model(styles.rows()).square().mean()
        loss.backward()
        return loss.detach()

    ours = torch.compile(step, backend="moeflex")(model)
    torch.testing.assert_close(ours, step(twin))
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    print("stepped")
"""


def test_backward_inside_of_the_compiled_function():
    """Dynamo looks at every frame meanwhile; one of ours under its lock would wait for ever."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STEP)],
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.stdout.strip() == "stepped", run.stderr[-2000:]


def test_transforms_of_torch_func_are_left_to_inductor():
    model = styles.build("gathered_einsum").requires_grad_(False)

    def total(x):
        return model(x).square().sum()

    ours = torch.compile(torch.func.grad(total), backend="moeflex")(styles.rows())
    assert relative_error(ours, torch.func.grad(total)(styles.rows())) < CLOSE
    (report,) = moe_compiler.reports()
    assert not report.regions
    assert "torch.func" in report.refused[0].reason
