"""The tensor-parallel graph of one rank, from the graph of a single device.

```
q, k, v linears in front of an attention    cut by heads (column-wise)
linears in front of an MLP's activation     cut by columns
everything between                          the cut is followed by shard_rules
the linear that ends the cut                cut along its input (row-wise): every rank holds a partial sum
moeflex::moe_layer                          narrow experts of width I/R: a partial sum
partial sums                                added up as far as they go, then one all-reduce
the head                                    cut by columns, its pieces gathered
all else                                    whole on every rank: embeddings, norms, router
```

Weights are slices of one full tensor, so EP reads the same bytes. KV heads fewer than ranks are held
by several ranks. A graph that cannot be cut raises `ShardError` with the reason and is not used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from moe_compiler.expert_blocks import Layout
from moe_compiler.passes.column_linears import ATTENTION, find_column_linears, fused_linears
from moe_compiler.passes.expert_layers import ExpertLayer, narrow_experts
from moe_compiler.passes.nodes import CASTS, op_name, static_size, tensor
from moe_compiler.passes.rank_graph import Propagation, copied, set_value
from moe_compiler.passes.shard_rules import Cut, ShardError, local_shape, result_cut
from moe_compiler.passes.written_parts import join_written_parts

__all__ = [
    "ExpertLayer",
    "RankSums",
    "ShardError",
    "TensorParallelGraph",
    "WeightSlice",
    "shard_graph",
]

_KEEPS_PARTIAL = CASTS | {
    "view",
    "reshape",
    "unsqueeze",
    "squeeze",
    "transpose",
    "contiguous",
    "flatten",
    "unflatten",
    "view_as",
}
_SCALES_PARTIAL = frozenset(("mul", "truediv", "div", "imul", "mul_"))
_ADDS_PARTIAL = frozenset(("add", "iadd", "add_", "sub", "isub"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightSlice:
    """The part of a full weight that a rank's graph reads.

    Attributes:
        placeholder: name of the rank graph's input.
        source: name of the source graph's input, the full weight.
        axis: the axis that is cut.
        start, length: the rank's range along it.
    """

    placeholder: str
    source: str
    axis: int
    start: int
    length: int


@dataclasses.dataclass(frozen=True)
class TensorParallelGraph:
    """What `shard_graph` made.

    Attributes:
        gm: the rank's graph; its inputs are those of the source, without full expert tensors, then the narrow ones.
        slices: inputs that are parts of full weights.
        layers: the MoE layers, in graph order.
        whole: why an MLP or the head is not cut, where one is not.
    """

    gm: fx.GraphModule
    slices: tuple[WeightSlice, ...]
    layers: tuple[ExpertLayer, ...]
    whole: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class RankSums:
    """How a graph's nodes are combined over ranks; each writes behind the given node and returns the result.

    Attributes:
        all_reduce: the sum of all ranks' tensors.
        all_gather: all ranks' tensors, one behind the other along axis 0 in rank order.
    """

    all_reduce: Callable[[fx.Graph, fx.Node], fx.Node]
    all_gather: Callable[[fx.Graph, fx.Node], fx.Node]


def shard_graph(
    gm: fx.GraphModule,
    *,
    num_ranks: int,
    rank: int,
    sums: RankSums,
    parameters: set[str],
) -> TensorParallelGraph:
    """Write the graph that `rank` runs under tensor parallelism.

    Args:
        gm: a torch-level graph with fake values, its MoE blocks replaced by `moeflex::moe_layer`; not changed.
        num_ranks: R.
        rank: the rank whose slices are meant; the graphs of all ranks are otherwise equal.
        sums: how nodes are combined over ranks.
        parameters: names of the placeholders that are weights or buffers.

    Raises:
        ShardError: this graph cannot be cut over so many ranks.
    """
    return _Sharding(copied(gm), num_ranks, rank, sums, parameters).run()


class _Sharding:
    def __init__(
        self,
        gm: fx.GraphModule,
        num_ranks: int,
        rank: int,
        sums: RankSums,
        parameters: set[str],
    ) -> None:
        self.gm = gm
        self.num_ranks = num_ranks
        self.rank = rank
        self.sums = sums
        self.parameters = parameters
        self.cuts: dict[fx.Node, Cut] = {}
        self.slices: dict[fx.Node, WeightSlice] = {}
        self.partial: set[fx.Node] = set()
        self.layers: list[ExpertLayer] = []

    def run(self) -> TensorParallelGraph:
        join_written_parts(self.gm.graph)
        self._unfuse()
        columns = find_column_linears(self.gm.graph, self.num_ranks)
        for node in list(self.gm.graph.nodes):
            if self._keeps_partial(node):
                self.partial.add(node)
                continue
            self._finish_sums(node)
            if node.op == "output":
                self._check_whole(node)
            elif op_name(node) == "moe_layer":
                self._check_whole(node)
                self._narrow_experts(node)
            elif any(a in self.cuts for a in node.all_input_nodes):
                self._follow(node)
            elif node in columns.parts:
                self._cut_columns(node, columns.parts[node])
            elif node in columns.heads:
                self._cut_head(node)
        self.gm.graph.lint()
        self.gm.recompile()
        Propagation(self.gm, self.cuts).check()
        return TensorParallelGraph(
            gm=self.gm,
            slices=tuple(self.slices.values()),
            layers=tuple(self.layers),
            whole=columns.whole,
        )

    def _check_whole(self, node: fx.Node) -> None:
        for operand in node.all_input_nodes:
            if operand in self.cuts:
                raise ShardError(
                    f"'{operand.name}' is still cut over ranks where '{node.name}' needs it whole"
                )

    # ---- partial sums -----------------------------------------------------------------------------

    def _keeps_partial(self, node: fx.Node) -> bool:
        """Whether a node of partial sums is a partial sum itself.

        One that several nodes read is finished first, so that nothing is summed twice.
        """
        operands = [a for a in node.all_input_nodes if a in self.partial]
        if not operands or any(a in self.cuts for a in node.all_input_nodes):
            return False
        if any(len(a.users) > 1 for a in operands) or node.kwargs or not node.args:
            return False
        name, first = op_name(node), node.args[0]
        if name in _ADDS_PARTIAL:
            return all(a in self.partial for a in node.args)
        if name in _SCALES_PARTIAL:
            return len(operands) == 1 and (first in operands or name == "mul")
        return name in _KEEPS_PARTIAL and first in operands

    def _finish_sums(self, node: fx.Node) -> None:
        """All-reduce what a node needs summed."""
        for operand in node.all_input_nodes:
            if operand in self.partial:
                self.partial.discard(operand)
                users = list(operand.users)
                with self.gm.graph.inserting_after(operand):
                    total = self.sums.all_reduce(self.gm.graph, operand)
                total.meta = {**operand.meta, **total.meta}
                for user in users:
                    user.replace_input_with(operand, total)

    # ---- column-wise --------------------------------------------------------------------------------

    def _unfuse(self) -> None:
        """One linear a part in the place of every fused linear that is to be cut."""
        graph = self.gm.graph
        for linear, parts in list(fused_linears(graph)):
            weight, bias = _argument(linear, 1, "weight"), _argument(linear, 2, "bias")
            if not self._is_weight(weight) or not (bias is None or self._is_weight(bias)):
                continue
            assert weight is not None
            splits = list(linear.users)
            for part in parts:
                span = (part.start, part.length)
                inputs = [self._input_for(weight, 0, *span, new=True)]
                if bias is not None:
                    inputs.append(self._input_for(bias, 0, *span, new=True))
                with graph.inserting_before(linear):
                    own = graph.call_function(linear.target, (linear.args[0], *inputs))  # type: ignore[arg-type]
                own.meta = dict(part.results[0].meta)
                for result in part.results:
                    result.replace_all_uses_with(own)
                    graph.erase_node(result)
            for split in splits:
                graph.erase_node(split)
            graph.erase_node(linear)
            for full in (weight, bias):
                if full is not None and not full.users:
                    graph.erase_node(full)

    def _cut_columns(self, linear: fx.Node, parts: int) -> None:
        value = tensor(linear)
        assert value is not None
        self._slice(linear, _argument(linear, 1, "weight"), 0, parts)
        bias = _argument(linear, 2, "bias")
        if bias is not None:
            self._slice(linear, bias, 0, parts)
        self.cuts[linear] = Cut(value.ndim - 1, parts)

    def _cut_head(self, linear: fx.Node) -> None:
        """Columns of the head a rank; the pieces of all are joined at once."""
        value = tensor(linear)
        assert value is not None
        users, ndim = list(linear.users), value.ndim
        self._cut_columns(linear, self.num_ranks)
        graph = self.gm.graph
        with graph.inserting_after(linear):
            gathered = self.sums.all_gather(graph, linear)
        with graph.inserting_after(gathered):
            apart = graph.call_method("unflatten", (gathered, 0, (self.num_ranks, -1)))
        with graph.inserting_after(apart):
            last = graph.call_function(torch.movedim, (apart, 0, ndim - 1))
        with graph.inserting_after(last):
            joined = graph.call_method("flatten", (last, ndim - 1))
        joined.meta = dict(linear.meta)
        for user in users:
            user.replace_input_with(linear, joined)

    # ---- between, and row-wise --------------------------------------------------------------------

    def _follow(self, node: fx.Node) -> None:
        if op_name(node) == "linear":
            self._cut_rows(node)
            return
        if op_name(node) == ATTENTION:
            self._equalise_heads(node)
        self._cut_repeated(node)
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
        self._slice(linear, _argument(linear, 1, "weight"), 1, cut.parts)
        bias = _argument(linear, 2, "bias")
        if bias is None:
            self.partial.add(linear)
            return
        # Added once, behind the sum.
        linear.args, linear.kwargs = (*linear.args[:2], None), {}
        users = list(linear.users)
        with self.gm.graph.inserting_after(linear):
            total = self.sums.all_reduce(self.gm.graph, linear)
        total.meta = {**linear.meta, **total.meta}
        with self.gm.graph.inserting_after(total):
            plus = self.gm.graph.call_function(torch.add, (total, bias))
        plus.meta = dict(linear.meta)
        for user in users:
            user.replace_input_with(linear, plus)

    def _cut_repeated(self, node: fx.Node) -> None:
        """One head that is expanded to all heads beside cut ones: expanded to this rank's heads instead.

        So the rotary part of latent attention, which all heads share, meets each rank's own part.
        """
        found = {self.cuts[a] for a in node.all_input_nodes if a in self.cuts}
        if len(found) != 1 or op_name(node) not in ("cat", "add", "mul"):
            return
        (cut,) = found
        for operand in node.all_input_nodes:
            if operand in self.cuts or op_name(operand) != "expand" or len(operand.users) != 1:
                continue
            source, value = operand.all_input_nodes[0], tensor(operand)
            if (
                value is None
                or value.ndim != _value(node).ndim
                or _value(source).ndim != value.ndim
            ):
                continue
            if static_size(_size(source, cut.axis)) == 1:
                self._localise(operand, cut)
                self.cuts[operand] = cut

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

    def _slice(self, linear: fx.Node, weight: fx.Node | None, axis: int, parts: int) -> None:
        """Let a linear read this rank's piece of one of its weights."""
        if not self._is_weight(weight):
            raise ShardError("a linear that is cut has a weight that is computed in the graph")
        assert weight is not None
        size = static_size(_size(weight, axis))
        if size is None or size % parts:
            raise ShardError(
                f"axis {axis} of '{weight.name}' has size {size}; {parts} pieces are needed"
            )
        length = size // parts
        start = (self.rank * parts // self.num_ranks) * length
        piece = self._input_for(weight, axis, start, length)
        if piece is not weight:
            linear.replace_input_with(weight, piece)

    def _is_weight(self, node: fx.Node | None) -> bool:
        return node is not None and (node in self.slices or node.name in self.parameters)

    def _input_for(
        self, weight: fx.Node, axis: int, start: int, length: int, *, new: bool = False
    ) -> fx.Node:
        """The input that holds a range of a weight: the weight's own, or a new one where the rest is read, too."""
        value, earlier = _value(weight), self.slices.get(weight)
        if earlier is not None and earlier.axis != axis:
            raise ShardError(f"the weight '{earlier.source}' would be cut along two axes")
        source = weight.name if earlier is None else earlier.source
        begin = start if earlier is None else earlier.start + start
        target = weight
        if new or len(weight.users) > 1:
            inputs = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
            with self.gm.graph.inserting_after(inputs[-1]):
                target = self.gm.graph.placeholder(f"moeflex_slice{len(self.slices)}_{source}")
        self.slices[target] = WeightSlice(
            placeholder=target.name, source=source, axis=axis, start=begin, length=length
        )
        set_value(target, value.narrow(axis, start, length))
        return target

    # ---- experts --------------------------------------------------------------------------------

    def _narrow_experts(self, node: fx.Node) -> None:
        layer = narrow_experts(self.gm.graph, node, Layout.TP, self.num_ranks, len(self.layers))
        self.layers.append(layer)
        self.partial.add(node)


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
    return dict(weights) | {
        piece.placeholder: weights[piece.source].narrow(piece.axis, piece.start, piece.length)
        for piece in graph.slices
    }
