"""A slice is cut where it should be, and runs as the model would."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, fx

from moe_compiler.passes.expert_run import small_view
from moe_compiler.passes.subgraph import Runner, Sizes, Slice, SliceError, cut
from tests.passes.graphs import Built


def test_cut_names_the_tensor_that_comes_from_elsewhere() -> None:
    g = Built()
    other, x = g.input("other", torch.ones(4, 6)), g.input("x", torch.ones(4, 6))
    total = g(torch.add, x, other)
    with pytest.raises(SliceError, match=r"'other' \(4, 6\).*outside of the block"):
        cut(g.flow(total), [x], [total])


def test_cut_does_not_search_above_its_inputs() -> None:
    g = Built()
    before = g(torch.relu, g.input("start", torch.ones(4, 6)))
    for _ in range(30):
        before = g(torch.relu, before)
    x = g.input("x", torch.ones(4, 6))
    total = g(torch.add, x, before)
    with pytest.raises(SliceError, match=f"'{before.name}'"):
        cut(g.flow(total), [x], [total], limit=3)


def _layer(g: Built, x: fx.Node, w: fx.Node, scale: float) -> fx.Node:
    return g(torch.mul, g(torch.matmul, x, g("t", w)), scale)


def _signature(*, scale: float = 2.0, rows: int = 6, dtype: torch.dtype = torch.float32) -> str:
    g = Built()
    x, w = (
        g.input("x", torch.ones(4, 6, dtype=dtype)),
        g.input("w", torch.ones(rows, 6, dtype=dtype)),
    )
    out = _layer(g, x, w, scale)
    return cut(g.flow(out, parameters=[w]), [x], [out]).signature()


def test_signature_tells_functions_apart_and_not_places() -> None:
    g = Built()
    x = g.input("x", torch.ones(4, 6))
    weights = [g.input(f"w{i}", torch.ones(6, 6)) for i in range(2)]
    first = _layer(g, x, weights[0], 2.0)
    second = _layer(g, first, weights[1], 2.0)
    flow = g.flow(second, parameters=weights)
    same = {cut(flow, [a], [b]).signature() for a, b in ((x, first), (first, second))}
    assert same == {_signature()}
    others = [_signature(scale=3.0), _signature(rows=5), _signature(dtype=torch.bfloat16)]
    assert len({*same, *others}) == 4


def _random(part: Slice, sizes: Sizes) -> dict[fx.Node, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        n: torch.randn(sizes.shape(n), generator=generator, dtype=torch.float64)
        for n in part.inputs + part.weights
    }


def test_precise_run_is_the_function_in_fp64_casts_included() -> None:
    g = Built()
    x, w = g.input("x", torch.ones(4, 6)), g.input("w", torch.ones(5, 6))
    low = g(torch.matmul, g("to", x, torch.bfloat16), g("t", g("bfloat16", w)))
    out = g("float", g(torch.nn.functional.silu, low))
    part = cut(g.flow(out, parameters=[w]), [x], [out])
    values = _random(part, Sizes())
    (precise,) = Runner(part, Sizes())(values, precise=True)
    expected = torch.nn.functional.silu(values[x] @ values[w].t())
    torch.testing.assert_close(precise, expected, rtol=1e-14, atol=1e-14)
    (native,) = Runner(part, Sizes())({n: v.float() for n, v in values.items()}, precise=False)
    assert native.dtype is torch.float32
    assert 1e-5 < float((native - expected).abs().max()) < 0.1


def test_shrunk_literals_leave_numbers_of_the_run_alone() -> None:
    g = Built()
    x, counter = g.input("x", torch.ones(128, 4)), g.input("counter", torch.tensor([128]))
    rows = g("view", x, 128, 2, 2)
    out = g(torch.mul, rows, g("item", counter))
    part = cut(g.flow(out), [x, counter], [out])
    small = Sizes(literals={128: 16})
    (seen,) = Runner(part, small)(
        {x: torch.ones(16, 4, dtype=torch.float64), counter: torch.tensor([128])}, precise=True
    )
    assert seen.shape == (16, 2, 2)
    assert bool((seen == 128).all())


def test_inputs_are_not_written_to() -> None:
    g = Built()
    x = g.input("x", torch.ones(4, 6))
    out = g(torch.add, g("mul_", g("view", x, -1), 3.0), 1.0)
    part = cut(g.flow(out), [x], [out])
    given = torch.ones(4, 6, dtype=torch.float64)
    (seen,) = Runner(part, Sizes())({x: given}, precise=True)
    assert bool((seen == 4).all())
    assert bool((given == 1).all())


def test_failing_operator_is_named() -> None:
    g = Built()
    x = g.input("x", torch.ones(4, 6))
    out = g("view", x, 3, 8)
    part = cut(g.flow(out), [x], [out])
    with pytest.raises(SliceError, match=r"'view' \(view\) failed"):
        Runner(part, Sizes(literals={3: 5}))(_random(part, Sizes()), precise=True)


@pytest.mark.parametrize("num_axes", [2, 3, 4])
def test_small_view_confuses_no_two_axes(num_axes: int) -> None:
    values = small_view((7,) * num_axes, torch.float64, torch.Generator().manual_seed(0))
    for first, second in itertools.combinations(range(num_axes), 2):
        assert not torch.equal(values, values.transpose(first, second))
        assert not torch.equal(values.select(first, 0), values.select(first, 1))


def test_small_view_of_a_large_layer_is_tiny() -> None:
    values = small_view((128, 3072, 4096), torch.float64, torch.Generator().manual_seed(0))
    assert values.shape == (128, 3072, 4096)
    assert values.untyped_storage().nbytes() < 2 << 20
