"""The tensor-parallel graph of one rank, from the graph of a single device.

```
q, k, v linears in front of an attention    cut by heads (column-wise)
everything between                          the cut is followed by shard_rules
the linear that ends the cut                cut along its input (row-wise), then an all-reduce
moeflex::moe_layer                          narrow experts of width I/R, then an all-reduce
all else                                    whole on every rank: embeddings, norms, router, head
```

Weights are slices of one full tensor, so EP reads the same bytes. KV heads fewer than ranks are held
by several ranks. A graph that cannot be cut raises `ShardError` with the reason and is not used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from moe_compiler.expert_blocks import Layout
from moe_compiler.passes.expert_layers import ExpertLayer, narrow_experts
from moe_compiler.passes.nodes import op_name, static_size, tensor
from moe_compiler.passes.rank_graph import Propagation, copied, set_value
from moe_compiler.passes.shard_rules import Cut, ShardError, local_shape, result_cut

__all__ = ["ExpertLayer", "ShardError", "TensorParallelGraph", "WeightSlice", "shard_graph"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightSlice:
    """The part of a full weight that a rank's graph reads.

    Attributes:
        placeholder: name of the graph's input.
        axis: the axis that is cut.
        start, length: the rank's range along it.
    """

    placeholder: str
    axis: int
    start: int
    length: int


@dataclasses.dataclass(frozen=True)
class TensorParallelGraph:
    """What `shard_graph` made.

    Attributes:
        gm: the rank's graph; its inputs are those of the source, without full expert tensors, then the narrow ones.
        slices: what differs from the full weights.
        layers: the MoE layers, in graph order.
    """

    gm: fx.GraphModule
    slices: tuple[WeightSlice, ...]
    layers: tuple[ExpertLayer, ...]


AllReduce = Callable[[fx.Graph, fx.Node], fx.Node]


def shard_graph(
    gm: fx.GraphModule,
    *,
    num_ranks: int,
    rank: int,
    all_reduce: AllReduce,
    parameters: set[str],
) -> TensorParallelGraph:
    """Write the graph that `rank` runs under tensor parallelism.

    Args:
        gm: a torch-level graph with fake values, its MoE blocks replaced by `moeflex::moe_layer`; not changed.
        num_ranks: R.
        rank: the rank whose slices are meant; the graphs of all ranks are otherwise equal.
        all_reduce: writes a sum over ranks behind a node of the graph and returns the summed node.
        parameters: names of the placeholders that are weights or buffers.

    Raises:
        ShardError: this graph cannot be cut over so many ranks.
    """
    return _Sharding(copied(gm), num_ranks, rank, all_reduce, parameters).run()


class _Sharding:
    def __init__(
        self,
        gm: fx.GraphModule,
        num_ranks: int,
        rank: int,
        all_reduce: AllReduce,
        parameters: set[str],
    ) -> None:
        self.gm = gm
        self.num_ranks = num_ranks
        self.rank = rank
        self.all_reduce = all_reduce
        self.parameters = parameters
        self.cuts: dict[fx.Node, Cut] = {}
        self.slices: dict[fx.Node, WeightSlice] = {}
        self.layers: list[ExpertLayer] = []

    def run(self) -> TensorParallelGraph:
        columns = self._column_linears()
        for node in list(self.gm.graph.nodes):
            if node.op == "output":
                self._check_whole(node)
            elif op_name(node) == "moe_layer":
                self._check_whole(node)
                self._narrow_experts(node)
            elif node in columns:
                self._check_whole(node)
                self._cut_columns(node, columns[node])
            elif any(a in self.cuts for a in node.all_input_nodes):
                self._follow(node)
        self.gm.graph.lint()
        self.gm.recompile()
        Propagation(self.gm, self.cuts).check()
        return TensorParallelGraph(
            gm=self.gm, slices=tuple(self.slices.values()), layers=tuple(self.layers)
        )

    def _check_whole(self, node: fx.Node) -> None:
        for operand in node.all_input_nodes:
            if operand in self.cuts:
                raise ShardError(
                    f"'{operand.name}' is still cut over ranks where '{node.name}' needs it whole"
                )

    # ---- column-wise: heads ---------------------------------------------------------------------

    def _column_linears(self) -> dict[fx.Node, int]:
        """The linears in front of every attention, with the pieces that each is cut into."""
        found: dict[fx.Node, int] = {}
        for node in self.gm.graph.nodes:
            if op_name(node) != "scaled_dot_product_attention":
                continue
            roles = []
            for operand in node.all_input_nodes[:3]:
                linears = list(_linears_before(operand))
                if len(linears) != 1:
                    raise ShardError(
                        f"{len(linears)} linears lead into '{operand.name}' of an attention; one is needed for "
                        "each of query, key and value (fused projections and caches as inputs are not cut)"
                    )
                roles.append(linears[0])
            if len(set(roles)) != 3:
                raise ShardError(
                    "query, key and value come from one fused linear, which is not cut"
                )
            for linear in roles:
                found[linear] = self._num_pieces(linear)
        return found

    def _num_pieces(self, linear: fx.Node) -> int:
        """R, or the number of heads where it is smaller; never a part of a head."""
        heads = _num_heads(linear)
        if heads % self.num_ranks == 0:
            return self.num_ranks
        if self.num_ranks % heads == 0:
            return heads
        raise ShardError(
            f"{heads} heads of '{linear.name}' cannot be cut over {self.num_ranks} ranks, nor held whole by equal "
            "groups of ranks"
        )

    def _cut_columns(self, linear: fx.Node, parts: int) -> None:
        value = tensor(linear)
        assert value is not None
        self._slice(_argument(linear, 1, "weight"), 0, parts)
        bias = _argument(linear, 2, "bias")
        if bias is not None:
            self._slice(bias, 0, parts)
        self.cuts[linear] = Cut(value.ndim - 1, parts)

    # ---- between, and row-wise --------------------------------------------------------------------

    def _follow(self, node: fx.Node) -> None:
        if op_name(node) == "linear":
            self._cut_rows(node)
            return
        if op_name(node) == "scaled_dot_product_attention":
            self._equalise_heads(node)
        cut = result_cut(node, self.cuts)
        self._localise(node, cut)
        self.cuts[node] = cut

    def _cut_rows(self, linear: fx.Node) -> None:
        source = linear.all_input_nodes[0]
        cut, value = self.cuts.get(source), tensor(source)
        assert value is not None
        if cut is None or cut.axis != value.ndim - 1:
            raise ShardError(
                f"'{linear.name}' multiplies a tensor that is cut along another axis than its last"
            )
        if cut.parts != self.num_ranks:
            raise ShardError(f"'{linear.name}' would add up pieces that several ranks hold")
        self._slice(_argument(linear, 1, "weight"), 1, cut.parts)
        bias = _argument(linear, 2, "bias")
        users = list(linear.users)
        if bias is not None:
            linear.args, linear.kwargs = (*linear.args[:2], None), {}
        total = self._sum(linear)
        if bias is not None:
            # Added once, behind the sum.
            with self.gm.graph.inserting_after(total):
                plus = self.gm.graph.call_function(torch.add, (total, bias))
            plus.meta = dict(linear.meta)
            total = plus
        for user in users:
            user.replace_input_with(linear, total)

    def _sum(self, node: fx.Node) -> fx.Node:
        with self.gm.graph.inserting_after(node):
            total = self.all_reduce(self.gm.graph, node)
        total.meta = {**node.meta, **total.meta}
        return total

    def _equalise_heads(self, node: fx.Node) -> None:
        """Repeated KV heads that several ranks hold: as many copies as this rank has query heads."""
        query, *others = node.all_input_nodes[:3]
        cut = self.cuts.get(query)
        for other in others:
            mine = self.cuts.get(other)
            if cut is None or mine is None or mine.parts == cut.parts:
                continue
            heads = static_size(_size(query, cut.axis))
            repeated = static_size(_size(other, mine.axis))
            if node.kwargs.get("enable_gqa") or heads is None or repeated != heads:
                continue
            with self.gm.graph.inserting_before(node):
                same = self.gm.graph.call_method(
                    "narrow", (other, mine.axis, 0, heads // cut.parts)
                )
            whole = list(_value(other).shape)
            same.meta = {**other.meta, "example_value": _value(other).new_empty(whole)}
            node.replace_input_with(other, same)
            self.cuts[same] = cut

    def _localise(self, node: fx.Node, cut: Cut) -> None:
        """Sizes that are written into a view become those of the piece."""
        if op_name(node) not in ("view", "reshape", "expand", "unflatten", "_unsafe_view"):
            return
        value = tensor(node)
        assert value is not None
        if op_name(node) == "unflatten":
            first = int(node.args[1]) % _rank_of(node.all_input_nodes[0])  # type: ignore[arg-type]
            sizes = list(node.args[2])  # type: ignore[arg-type]
            self._set_size(sizes, cut.axis - first, cut, value)
            node.args = (*node.args[:2], tuple(sizes))
            return
        packed = len(node.args) == 2 and isinstance(node.args[1], (tuple, list))
        sizes = list(node.args[1] if packed else node.args[1:])  # type: ignore[arg-type]
        self._set_size(sizes, cut.axis, cut, value)
        node.args = (node.args[0], tuple(sizes)) if packed else (node.args[0], *sizes)

    def _set_size(self, sizes: list[Any], index: int, cut: Cut, value: torch.Tensor) -> None:
        if not 0 <= index < len(sizes):
            return
        if isinstance(sizes[index], int):
            if sizes[index] != -1:
                sizes[index] = local_shape(value.shape, cut)[cut.axis]
        else:
            raise ShardError("a size that is known only at run time is cut over ranks")

    def _slice(self, weight: fx.Node | None, axis: int, parts: int) -> None:
        if weight is None or weight.op != "placeholder" or weight.name not in self.parameters:
            raise ShardError("a linear that is cut has a weight that is computed in the graph")
        if len(weight.users) != 1 or weight in self.slices:
            raise ShardError(f"the weight '{weight.name}' is used in several places")
        value = tensor(weight)
        assert value is not None
        size = static_size(value.shape[axis])
        if size is None or size % parts:
            raise ShardError(
                f"axis {axis} of '{weight.name}' has size {size}; {parts} pieces are needed"
            )
        length = size // parts
        start = (self.rank * parts // self.num_ranks) * length
        self.slices[weight] = WeightSlice(
            placeholder=weight.name, axis=axis, start=start, length=length
        )
        set_value(weight, value.narrow(axis, start, length))

    # ---- experts --------------------------------------------------------------------------------

    def _narrow_experts(self, node: fx.Node) -> None:
        layer = narrow_experts(self.gm.graph, node, Layout.TP, self.num_ranks, len(self.layers))
        self.layers.append(layer)
        users = list(node.users)
        total = self._sum(node)
        for user in users:
            user.replace_input_with(node, total)


def _linears_before(node: fx.Node) -> Iterator[fx.Node]:
    """The nearest linears that a node is computed from."""
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if op_name(node) == "linear":
            yield node
        else:
            waiting += node.all_input_nodes


def _num_heads(linear: fx.Node) -> int:
    """Into how many heads the first reshape behind a linear splits its result."""
    waiting = list(linear.users)
    value = tensor(linear)
    assert value is not None
    while waiting:
        node = waiting.pop(0)
        found = tensor(node)
        if found is None or op_name(node) not in ("view", "reshape", "unflatten"):
            continue
        if found.ndim == value.ndim + 1:
            heads = static_size(found.shape[-2])
            if heads is not None:
                return heads
    raise ShardError(f"the result of '{linear.name}' is not split into heads by the next operator")


def _argument(node: fx.Node, index: int, name: str) -> fx.Node | None:
    found = node.args[index] if len(node.args) > index else node.kwargs.get(name)
    return found if isinstance(found, fx.Node) else None


def _value(node: fx.Node) -> torch.Tensor:
    found = tensor(node)
    if found is None:
        raise ShardError(f"'{node.name}' is no tensor")
    return found


def _size(node: fx.Node, axis: int) -> Any:
    return _value(node).shape[axis]


def _rank_of(node: fx.Node) -> int:
    return _value(node).ndim


def sliced(
    weights: Mapping[str, torch.Tensor], graph: TensorParallelGraph
) -> dict[str, torch.Tensor]:
    """Views on full weights, by placeholder, as the rank's graph takes them."""
    found = dict(weights)
    for piece in graph.slices:
        found[piece.placeholder] = found[piece.placeholder].narrow(
            piece.axis, piece.start, piece.length
        )
    return found
