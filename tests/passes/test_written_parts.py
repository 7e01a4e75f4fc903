"""Buffers that are filled part by part: concatenations, and what only looks like one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from moe_compiler.passes.written_parts import join_written_parts
from tests.passes.graphs import capture


def fills(x: Tensor, *writes: tuple[slice, Tensor]) -> Tensor:
    buffer = x.new_empty(2, 3, 6)
    for span, values in writes:
        buffer[..., span].copy_(values)
    return buffer


def in_order(x: Tensor) -> Tensor:
    return fills(x, (slice(None, 4), x * 2), (slice(4, None), x[..., :2])) + 1


def backwards(x: Tensor) -> Tensor:
    return fills(x, (slice(-2, None), x[..., :2]), (slice(0, 4), x * 2)) + 1


def along_the_first_axis(x: Tensor) -> Tensor:
    buffer = x.new_empty(2, 3, 4)
    buffer[:1].copy_(x[:1] * 2)
    buffer[1:, ...].copy_(x[:1])
    return buffer + 1


def with_a_gap(x: Tensor) -> Tensor:
    return fills(x, (slice(0, 4), x), (slice(5, 6), x[..., :1]))[..., :4]


def twice(x: Tensor) -> Tensor:
    return fills(x, (slice(0, 4), x), (slice(2, 6), x * 2))


def read_between(x: Tensor) -> Tensor:
    buffer = x.new_empty(2, 3, 6)
    buffer[..., :4].copy_(x)
    early = buffer[..., :4] * 2
    buffer[..., 4:].copy_(x[..., :2])
    return buffer + early.sum()


def with_a_step(x: Tensor) -> Tensor:
    return fills(x, (slice(0, 6, 2), x[..., :3]), (slice(1, 6, 2), x[..., :3]))


def broadcast(x: Tensor) -> Tensor:
    return fills(x, (slice(0, 4), x), (slice(4, 6), x[..., :1]))


def cast(x: Tensor) -> Tensor:
    return fills(x, (slice(0, 4), x), (slice(4, 6), x[..., :2].half()))


class Runs(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("function", [in_order, backwards, along_the_first_axis])
def test_parts_that_fill_a_buffer_are_joined(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 3, 4)
    graphs, _ = capture(Runs(function), x)
    gm = graphs[0][0]
    assert join_written_parts(gm.graph) == 1
    gm.graph.lint()
    gm.recompile()
    assert "copy_" not in gm.code
    assert torch.equal(gm(x)[0], function(x))


@pytest.mark.parametrize(
    "function", [with_a_gap, twice, read_between, with_a_step, broadcast, cast]
)
def test_others_stay(function: Callable[[Tensor], Tensor]) -> None:
    graphs, _ = capture(Runs(function), torch.randn(2, 3, 4))
    gm = graphs[0][0]
    code = gm.code
    assert join_written_parts(gm.graph) == 0
    gm.recompile()
    assert gm.code == code
