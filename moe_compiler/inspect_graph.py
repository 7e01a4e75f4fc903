"""The nodes of a proven block, sorted into router, dispatch, experts and combine, for pictures."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

import torch
from torch import fx

from moe_compiler.model_report import BlockGraph, GraphNode, OutsideNode, Stage
from moe_compiler.passes.dataflow import CONTRACTIONS, DataFlow, op_name, tensor
from moe_compiler.passes.match_moe import Match
from moe_compiler.reference import DTYPE_NAMES

MAX_GRAPH_NODES = 150
"""A static loop over many experts has thousands of nodes: its middle is left out."""


def block_graph(match: Match, flow: DataFlow) -> BlockGraph:
    """The graph of one block; names are those of this block, and a reader of a tensor reads who last wrote to it."""
    symbols = _token_symbol(match.x)
    inside = [n for n in match.output.graph.nodes if n in match.nodes and _computes(n)]
    stages = _stages(match, inside, flow)
    roles = _roles(match, flow)
    reads = dict.fromkeys(a for n in inside for a in flow.inputs[n] if a not in stages)
    kept = _middle_out(inside)
    nodes = tuple(
        GraphNode(
            name=node.name,
            op=op_name(node),
            stage=stages[node],
            shape=_shape(node, symbols),
            inputs=tuple(a.name for a in flow.inputs[node]),
        )
        for node in kept
    )
    used = {name for node in nodes for name in node.inputs}
    outside = tuple(
        OutsideNode(name=node.name, role=roles.get(node, ""), shape=_shape(node, symbols))
        for node in reads
        if node.name in used
    )
    return BlockGraph(
        nodes=nodes, outside=outside, output=match.output.name, num_hidden=len(inside) - len(kept)
    )


def _computes(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "get_attr", "output")


def _middle_out(nodes: list[fx.Node]) -> list[fx.Node]:
    if len(nodes) <= MAX_GRAPH_NODES:
        return nodes
    tail = MAX_GRAPH_NODES // 3
    return nodes[: MAX_GRAPH_NODES - tail] + nodes[-tail:]


def _roles(match: Match, flow: DataFlow) -> dict[fx.Node, str]:
    experts = match.region.experts
    per_role = 1 if experts.stacked else experts.num_experts
    roles = {match.x: "x"}
    for index, node in enumerate(match.experts):
        roles.setdefault(node, experts.tensor_roles[index // per_role])
    if match.router_bias is not None:
        roles[match.router_bias] = "router bias"
    if match.logits is not None:
        for node in _closure([match.logits], set(match.logits.graph.nodes) - {match.x}, flow):
            if not _computes(node):
                roles.setdefault(node, "router")
    return roles


def _stages(match: Match, nodes: list[fx.Node], flow: DataFlow) -> dict[fx.Node, Stage]:
    """Router: what ids and weights need. Experts: from the first to the last contraction behind it."""
    members = set(nodes)
    router = _closure([match.ids, match.weights], members, flow)
    after: set[fx.Node] = set()
    for node in nodes:
        if node not in router and (_contracts(node) or any(a in after for a in flow.inputs[node])):
            after.add(node)
    before: set[fx.Node] = set()
    for node in reversed(nodes):
        if node not in router and (_contracts(node) or any(u in before for u in flow.users[node])):
            before.add(node)
    stages = {}
    for node in nodes:
        if node in router:
            stages[node] = Stage.ROUTER
        elif node not in after:
            stages[node] = Stage.DISPATCH
        else:
            stages[node] = Stage.EXPERTS if node in before else Stage.COMBINE
    return stages


def _closure(roots: Iterable[fx.Node], members: set[fx.Node], flow: DataFlow) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node in members and node not in found:
            found.add(node)
            todo += flow.inputs[node]
    return found


def _contracts(node: fx.Node) -> bool:
    return op_name(node) in CONTRACTIONS


def _token_symbol(x: fx.Node) -> str:
    """The name of the size symbol that is the token count, or "" where there is none or more than one."""
    found = tensor(x)
    if found is None:
        return ""
    sizes: list[object] = list(found.shape)
    names = {str(size) for size in sizes if isinstance(size, torch.SymInt)}
    return names.pop() if len(names) == 1 else ""


def _shape(node: fx.Node, token_symbol: str) -> str:
    found = tensor(node)
    if found is None:
        return ""
    sizes = ", ".join(str(size) for size in found.shape)
    if token_symbol:
        sizes = re.sub(rf"\b{re.escape(token_symbol)}\b", "T", sizes)
    return f"[{sizes}] {DTYPE_NAMES.get(found.dtype, str(found.dtype).removeprefix('torch.'))}"


@dataclasses.dataclass
class GraphTable:
    """The distinct graphs of a model: blocks whose graphs differ in names only share one."""

    graphs: list[BlockGraph] = dataclasses.field(default_factory=list)
    _places: dict[tuple[object, ...], int] = dataclasses.field(default_factory=dict)

    def index_of(self, graph: BlockGraph) -> int:
        """The place of `graph`, which is added when it is new."""
        names = [node.name for node in graph.outside] + [node.name for node in graph.nodes]
        numbers = {name: i for i, name in enumerate(names)}
        key = (
            tuple((node.role, node.shape) for node in graph.outside),
            tuple(
                (n.op, n.stage, n.shape, tuple(numbers.get(name, -1) for name in n.inputs))
                for n in graph.nodes
            ),
            graph.num_hidden,
        )
        if key not in self._places:
            self._places[key] = len(self.graphs)
            self.graphs.append(graph)
        return self._places[key]
