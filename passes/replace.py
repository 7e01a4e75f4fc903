"""Put `moeflex::moe_layer` in the place of a proven block.

The graph may be a torch-level one with in-place operators, so `graph.eliminate_dead_code()` is never
called: it would delete cache updates. Only nodes that nothing reads any more, and that wrote to
nothing but memory of their own block, are erased.
"""

from __future__ import annotations

import functools
import heapq
import operator
from typing import Any

import torch
from torch import fx

from moe_compiler.errors import MoeflexError
from moe_compiler.ir import MoEPlan, RouterSpec, Score
from moe_compiler.passes.dataflow import DataFlow
from moe_compiler.passes.match_moe import Match
from moe_compiler.passes.nodes import is_inplace, op_name, tensor
from moe_compiler.reference import DTYPES

_CHECKS = frozenset(
    (
        "_assert_scalar",
        "_assert_tensor_metadata",
        "_check",
        "_check_is_size",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
        "_assert_async",
    )
)
"""Nodes without a result that only watch values of the block; they go with it."""


class ReplaceError(MoeflexError):
    """A proven block cannot be cut out; the text is the reason, the graph is unchanged."""


def replace_region(
    gm: fx.GraphModule,
    match: Match,
    plan: MoEPlan,
    *,
    flow: DataFlow,
    absorb_router: bool = False,
    router: RouterSpec | None = None,
    layer_op: str = "moe_layer",
) -> fx.Node:
    """Replace one block.

    Args:
        gm: the graph, edited in place; `recompile()` is left to the caller.
        match: the block, found in this graph.
        plan: what the op shall compute; its router is EXTERNAL unless `absorb_router`.
        flow: `MatchResult.flow`, taken before any replacement.
        absorb_router: the op takes logits (and bias) instead of ids and weights.
        router: `moeflex::route` computes it in front of the layer; None where the graph does.
        layer_op: "moe_layer" | "triton_layer".

    Returns:
        The node that now stands for the block's output.

    Raises:
        ReplaceError: memory of the block is aliased in a way that the replacement would change;
            nothing was edited.
    """
    _refuse_aliases(flow, match)
    graph = gm.graph
    output = tensor(match.output)
    assert output is not None
    with graph.inserting_before(match.output):
        if absorb_router:
            assert match.logits is not None
            assert plan.router.score is not Score.EXTERNAL
            routing = [match.logits] + ([match.router_bias] if match.router_bias else [])
        elif router is not None:
            rows = output.reshape(-1, output.shape[-1])
            routing = _route(graph, match, router, rows.shape[0])
        else:
            routing = [match.ids, _sparse_weights(graph, match)]
        x = flow.replaced.get(match.x, match.x)
        cast = functools.partial(_cast_down, graph, match.region.gemm_dtype)
        experts = [cast(n) for n in match.experts]
        separate = layer_op == "triton_layer"
        arguments: tuple[Any, ...] = tuple(routing) if separate else (routing,)
        arguments = (cast(x), *arguments, experts, plan.key)
        layer = graph.call_function(getattr(torch.ops.moeflex, layer_op).default, arguments)
        layer.meta = _meta(match.output, output.reshape(-1, output.shape[-1]))
        result = layer if output.ndim == 2 else _like_output(graph, match, layer, flow)
    _redirect(flow, match, result)
    _erase(graph, match, flow, keep={layer, result})
    return result


def _cast_down(graph: fx.Graph, gemm_dtype: str, node: fx.Node) -> fx.Node:
    """The cast that the graph makes before its expert GEMMs, where it narrows."""
    found = tensor(node)
    assert found is not None
    dtype = DTYPES.get(gemm_dtype, found.dtype)
    if found.dtype.itemsize <= dtype.itemsize:
        return node
    if "val" in node.meta:
        narrow = graph.call_function(torch.ops.aten.to.dtype, (node, dtype))
    else:
        narrow = graph.call_method("to", (node, dtype))
    narrow.meta = _meta(node, found.to(dtype))
    return narrow


def _route(graph: fx.Graph, match: Match, router: RouterSpec, num_tokens: int) -> list[fx.Node]:
    """Ids and weights [T, K] by `moeflex::route`."""
    assert match.logits is not None
    logits = tensor(match.logits)
    assert logits is not None
    op = torch.ops.moeflex.route.default
    routed = graph.call_function(op, (match.logits, match.router_bias, router.key))
    shape = (num_tokens, router.top_k)
    fakes = (
        logits.new_empty(shape, dtype=torch.int64),
        logits.new_empty(shape, dtype=DTYPES.get(router.score_dtype, logits.dtype)),
    )
    routed.meta = _meta(match.ids, fakes)
    nodes = []
    for index, fake in enumerate(fakes):
        node = graph.call_function(operator.getitem, (routed, index))
        node.meta = _meta(match.ids, fake)
        nodes.append(node)
    return nodes


def _sparse_weights(graph: fx.Graph, match: Match) -> fx.Node:
    """Weights [T, K]: as they are, or picked out of the dense [T, E]."""
    if not match.region.dense_weights:
        return match.weights
    dense, ids = tensor(match.weights), tensor(match.ids)
    assert dense is not None
    assert ids is not None
    picked = graph.call_function(torch.gather, (match.weights, -1, match.ids))
    picked.meta = _meta(match.weights, dense.new_empty(ids.shape))
    return picked


def _meta(origin: fx.Node, fake: object) -> dict[str, object]:
    """Metadata of a new node: where it came from, and its fake value."""
    key = "val" if "val" in origin.meta else "example_value"
    kept: dict[str, object] = {
        k: origin.meta[k] for k in ("nn_module_stack", "stack_trace") if k in origin.meta
    }
    return {**kept, key: fake}


def _like_output(graph: fx.Graph, match: Match, layer: fx.Node, flow: DataFlow) -> fx.Node:
    """[T, H] back to the shape of the block's output."""
    output, x = tensor(match.output), tensor(match.x)
    assert output is not None
    assert x is not None
    if not any(isinstance(s, torch.SymInt) for s in output.shape):
        shaped = graph.call_method("reshape", (layer, tuple(int(s) for s in output.shape)))
        if "val" in match.output.meta:
            shaped.target, shaped.op = torch.ops.aten.reshape.default, "call_function"
            shaped.args = (layer, [int(s) for s in output.shape])
    elif tuple(output.shape) == tuple(x.shape):
        x_now = flow.replaced.get(match.x, match.x)
        shaped = graph.call_function(torch.ops.aten.view_as.default, (layer, x_now))
    else:
        other = _node_of_shape(match)
        shaped = graph.call_function(
            torch.ops.aten.view_as.default, (layer, flow.replaced.get(other, other))
        )
    shaped.meta = _meta(match.output, output)
    return shaped


def _node_of_shape(match: Match) -> fx.Node:
    """A node outside of the block's body with the output's (symbolic) shape."""
    wanted = tensor(match.output)
    assert wanted is not None
    body = set(match.body)
    node: fx.Node | None = match.x
    while node is not None:
        found = tensor(node)
        if found is not None and tuple(found.shape) == tuple(wanted.shape) and node not in body:
            return node
        node = node.all_input_nodes[0] if node.all_input_nodes else None
    raise ReplaceError(
        f"no tensor of the dynamic shape {tuple(wanted.shape)} is at hand before the block"
    )


def _refuse_aliases(flow: DataFlow, match: Match) -> None:
    output, x = tensor(match.output), tensor(match.x)
    assert output is not None
    assert x is not None
    dynamic = any(isinstance(s, torch.SymInt) for s in output.shape)
    if output.ndim != 2 and dynamic and tuple(output.shape) != tuple(x.shape):
        _node_of_shape(match)
    _refuse_writes(flow, match)
    _refuse_late_views(flow, match)


def _refuse_writes(flow: DataFlow, match: Match) -> None:
    """The op reads its inputs where the output stood, and writes to nothing."""
    end = flow.position[match.output]
    for node in (match.x, match.ids, match.weights, *match.experts):
        if flow.version_at(node, end) not in (node, flow.version_at(node, flow.position[node] + 1)):
            raise ReplaceError(f"'{node.name}' is written to while the block runs")
    body = set(match.body)
    for node in match.body:
        if is_inplace(node) and flow.storage(node) not in body:
            raise ReplaceError(f"'{node.name}' writes to memory from outside of the block")


def _refuse_late_views(flow: DataFlow, match: Match) -> None:
    """Nobody may look at the memory of the output but as the output itself."""
    end = flow.position[match.output]
    storage = flow.storage(match.output)
    if storage not in match.body:
        return
    for node in match.body:
        if flow.storage(node) is not storage or not any(flow.position[u] > end for u in node.users):
            continue
        redirected = node is storage or is_inplace(node)
        if node is not match.output and not (redirected and _same_elements(node, match.output)):
            raise ReplaceError(f"'{node.name}' looks at the result's memory after the block")


def _same_elements(node: fx.Node, other: fx.Node) -> bool:
    """Whether two views of one memory show the same elements in the same order."""
    a, b = tensor(node), tensor(other)
    return (
        a is not None
        and b is not None
        and tuple(a.shape) == tuple(b.shape)
        and tuple(a.stride()) == tuple(b.stride())
        and a.storage_offset() == b.storage_offset()
    )


def _redirect(flow: DataFlow, match: Match, result: fx.Node) -> None:
    """Readers of the output, under whatever name they know its memory, read the result."""
    end = flow.position[match.output]
    names = [match.output]
    storage = flow.storage(match.output)
    body = set(match.body)
    if storage in body:
        names += [
            n for n in match.body if flow.storage(n) is storage and (n is storage or is_inplace(n))
        ]
    for name in dict.fromkeys(names):
        flow.replaced[name] = result
        for user in list(name.users):
            if user is not result and flow.position.get(user, -1) > end:
                user.replace_input_with(name, result)


def _erase(graph: fx.Graph, match: Match, flow: DataFlow, keep: set[fx.Node]) -> None:
    """Erase the body, the size checks on it, and what of the router nothing reads any more."""
    doomed = _with_watchers(flow, set(match.body) - keep)
    doomed |= {n for n in match.nodes if not is_inplace(n)} - keep
    for node in sorted(doomed - flow.erased, key=flow.position.__getitem__, reverse=True):
        if not node.users:
            graph.erase_node(node)
            flow.erased.add(node)


def _with_watchers(flow: DataFlow, doomed: set[fx.Node]) -> set[fx.Node]:
    """Add the nodes that only watch doomed ones; in graph order, so that each is judged once."""
    found = set(doomed)
    waiting: list[int] = []

    def enqueue(node: fx.Node) -> None:
        for user in node.users:
            if user in flow.position and user not in found:
                heapq.heappush(waiting, flow.position[user])

    for node in doomed:
        enqueue(node)
    while waiting:
        node = flow.nodes[heapq.heappop(waiting)]
        if node not in found and _watches(node, found):
            found.add(node)
            enqueue(node)
    return found


def _watches(node: fx.Node, doomed: set[fx.Node]) -> bool:
    """Whether a node reads doomed tensors alone and only computes, or checks, with them."""
    reads = node.all_input_nodes
    if node.op not in ("call_function", "call_method") or not reads:
        return False
    if not all(a in doomed for a in reads):
        return False
    return op_name(node) in _CHECKS or not is_inplace(node)
