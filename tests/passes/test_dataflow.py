"""Versions, constants, dominators and weights of graphs small enough to check by eye or by force."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from moe_compiler.passes.dataflow import DataFlow, chain, id_bound
from moe_compiler.passes.nodes import tensor
from tests.passes.graphs import Built


def test_reader_depends_on_the_write_through_a_view() -> None:
    g = Built()
    x = g.input("x", torch.ones(4, 6))
    base = g(torch.relu, x)
    before = g(torch.neg, base)
    view = g("view", base, -1)
    write = g("add_", view, 1.0)
    after = g(torch.neg, base)
    flow = g.flow(after, before)
    assert flow.inputs[before] == [base]
    assert flow.inputs[after] == [write]
    assert flow.storage(write) is flow.storage(view) is base
    assert flow.version_at(base, flow.position[write]) is base
    assert flow.version_at(base, flow.position[after]) is write


def test_item_assignment_and_second_write_follow_each_other() -> None:
    g = Built()
    x = g.input("x", torch.ones(4, 6))
    base = g(torch.zeros_like, x)
    first = g(operator.setitem, base, 0, 1.0)
    second = g(operator.iadd, base, x)
    flow = g.flow(g(torch.neg, base))
    assert first in flow.inputs[second]
    assert flow.inputs[flow.nodes[-2]] == [second]


def test_entries_of_a_tuple_do_not_alias_and_chunks_do() -> None:
    g = Built()
    x = g.input("x", torch.rand(4, 6))
    top = g(torch.topk, x, 2)
    values, ids = g(operator.getitem, top, 0), g(operator.getitem, top, 1)
    written = g("mul_", values, 2.0)
    read_ids = g(torch.clamp, ids, 0, 3)
    base = g(torch.relu, x)
    half = g(operator.getitem, g("chunk", base, 2, -1), 0)
    copied = g(operator.getitem, base, read_ids)
    flow = g.flow(written, half, copied)
    assert flow.storage(values) is values
    assert flow.inputs[read_ids] == [ids]
    assert flow.version_at(top, len(flow.nodes)) is top
    assert flow.storage(half) is base
    assert flow.storage(copied) is copied


def test_weights_sizes_and_what_comes_of_them_are_constant() -> None:
    g = Built()
    x, w = g.input("x", torch.rand(4, 6)), g.input("w", torch.rand(6, 6))
    doubled = g(torch.mul, w, 2)
    rows = g("size", x, 0)
    table = g(torch.arange, rows)
    product = g(torch.matmul, x, doubled)
    flow = g.flow(product, table, parameters=[w])
    constant = {n for n in flow.nodes if flow.constant[n]}
    assert constant == {w, doubled, rows, table}
    assert flow.data_inputs[product] == [x]
    assert flow.uses_parameters(doubled)
    assert not flow.uses_parameters(table)


def _sum(*entries: torch.Tensor) -> torch.Tensor:
    return torch.stack(entries).sum(0)


def _random_flow(seed: int) -> DataFlow:
    choose = random.Random(seed)
    g = Built()
    nodes = [g.input(f"x{i}", torch.ones(4, 6)) for i in range(choose.choice([1, 2]))]
    for _ in range(14):
        reads = choose.sample(nodes[-5:], k=min(len(nodes[-5:]), choose.choice([1, 1, 2, 3])))
        nodes.append(g(_sum, *reads))
    return g.flow(nodes[-1])


def _reaches(
    starts: Sequence[fx.Node], edges: dict[fx.Node, list[fx.Node]], goal: fx.Node, without: fx.Node
) -> bool:
    seen, stack = set(), [n for n in starts if n is not without]
    while stack:
        node = stack.pop()
        if node is goal:
            return True
        if node not in seen:
            seen.add(node)
            stack.extend(n for n in edges[node] if n is not without)
    return False


@pytest.mark.parametrize("seed", range(30))
def test_dominators_agree_with_removing_each_node(seed: int) -> None:
    flow = _random_flow(seed)
    nodes = [n for n in flow.nodes if n is not flow.output]
    sources = [n for n in nodes if n.op == "placeholder"]
    inner = {n: [u for u in flow.data_users[n] if u is not flow.output] for n in nodes}
    ends = [n for n in nodes if not inner[n]]
    backward = flow.data_inputs
    for node in nodes:
        above = [n for n in nodes if n is not node and not _reaches(sources, inner, node, n)]
        assert list(chain(flow.dominators, node)) == above[::-1]
        below = [n for n in nodes if n is not node and not _reaches(ends, backward, node, n)]
        assert list(chain(flow.post_dominators(6, 4), node)) == below


def test_post_dominators_do_not_see_losses_and_counters() -> None:
    g = Built()
    x = g.input("x", torch.rand(4, 6))
    hidden = g(torch.relu, x)
    loss = g(torch.sum, g(torch.square, g(torch.softmax, g("narrow", hidden, 1, 0, 3), -1)))
    result = g(torch.mul, hidden, 2.0)
    flow = g.flow(result, loss)
    assert list(chain(flow.post_dominators(6, 4), hidden)) == [result]
    assert loss not in flow.post_dominators(6, 4)


def test_reachability_stops_where_it_is_told() -> None:
    g = Built()
    nodes = [g.input("x", torch.rand(4, 6))]
    for _ in range(6):
        nodes.append(g(torch.relu, nodes[-1]))
    flow = g.flow(nodes[-1])
    assert flow.ancestors([nodes[5]], stop=[nodes[2]]) == set(nodes[2:6])
    assert flow.ancestors([nodes[5]], first=flow.position[nodes[4]]) == {nodes[4], nodes[5]}
    assert flow.descendants([nodes[1]], last=flow.position[nodes[3]]) == set(nodes[1:4])


def test_ids_are_bounded_by_the_axis_they_were_selected_from() -> None:
    g = Built()
    x, given = g.input("x", torch.rand(4, 8)), g.input("ids", torch.zeros(4, 2, dtype=torch.long))
    wide = g(operator.getitem, g(torch.topk, x, 2), 1)
    narrow = g("to", g(torch.argmax, g("narrow", x, 1, 0, 5), -1, True), torch.int32)
    both = g(torch.cat, [wide, g("to", narrow, torch.long)], -1)
    shifted = g(torch.add, wide, 1)
    mixed = g(torch.cat, [wide, given], -1)
    flow = g.flow(both, shifted, mixed)
    assert [id_bound(flow, n) for n in (wide, narrow, both)] == [8, 5, 8]
    assert [id_bound(flow, n) for n in (given, shifted, mixed)] == [None, None, None]


LEAVES: dict[str, tuple[Callable[..., fx.Node], str | None, bool]] = {
    "transposed": (
        lambda g, x, w, ids: g("transpose", g("t", g("select", w, 0, 0)), 0, 1),
        "w",
        False,
    ),
    "cast": (lambda g, x, w, ids: g("to", g("view", w, 3, -1), torch.bfloat16), "w", False),
    "gathered": (lambda g, x, w, ids: g("to", g(operator.getitem, w, ids), torch.half), "w", True),
    "computed": (lambda g, x, w, ids: g("transpose", g(torch.mul, w, 2.0), 1, 2), "mul", False),
    "computed, gathered": (
        lambda g, x, w, ids: g(operator.getitem, g(torch.mul, w, 2.0), ids),
        "mul",
        True,
    ),
    "activation": (lambda g, x, w, ids: g("t", x), None, False),
    "arithmetic on both": (
        lambda g, x, w, ids: g(torch.matmul, x, g("select", w, 0, 0)),
        None,
        False,
    ),
    "no weight": (lambda g, x, w, ids: g(torch.ones, 4, 6), None, False),
}


@pytest.mark.parametrize("name", list(LEAVES))
def test_operand_is_followed_to_its_weight(name: str) -> None:
    build, expected, gathered = LEAVES[name]
    g = Built()
    x, ids = g.input("x", torch.rand(4, 6)), g.input("ids", torch.zeros(4, dtype=torch.long))
    w = g.input("w", torch.rand(3, 6, 6))
    operand = build(g, x, w, ids)
    found: Any = g.flow(operand, parameters=[w]).weight_leaf(operand)
    assert (found and (found[0].name, found[1])) == (expected and (expected, gathered))
    assert tensor(operand) is not None
