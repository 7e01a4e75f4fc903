"""A graph with the op in it computes what it computed before, gradients and other outputs included."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from tests.models import styles
from tests.passes import graphs
from tests.passes.test_match_moe import Small


def ops(gm: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op in ("call_function", "call_method")]


@pytest.mark.parametrize("name", [*styles.STYLES, *styles.UNKNOWN_ROUTERS])
@pytest.mark.parametrize("absorb", [False, True], ids=["router outside", "router inside"])
def test_style_computes_the_same(name: str, absorb: bool) -> None:
    module, x = styles.build(name), styles.rows()
    with torch.no_grad():
        expected = module(x)
        result, gm, count = graphs.replaced(module, x, absorb=absorb)
    assert count == 1
    assert ops(gm).count("moeflex.moe_layer.default") == 1
    low = name.startswith("grouped")  # computes in bf16 inside
    torch.testing.assert_close(
        result, expected, rtol=3e-2 if low else 1e-4, atol=1e-2 if low else 1e-5
    )


@pytest.mark.parametrize(
    "name", ["loop_where", "loop_plus_equals", "loop_stacked", "dense_unrolled"]
)
def test_nothing_of_a_loop_is_left(name: str) -> None:
    with torch.no_grad():
        _, gm, _ = graphs.replaced(styles.build(name), styles.rows())
    left = " ".join(ops(gm))
    assert "where" not in left and "index_add" not in left and "_assert_scalar" not in left


def test_gradients_flow_through_the_op() -> None:
    module, x = Small(), torch.randn(9, 12, requires_grad=True)
    module(x).square().sum().backward()
    expected = [x.grad.clone(), *(p.grad.clone() for p in module.parameters())]
    x.grad = None
    module.zero_grad()
    result, _, _ = graphs.replaced(module, x)
    result.square().sum().backward()
    for got, want in zip([x.grad, *(p.grad for p in module.parameters())], expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_blocks_that_feed_each_other_directly() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = Small(), Small(), Small()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first = self.a(x)
            return self.c(self.b(first)), first

    module, x = Stack(), torch.randn(9, 12)
    with torch.no_grad():
        expected = module(x)
        result, _, count = graphs.replaced(module, x)
    assert count == 3
    for got, want in zip(result, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_other_readers_of_the_router_keep_their_values() -> None:
    class Watched(Small):
        def forward(self, x: torch.Tensor):
            logits, weights, ids = self.route(x)
            return self.experts(x, weights, ids), logits, ids, weights

    module, x = Watched(), torch.randn(9, 12)
    with torch.no_grad():
        expected = module(x)
        result, _, _ = graphs.replaced(module, x)
    torch.testing.assert_close(result[0], expected[0], rtol=1e-4, atol=1e-5)
    for got, want in zip(result[1:], expected[1:], strict=True):
        assert torch.equal(got, want)
        assert got.dtype == want.dtype


def test_result_buffer_that_is_read_under_its_first_name() -> None:
    class Accumulates(styles.STYLES["loop_where"]):  # type: ignore[misc, valid-type]
        pass

    module, x = Accumulates(), styles.rows()
    with torch.no_grad():
        result, _, count = graphs.replaced(module, x)
        torch.testing.assert_close(result, module(x), rtol=1e-4, atol=1e-5)
    assert count == 1


def test_cache_updates_of_the_graph_survive() -> None:
    class Cached(Small):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(9, 12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache.add_(x)
            return super().forward(x)

    module, x = Cached(), torch.randn(9, 12)
    with torch.no_grad():
        graphs.replaced(module, x)
    torch.testing.assert_close(module.cache, x)


def test_input_that_is_overwritten_after_the_block_is_read_before() -> None:
    class Overwrites(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.clone()
            _, weights, ids = self.route(y)
            out = self.experts(y, weights, ids)
            y.add_(1.0)
            return out + y

    module, x = Overwrites(), torch.randn(9, 12)
    with torch.no_grad():
        result, _, _ = graphs.replaced(module, x)
        torch.testing.assert_close(result, module(x), rtol=1e-4, atol=1e-5)
