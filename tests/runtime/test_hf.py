"""transformers' own expert loop is captured, for our backend only."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")

from moe_compiler.runtime import capture, hf
from tests.models import zoo

WAY = "transformers' expert loop traced through its grouped_mm function"


def _recorder(installed: bool = True):
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(capture.taken_ways(gm))
        return gm.forward

    if installed:
        capture.install(backend)
    return backend, graphs


@pytest.mark.parametrize("phase", zoo.PHASES)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_the_eager_loop_becomes_one_graph_that_is_right(name, phase):
    model = zoo.build(name, "eager")
    backend, graphs = _recorder()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        args, kwargs = zoo.inputs(model, phase)
        expected = model(*args, **kwargs).logits
        args, kwargs = zoo.inputs(model, phase)
        got = compiled(*args, **kwargs).logits
    assert graphs == [(WAY,)]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_no_recompilation_by_call():
    model = zoo.build("mixtral", "eager")
    backend, graphs = _recorder()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for seed in range(4):
            args, kwargs = zoo.prefill(seed=seed)
            expected = model(*args, **kwargs).logits
            torch.testing.assert_close(
                compiled(*args, **kwargs).logits, expected, rtol=1e-4, atol=1e-5
            )
    assert len(graphs) == 1


def test_eager_calls_and_other_backends_run_the_loop(monkeypatch):
    model = zoo.build("mixtral", "eager")
    ours, graphs = _recorder()
    other, others = _recorder(installed=False)
    args, kwargs = zoo.prefill()
    calls = []
    interface = hf.loaded_interface()
    grouped = interface._global_mapping["grouped_mm"]
    monkeypatch.setitem(
        interface._global_mapping,
        "grouped_mm",
        lambda *arguments: calls.append(1) or grouped(*arguments),
    )
    with torch.no_grad():
        expected = model(*args, **kwargs).logits
        torch.compile(model, backend=other)(*args, **kwargs)
        assert not calls
    assert len(others) > 1
    assert all(ways == () for ways in others)
    monkeypatch.undo()
    with torch.no_grad():
        got = torch.compile(model, backend=ours)(*args, **kwargs).logits
        count = len(others)
        torch.compile(model, backend=other)(*args, **kwargs)
        assert len(others) == count
    assert graphs == [(WAY,)]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_gradients_flow_through_the_captured_experts():
    model = zoo.build("mixtral", "eager")
    backend, graphs = _recorder()
    args, kwargs = zoo.prefill()
    weight = model.model.layers[0].mlp.experts.down_proj
    model(*args, **kwargs).logits.square().mean().backward()
    expected, weight.grad = weight.grad, None
    torch.compile(model, backend=backend)(*args, **kwargs).logits.square().mean().backward()
    assert graphs == [(WAY,)]
    torch.testing.assert_close(weight.grad, expected, rtol=1e-3, atol=1e-6)


def test_export_of_an_eager_model():
    class Logits(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(ids, use_cache=False).logits

    model = Logits(zoo.build("qwen3_moe", "eager"))
    args = zoo.prefill()[0]
    program = capture.capture_export(model, args)
    assert program.capture_ways == (WAY,)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(*args), model(*args), rtol=1e-4, atol=1e-5)


def test_nothing_is_changed_outside_of_a_forced_trace():
    model = zoo.build("qwen3_moe", "eager")
    args, kwargs = zoo.prefill()
    with torch.no_grad(), capture.replaced_expert_loops() as ways:
        model(*args, **kwargs)
        assert ways == [WAY]
    with torch.no_grad():
        model(*args, **kwargs)
    assert ways == [WAY]


def test_uninstall_gives_the_lookup_back():
    capture.install(lambda gm, inputs: gm.forward)
    interface = hf.loaded_interface()
    routed = interface.get_interface
    hf.uninstall()
    assert interface.get_interface is routed.moeflex_original
    capture.install(lambda gm, inputs: gm.forward)


def test_transformers_is_not_imported_by_us_and_may_come_later():
    program = """
import sys, torch
from moe_compiler.runtime import capture, hf
graphs = []
def backend(gm, inputs):
    graphs.append(capture.taken_ways(gm))
    return gm.forward
capture.install(backend)
assert "transformers" not in sys.modules
assert hf.loaded_interface() is None
from tests.models import zoo
model = zoo.build("mixtral", "eager")
with torch.no_grad():
    torch.compile(model, backend=backend)(*zoo.prefill()[0], use_cache=False)
print(graphs)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().endswith(str([(WAY,)]))
