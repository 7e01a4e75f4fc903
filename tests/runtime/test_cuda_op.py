"""`moeflex::moe_layer` on a Hopper GPU through its C++ launcher, against the reference."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from torch import Tensor

from moe_compiler import cuda_kernels, reference
from moe_compiler.codegen import cuda_program
from moe_compiler.errors import PlanError
from moe_compiler.layer import Device, Layer
from moe_compiler.runtime import op
from tests.runtime.test_cuda_layer import CASES, Case, make_experts, route
from tests.tolerances import assert_close_to_fp32

pytestmark = pytest.mark.gpu

HOPPER = cuda_kernels.Hopper()
SM_90 = Device(type="cuda", capability=(9, 0))


@pytest.fixture(scope="module", autouse=True)
def _on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


def prepare(case: Case) -> None:
    layer = Layer(
        plan=case.plan,
        x_dtype=case.dtype,
        weight_dtypes=(case.dtype,) * len(case.plan.experts.tensor_roles),
        combine_dtype=case.weight_dtype,
        index_dtype=case.index_dtype,
    )
    assert HOPPER.unsupported(layer, SM_90) == ""
    HOPPER.prepare(layer, SM_90)
    HOPPER.finish()
    assert not op.served_in_plain_torch("cuda")


class Layers:
    """A prepared layer with its tensors."""

    def __init__(self, case: Case) -> None:
        prepare(case)
        self.case, self.dtype = case, reference.DTYPES[case.dtype]
        self.experts = make_experts(case.plan, self.dtype)

    def inputs(self, num_tokens: int, routing: str = "random") -> tuple[Tensor, list[Tensor]]:
        x = torch.randn(num_tokens, self.case.hidden, device="cuda").to(self.dtype)
        return x, list(route(self.case, num_tokens, routing))

    def __call__(self, x: Tensor, router: list[Tensor]) -> Tensor:
        return torch.ops.moeflex.moe_layer(x, router, self.experts, self.case.plan.key)

    def check(self, x: Tensor, router: list[Tensor], out: Tensor) -> None:
        ids, weights = router
        eager = reference.moe_layer(self.case.plan, x, router, self.experts)
        fp32 = reference.moe_layer(
            dataclasses.replace(self.case.plan, out_dtype="fp32"),
            x.float(),
            [ids, weights.float()],
            [t.float() for t in self.experts],
        )
        assert_close_to_fp32(out.cpu(), eager.cpu(), fp32.cpu())


@pytest.fixture
def plain() -> Layers:
    return Layers(CASES["plain"])


@pytest.mark.parametrize("name", list(CASES))
def test_every_range_of_tokens_matches_the_reference(name: str) -> None:
    layers = Layers(CASES[name])
    case = layers.case
    starts = cuda_program.ranges(case.plan, case.dtype, case.weight_dtype, case.index_dtype)
    for num_tokens in sorted({1, 5, *(min(first, 700) for first, _, _ in starts)}):
        x, router = layers.inputs(num_tokens)
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = layers(x, router)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        layers.check(x, router, out)
        assert torch.equal(out, layers(x, router))


def test_no_tokens(plain: Layers) -> None:
    x, router = plain.inputs(4)
    out = plain(x[:0], [r[:0] for r in router])
    assert out.shape == (0, plain.case.hidden)
    assert out.dtype is torch.bfloat16


def test_leading_axes_and_views(plain: Layers) -> None:
    x, router = plain.inputs(24)
    want = plain(x, router)
    assert torch.equal(plain(x.view(4, 6, -1), [r.view(4, 6, -1) for r in router]), want)
    wide = torch.cat([x, x], dim=1)[:, : x.shape[1]]
    odd = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    for view in (wide, x.t().contiguous().t(), odd):
        assert not view.is_contiguous() or view.data_ptr() % 16
        columns = [torch.cat([r, r], dim=1)[:, : r.shape[1]] for r in router]
        assert torch.equal(plain(view, columns), want)


def test_weights_that_are_written_moved_or_restrided_are_seen(plain: Layers) -> None:
    x, router = plain.inputs(16)
    before = plain(x, router)
    plain.experts[-1].mul_(2)
    assert torch.equal(plain(x, router), 2 * before)
    plain.experts[-1].data = plain.experts[-1].data / 2
    assert torch.equal(plain(x, router), before)
    # every other expert of a larger tensor
    w2 = plain.experts[-1]
    plain.experts[-1] = torch.stack([w2, torch.full_like(w2, float("nan"))], 1)[:, 0]
    assert not plain.experts[-1].is_contiguous()
    assert torch.equal(plain(x, router), before)


def test_a_tensor_that_cannot_be_read_in_place_is_refused(plain: Layers) -> None:
    x, router = plain.inputs(3)
    w2 = plain.experts[-1]
    plain.experts[-1] = w2.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(RuntimeError, match="contiguous last axis"):
        plain(x, router)
    plain.experts[-1] = w2[:, :, :-8]
    with pytest.raises((RuntimeError, PlanError), match="must"):
        plain(x, router)


def test_dtypes_that_were_not_prepared_run_in_plain_torch(plain: Layers, caplog) -> None:
    x, (ids, weights) = plain.inputs(16)
    want = plain(x, [ids, weights])
    got = plain(x, [ids.int(), weights])
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
    assert "runs in plain torch" in caplog.text


def test_one_graph_replays_with_new_inputs_and_another_runs_beside_it() -> None:
    """Each graph has its own counters: two replay at once, on two streams, and a call beside them."""
    layers = Layers(CASES["qwen3-30b"])
    graphs = []
    for num_tokens in (4, 600):
        x, router = layers.inputs(num_tokens)
        layers(x, router)
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="global"):
                out = layers(x, router)
            graphs.append((graph, x, router, out))
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for _, x, router, _ in graphs:
            x.normal_()
            for old, new in zip(router, route(layers.case, len(x), "random"), strict=True):
                old.copy_(new)
        wants = [layers(x, router) for _, x, router, _ in graphs]
        torch.cuda.synchronize()
        for (graph, *_), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        extra = layers(graphs[0][1], graphs[0][2])
        torch.cuda.synchronize()
        assert torch.equal(extra, wants[0])
        for (_, _, _, out), want in zip(graphs, wants, strict=True):
            assert torch.equal(out, want)


def test_counters_of_a_destroyed_graph_are_used_again(plain: Layers) -> None:
    """Other processes may take memory of the device meanwhile; a leak shows in every round."""
    x, router = plain.inputs(8)
    want = plain(x, router)
    grown = []
    for _ in range(3):
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        for _ in range(300):  # two slabs of counters, if none came back
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = plain(x, router)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, want)
            graph.reset()
            del graph, out
        torch.cuda.empty_cache()
        grown.append(free - torch.cuda.mem_get_info()[0])
    assert min(grown) < 64 << 20


def test_two_streams_at_once(plain: Layers) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    work = [plain.inputs(n) for n in (40, 300)]
    wants = [plain(*one) for one in work]
    torch.cuda.synchronize()
    outs: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs[i].append(plain(*work[i]))
    torch.cuda.synchronize()
    for want, got in zip(wants, outs, strict=True):
        assert all(torch.equal(one, want) for one in got)


def test_memory_is_the_result_and_scratch_that_comes_back() -> None:
    layers = Layers(CASES["qwen3-30b"])
    x, router = layers.inputs(512)
    layers(x, router)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = layers(x, router)
    torch.cuda.synchronize()
    experts = sum(t.nbytes for t in layers.experts)
    assert torch.cuda.memory_allocated() - before == out.nbytes
    assert torch.cuda.max_memory_allocated() - before < experts / 4


def test_gradients_equal_those_of_the_reference(plain: Layers) -> None:
    x, (ids, weights) = plain.inputs(20)
    leaves = [x, weights, *plain.experts]
    for leaf in leaves:
        leaf.requires_grad_()
    grad = torch.randn_like(x)
    ours = torch.autograd.grad(plain(x, [ids, weights]), leaves, grad)
    eager = torch.autograd.grad(
        reference.moe_layer(plain.case.plan, x, [ids, weights], plain.experts), leaves, grad
    )
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    plan = dataclasses.replace(plain.case.plan, out_dtype="fp32")
    out = reference.moe_layer(plan, wide[0], [ids, wide[1]], wide[2:])
    fp32 = torch.autograd.grad(out, wide, grad.float())
    for one, same, exact in zip(ours, eager, fp32, strict=True):
        assert_close_to_fp32(one.cpu(), same.cpu(), exact.cpu())
