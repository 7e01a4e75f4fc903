"""Whole blocks in one graph, the right numbers, and no trace of it in what others compile."""

from __future__ import annotations

import threading

import pytest
import torch

from moe_compiler.runtime import capture, trace_hooks
from tests.models import styles


def _recorder(installed: bool = True):
    graphs = []

    def backend(gm, example_inputs):
        graphs.append((gm, capture.taken_ways(gm), capture.fragment_reason(gm)))
        return gm.forward

    if installed:
        capture.install(backend)
    return backend, graphs


def _count_compilations(module, batches, installed):
    backend, graphs = _recorder(installed)
    compiled = torch.compile(module, backend=backend)
    with torch.no_grad():
        for x in batches:
            torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)
    return len(graphs)


@pytest.mark.parametrize("name", styles.STYLES)
def test_a_static_block_is_one_graph(name):
    module, x = styles.build(name), styles.rows()
    graphs = capture.capture_graphs(module, (x,))
    assert len(graphs) == 1
    gm, inputs = graphs[0]
    assert any(isinstance(entry, torch.nn.Parameter) for entry in inputs)
    assert (capture.DYNAMIC_SHAPES_WAY in gm.meta["capture_ways"]) == name.startswith("loop")


@pytest.mark.parametrize("name", styles.LOOPS)
def test_a_loop_over_hit_experts_stays_right_and_is_not_compiled_more_often(name):
    module = styles.build(name, num_experts=4)
    batches = [styles.rows(3, 64, seed=seed) for seed in range(6)]
    ours = _count_compilations(module, batches, installed=True)
    torch._dynamo.reset()
    assert ours <= _count_compilations(module, batches, installed=False)


@pytest.mark.parametrize("name", styles.LOOPS)
def test_a_broken_block_gives_its_reason(name):
    backend, graphs = _recorder()
    with torch.no_grad():
        torch.compile(styles.build(name), backend=backend)(styles.rows())
    reasons = [reason for _, _, reason in graphs if reason is not None]
    assert len(reasons) == 1
    assert reasons[0].reason.startswith("graph break inside an MoE block: ")
    assert "styles.py:" in reasons[0].reason


def test_a_whole_block_gives_no_reason():
    backend, graphs = _recorder()
    with torch.no_grad():
        torch.compile(styles.build("loop_where"), backend=backend)(styles.rows())
    assert [reason for _, _, reason in graphs] == [None]


def test_a_whole_block_before_a_graph_break_gives_no_reason():
    block = styles.build("gathered_einsum")

    def inner(x):
        return block(x)

    def outer(x):
        y = inner(x)
        torch._dynamo.graph_break()
        return block(y)

    backend, graphs = _recorder()
    with torch.no_grad():
        torch.compile(outer, backend=backend)(styles.rows())
    assert len(graphs) == 2
    assert [reason for _, _, reason in graphs] == [None, None]


def test_other_backends_and_the_configuration_are_untouched():
    module, x = styles.build("loop_where"), styles.rows()
    other, others = _recorder(installed=False)
    with torch.no_grad():
        torch.compile(module, backend=other)(x)
    alone = len(others)
    torch._dynamo.reset()
    others.clear()
    ours, graphs = _recorder()
    with torch.no_grad():
        torch.compile(module, backend=ours)(x)
        assert not getattr(torch._dynamo.config, trace_hooks.FLAG)
        torch.compile(module, backend=other)(x)
    assert len(graphs) == 1
    assert len(others) == alone > 1
    assert all(ways == () for _, ways, _ in others)


def test_the_configuration_is_restored_when_the_backend_fails():
    def failing(gm, example_inputs):
        assert getattr(torch._dynamo.config, trace_hooks.FLAG)
        raise RuntimeError("on purpose")

    capture.install(failing)
    with pytest.raises(Exception, match="on purpose"), torch.no_grad():
        torch.compile(styles.build("loop_where"), backend=failing)(styles.rows())
    assert not getattr(torch._dynamo.config, trace_hooks.FLAG)


def test_capture_survives_a_reset_and_options():
    def backend(gm, example_inputs, *, options=None):
        graphs.append(options)
        return gm.forward

    graphs = []
    capture.install(backend)
    torch._dynamo.reset()
    with torch.no_grad():
        module, x = styles.build("loop_where"), styles.rows()
        torch.compile(module, backend=backend, options={"some": 1})(x)
    assert graphs == [{"some": 1}]


def test_two_threads_compile_for_different_backends():
    module = {name: styles.build("loop_where") for name in ("ours", "other")}
    ours, graphs = _recorder()
    other, others = _recorder(installed=False)
    errors = []

    def work(name, backend):
        try:
            with torch.no_grad():
                torch.compile(module[name], backend=backend)(styles.rows())
        except Exception as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=("ours", ours)),
        threading.Thread(target=work, args=("other", other)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(graphs) == 1
    assert len(others) > 1


def test_callbacks_are_registered_once():
    handler = torch._dynamo.callback.callback_handler
    backend, _ = _recorder()
    before = (len(handler.start_callbacks), len(handler.end_callbacks))
    for _ in range(3):
        capture.install(backend)
        torch._dynamo.reset()
    assert (len(handler.start_callbacks), len(handler.end_callbacks)) == before


@pytest.mark.parametrize("kind", ["nonzero", "unique"])
def test_a_list_of_data_dependent_length_is_a_graph_break_and_no_error(kind):
    table = torch.randn(8, 16, 16)

    def block(x):
        weights, ids = (x @ table[0, :, :8]).softmax(-1).topk(2)
        counts = torch.nn.functional.one_hot(ids, 8).sum((0, 1))
        hit = counts.nonzero().flatten() if kind == "nonzero" else ids.unique()
        out = torch.zeros_like(x)
        for expert in hit.tolist():
            token, slot = torch.where(ids == expert)
            out.index_add_(0, token, (x[token] @ table[expert]) * weights[token, slot, None])
        return out

    backend, _ = _recorder()
    compiled = torch.compile(block, backend=backend)
    for seed in range(3):
        x = styles.rows(5, 16, seed=seed)
        torch.testing.assert_close(compiled(x), block(x), rtol=1e-5, atol=1e-5)


def test_export_gives_aten_operators():
    program = capture.capture_export(styles.build("dense_unrolled"), (styles.rows(),))
    targets = {n.target for n in program.graph.nodes if n.op == "call_function"}
    assert torch.ops.aten.topk.default in targets
    assert program.capture_ways == ()


def test_graphs_of_a_module_on_the_meta_device():
    with torch.device("meta"):
        module = styles.build("gathered_einsum").to("meta")
    graphs = capture.capture_graphs(module, (torch.empty(2, 17, 64, device="meta"),))
    assert len(graphs) == 1
