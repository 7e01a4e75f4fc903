"""Data flow of an FX graph, with in-place updates given versions.

Three things differ from `node.all_input_nodes`:

* `x.add_(y)`, `x += y` and `x[i] = y` define a new *version* of `x` and of the tensors that `x` is
  a view of; a later reader of `x` depends on that version;
* parameters, buffers, sizes and what is computed from nothing else are *constant*: they are not
  data;
* dominators are taken over data edges only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

import networkx as nx
import torch
from torch import fx

from moe_compiler.passes.nodes import (
    CASTS,
    CONTRACTIONS,
    VIEWS,
    is_float,
    is_hidden,
    is_inplace,
    last_size,
    op_name,
    tensor,
    value,
)

__all__ = ["CONTRACTIONS", "DataFlow", "chain", "id_bound", "op_name", "tensor"]

_ROOT = "virtual root"
_SPLITS = frozenset(("chunk", "split", "unbind", "tensor_split", "split_with_sizes"))
_ALIASES = (VIEWS - {"clone"}) | _SPLITS | {"getitem", "to"}
_LOOKUPS = frozenset(("index", "index_select", "embedding", "getitem"))


_COMPUTED = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))
_RESHAPES = frozenset(
    ("view", "reshape", "flatten", "unflatten", "_unsafe_view", "narrow", "slice")
)


def _picks_one(node: fx.Node) -> bool:
    """Whether an index begins with a number: it picks one expert."""
    index = node.args[1]
    first = index[0] if isinstance(index, tuple) and index else index
    return isinstance(first, int)


def _ambient_autocast() -> torch.dtype | None:
    """What autocast is while the graph is compiled, and so when it runs."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


class DataFlow:
    """Versioned data flow of one graph.

    Attributes:
        nodes: all nodes in order.
        position: node -> index in `nodes`.
        parameters: placeholders and attributes that are weights or buffers.
        constant: nodes with no data source upstream.
        inputs: node -> versions of the tensors (and sizes) that it reads, constants included.
        data_inputs, data_users: the same without constants.
        replaced: outputs of blocks that were replaced -> what stands for them now; the rest of this
            object describes the graph before any replacement.
        erased: nodes that are no longer in the graph.
    """

    def __init__(self, graph: fx.Graph, parameters: Iterable[fx.Node]) -> None:
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.parameters = frozenset(parameters)
        self.output = self.nodes[-1]
        self.inputs: dict[fx.Node, list[fx.Node]] = {}
        self.writes: dict[fx.Node, list[tuple[int, fx.Node]]] = {}
        self._base: dict[fx.Node, fx.Node] = {}
        self._trace_versions()
        self._classify()
        self.replaced: dict[fx.Node, fx.Node] = {}
        self.erased: set[fx.Node] = set()
        self._post_dominators: dict[tuple[int, int], dict[fx.Node, fx.Node | None]] = {}

    # ---- versions

    def _trace_versions(self) -> None:
        current: dict[fx.Node, fx.Node] = {}
        for index, node in enumerate(self.nodes):
            self.inputs[node] = list(dict.fromkeys(current.get(a, a) for a in node.all_input_nodes))
            first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
            if first is None:
                continue
            if is_inplace(node):
                written: fx.Node | None = first
                while written is not None:
                    current[written] = node
                    self.writes.setdefault(written, []).append((index, node))
                    written = self._base.get(written)
                self._base[node] = first
            elif self._is_alias(node):
                self._base[node] = first

    @staticmethod
    def _is_alias(node: fx.Node) -> bool:
        name = op_name(node)
        if name not in _ALIASES:
            return False
        if name != "getitem":
            return True
        source = node.all_input_nodes[0]
        if tensor(source) is None:  # an entry of a tuple
            return op_name(source) in _SPLITS
        # an index by tensors copies
        return not any(tensor(a) is not None for a in node.all_input_nodes[1:])

    def version_at(self, node: fx.Node, position: int) -> fx.Node:
        """The node that last wrote `node`'s tensor before `position`, or `node` itself."""
        version = node
        for index, writer in self.writes.get(node, ()):
            if index < position:
                version = writer
        return version

    @functools.cached_property
    def _autocast_changes(self) -> list[tuple[int, torch.dtype | None]]:
        """Positions at which autocast changes, and its dtype (None: off) from there on."""
        changes = [(0, _ambient_autocast())]
        opened: dict[fx.Node, torch.dtype | None] = {}
        for index, node in enumerate(self.nodes):
            name = op_name(node)
            if name == "_enter_autocast":
                opened[node] = changes[-1][1]
                _, dtype, enabled, *_ = (*node.args, None, True)
                changes.append((index, dtype if enabled else None))
            elif name == "_exit_autocast":
                changes.append((index, opened.get(node.all_input_nodes[0])))
        return changes

    def autocast_at(self, node: fx.Node) -> torch.dtype | None:
        """The dtype of autocast around a node; None where it is off."""
        position = self.position[node]
        return [dtype for index, dtype in self._autocast_changes if index <= position][-1]

    def storage(self, node: fx.Node) -> fx.Node:
        """The node that allocated the tensor of which `node` is a view or a version."""
        while node in self._base:
            node = self._base[node]
        return node

    # ---- data and constants

    def _is_source(self, node: fx.Node) -> bool:
        found = value(node)
        return node not in self.parameters and isinstance(found, torch.Tensor) and found.ndim > 0

    def _classify(self) -> None:
        constant: dict[fx.Node, bool] = {}
        for node in self.nodes:
            if node.op == "placeholder":
                constant[node] = not self._is_source(node)
            elif node.op == "output":
                constant[node] = False
            else:
                scalar = isinstance(
                    value(node), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)
                )
                constant[node] = scalar or all(constant[a] for a in self.inputs[node])
        self.constant = constant
        self.data_inputs = {
            n: [] if constant[n] else [a for a in self.inputs[n] if not constant[a]]
            for n in self.nodes
        }
        self.data_users: dict[fx.Node, list[fx.Node]] = {n: [] for n in self.nodes}
        self.users: dict[fx.Node, list[fx.Node]] = {n: [] for n in self.nodes}
        for node in self.nodes:
            for read in self.data_inputs[node]:
                self.data_users[read].append(node)
            for read in self.inputs[node]:
                self.users[read].append(node)

    # ---- dominators

    @functools.cached_property
    def dominators(self) -> dict[fx.Node, fx.Node | None]:
        """Immediate dominators over data edges; None stands for the virtual root."""
        flow: nx.DiGraph = nx.DiGraph()
        flow.add_node(_ROOT)
        for node in self.nodes:
            if self.constant[node]:
                continue
            reads = self.data_inputs[node]
            flow.add_edges_from(((a, node) for a in reads) if reads else ((_ROOT, node),))
        return _immediate(flow)

    def post_dominators(self, hidden: int, rows: int) -> dict[fx.Node, fx.Node | None]:
        """Immediate post-dominators, seen from the hidden states; None stands for the virtual end.

        Only nodes count from which a float tensor of `rows` x `hidden` can be reached: losses,
        recorded ids and token counters leave the block on paths that never meet the hidden states
        again.
        """
        key = (hidden, rows)
        if key not in self._post_dominators:
            live: set[fx.Node] = set()
            flow: nx.DiGraph = nx.DiGraph()
            flow.add_node(_ROOT)
            for node in reversed(self.nodes):
                if self.constant[node] or node is self.output:
                    continue
                users = [u for u in self.data_users[node] if u in live]
                if not users and not is_hidden(node, hidden, rows):
                    continue
                live.add(node)
                flow.add_edges_from(((u, node) for u in users) if users else ((_ROOT, node),))
            self._post_dominators[key] = _immediate(flow)
        return self._post_dominators[key]

    # ---- reachability, bounded by positions so that a deep model costs one layer at a time

    def ancestors(
        self, roots: Iterable[fx.Node], *, stop: Iterable[fx.Node] = (), first: int = 0
    ) -> set[fx.Node]:
        """Data ancestors of `roots` (included), up to `stop` and to position `first`."""
        return self._reach(roots, self.data_inputs, stop, lambda n: self.position[n] >= first)

    def descendants(
        self, roots: Iterable[fx.Node], *, stop: Iterable[fx.Node] = (), last: int | None = None
    ) -> set[fx.Node]:
        """Data descendants of `roots` (included), up to `stop` and to position `last`."""
        limit = len(self.nodes) if last is None else last
        return self._reach(roots, self.data_users, stop, lambda n: self.position[n] <= limit)

    @staticmethod
    def _reach(
        roots: Iterable[fx.Node],
        edges: dict[fx.Node, list[fx.Node]],
        stop: Iterable[fx.Node],
        inside: Callable[[fx.Node], bool],
    ) -> set[fx.Node]:
        blocked = set(stop)
        seen = set(roots)
        stack = [n for n in seen if n not in blocked]
        while stack:
            for other in edges[stack.pop()]:
                if other not in seen and inside(other):
                    seen.add(other)
                    if other not in blocked:
                        stack.append(other)
        return seen

    def weight_leaf(self, node: fx.Node, *, parts: bool = False) -> tuple[fx.Node, bool] | None:
        """Follow a contraction operand back to the weight it shows.

        Goes through views, casts, indexing by routing ids and selection of one expert; with `parts`
        not through what cuts or reshapes a parameter.

        Returns:
            The weight (a parameter, or a constant computed from parameters) and whether it was
            gathered by a data-dependent index; None when the operand is an activation.
        """
        gathered = False
        while node not in self.parameters and not self.is_part(node, parts):
            if node.op not in ("call_function", "call_method") or not node.all_input_nodes:
                return None
            name = op_name(node)
            if self.constant[node] and name not in VIEWS | CASTS | {"getitem", "unbind"}:
                computed = is_float(node) and self.uses_parameters(node)
                return (node, gathered) if computed else None
            if not self.constant[node] and name in _LOOKUPS:
                if all(self.constant[a] for a in node.all_input_nodes[1:]):
                    return None
                gathered = True
            elif not self.constant[node] and name not in VIEWS | CASTS:
                return None
            first = node.all_input_nodes[0]
            if tensor(first) is None and name != "getitem":
                return None
            node = first
        return node, gathered

    def is_part(self, node: fx.Node, parts: bool) -> bool:
        """Whether a constant is a weight of its own though a parameter holds its elements.

        Entries of a split, values cast from a storage format and what is detached always are; with
        `parts` whatever cuts, reorders or reshapes a parameter is.
        """
        if not self.constant[node] or not is_float(node) or not self.uses_parameters(node):
            return False
        name = op_name(node)
        if name == "getitem" and tensor(node.all_input_nodes[0]) is None:
            return op_name(node.all_input_nodes[0]) in _SPLITS - {"unbind"}
        source = tensor(node.all_input_nodes[0]) if node.all_input_nodes else None
        if name in CASTS and source is not None and source.dtype not in _COMPUTED:
            return True
        if name == "detach" and source is not None and source.requires_grad:
            return True
        return parts and (name in _RESHAPES or (name == "getitem" and not _picks_one(node)))

    @functools.cached_property
    def has_parts(self) -> bool:
        """Whether a parameter is cut or reshaped anywhere in the graph."""
        return any(self.is_part(node, True) for node in self.nodes)

    @functools.cached_property
    def _parameter_users(self) -> set[fx.Node]:
        reached: set[fx.Node] = set(self.parameters)
        for node in self.nodes:
            if self.constant[node] and any(a in reached for a in self.inputs[node]):
                reached.add(node)
        return reached

    def uses_parameters(self, node: fx.Node) -> bool:
        """Whether a constant node is computed from at least one parameter."""
        return node in self._parameter_users


def chain(immediate: dict[fx.Node, fx.Node | None], node: fx.Node) -> Iterator[fx.Node]:
    """The (post-)dominators of a node, nearest first."""
    found = immediate.get(node)
    while found is not None:
        yield found
        found = immediate.get(found)


def _immediate(flow: nx.DiGraph) -> dict[fx.Node, fx.Node | None]:
    immediate = nx.immediate_dominators(flow, _ROOT)
    return {n: None if d is _ROOT else d for n, d in immediate.items() if n is not _ROOT}


def id_bound(flow: DataFlow, ids: fx.Node) -> int | None:
    """Exclusive upper bound of ids that a selection over a last axis made; None when unknown."""
    name = op_name(ids)
    reads = flow.data_inputs[ids]
    if name in ("cat", "concat", "stack", "concatenate"):
        bounds = [id_bound(flow, a) for a in reads]
        known = [b for b in bounds if b is not None]
        return max(known) if known and len(known) == len(bounds) else None
    if name in ("topk", "max", "argmax", "sort", "argsort", "min", "argmin"):
        return last_size(reads[0]) if reads else None
    source = _shown(flow, ids)
    return None if source is None else id_bound(flow, source)


def are_distinct(flow: DataFlow, ids: fx.Node) -> bool:
    """Whether a selection over a last axis made these ids, so that no row holds one twice."""
    if op_name(ids) in ("topk", "sort", "argsort"):
        return True
    source = _shown(flow, ids)
    return source is not None and are_distinct(flow, source)


def _shown(flow: DataFlow, ids: fx.Node) -> fx.Node | None:
    """What a view, a cast or an entry of a tuple shows; None for a lookup in a table, and the rest."""
    reads = flow.data_inputs[ids]
    shows = op_name(ids) in VIEWS | CASTS | {"getitem", "long", "int"}
    if not shows or len(reads) != 1 or flow.inputs[ids][0] is not reads[0]:
        return None
    return reads[0]
