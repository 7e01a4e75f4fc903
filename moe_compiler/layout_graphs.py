"""From one graph of a single device to what a rank runs: a graph a layout, over one arena.

Every rank compiles the same source graph. The first graph of a model plans the arena, moves the weights
into it and measures the link; later ones (of other shapes) find them there.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed import distributed_c10d

from moe_compiler.arena import WeightUse, plan_arena
from moe_compiler.errors import LayoutError, OptionError, UnsupportedError
from moe_compiler.expert_blocks import Layout
from moe_compiler.layouts import LayoutModel, model_of_parameter
from moe_compiler.options import Options
from moe_compiler.passes.expert_layers import ExpertLayer, expert_parallel_graph
from moe_compiler.passes.nodes import find_parameters, value
from moe_compiler.passes.shard_rules import ShardError
from moe_compiler.passes.tensor_parallel import RankSums, WeightSlice, shard_graph
from moe_compiler.placement import Builds, Placement
from moe_compiler.runtime import gathered_layer  # noqa: F401  defines the op
from moe_compiler.runtime.arena_views import Arena
from moe_compiler.runtime.reading import Reading
from moe_compiler.runtime.stand_in import forget_source, pending_source
from moe_compiler.runtime.switch import LayoutStore
from moe_compiler.runtime.transfer import allocate, measure_link

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _RankGraph:
    gm: fx.GraphModule
    layers: tuple[ExpertLayer, ...]
    slices: tuple[WeightSlice, ...] = ()


@dataclasses.dataclass(frozen=True)
class _RankGraphs:
    """The graphs of the layouts that can be had, the initial one first, and why the others cannot."""

    by_layout: Mapping[Layout, _RankGraph]
    absent: Mapping[Layout, str]


def compile_layouts(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    placements: Sequence[Placement],
    compile_one: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]],
    notes: list[str],
) -> Callable[..., Any]:
    """Compile one graph for every layout; the result runs the active one.

    Args:
        gm: the graph with its MoE blocks replaced.
        example_inputs: its inputs.
        options: `group`, `layouts` and `initial` count here.
        placements: of the MoE blocks.
        compile_one: compiles a rank's graph.
        notes: what the user should know is added.

    Raises:
        OptionError: there is no such group.
        LayoutError: the initial layout cannot be had.
        UnsupportedError: gradients, or a device other than the CPU.
    """
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "layouts over ranks are for inference; call the model under torch.no_grad()"
        )
    group = _group(options.group)
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    real = _real_parameters(gm, example_inputs)
    graphs = _rank_graphs(gm, options, group, rank, num_ranks, set(real), notes)
    model = _model_of(graphs, real, rank, num_ranks, group)
    _build(graphs.by_layout, placements)
    runs = {
        layout: _bind(graph, model, real, names, layout, compile_one)
        for layout, graph in graphs.by_layout.items()
    }

    def run(*args: Any) -> Any:
        model.check_untouched()
        return runs[model.store.layout](args)

    return run


def _group(name: str) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise OptionError(
            f"option 'group' is {name!r}, and torch.distributed is not initialised; start under torchrun and "
            "call torch.distributed.init_process_group first"
        )
    if name == "world":
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    c10d: Any = distributed_c10d
    try:
        found: dist.ProcessGroup = c10d._resolve_process_group(name)
        return found
    except (RuntimeError, ValueError, KeyError) as error:
        raise OptionError(
            f"option 'group' takes 'world' or the name of a group; got {name!r}"
        ) from error


def _real_parameters(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[str, nn.Parameter]:
    found = {}
    for node in find_parameters(gm, example_inputs):
        argument = node.meta.get("grapharg")
        example = None if argument is None else argument.example
        if isinstance(example, nn.Parameter):
            if example.device.type != "cpu":
                raise UnsupportedError(
                    f"layouts over ranks run on the CPU in this version; '{node.name}' is on {example.device}"
                )
            found[node.name] = example
    return found


def _rank_graphs(
    gm: fx.GraphModule,
    options: Options,
    group: dist.ProcessGroup,
    rank: int,
    num_ranks: int,
    parameters: set[str],
    notes: list[str],
) -> _RankGraphs:
    """The graph of every layout that can be had; without TP, experts are not cut."""
    found: dict[Layout, _RankGraph] = {}
    absent = {
        layout: f"layouts={options.layouts} was asked for at compilation"
        for layout in Layout
        if layout.value not in options.layouts
    }
    for layout in (Layout.TP, Layout.EP):
        if layout in absent:
            continue
        try:
            if layout is Layout.TP:
                tp = shard_graph(
                    gm,
                    num_ranks=num_ranks,
                    rank=rank,
                    sums=rank_sums(group.group_name, num_ranks),
                    parameters=parameters,
                )
                found[layout] = _RankGraph(tp.gm, tp.layers, tp.slices)
                notes += tp.whole
            else:
                ep = expert_parallel_graph(
                    gm, num_ranks=num_ranks, group=group.group_name, whole=Layout.TP not in found
                )
                found[layout] = _RankGraph(ep.gm, ep.layers)
        except ShardError as error:
            if options.strict or layout.value == options.first_layout:
                raise LayoutError(f"layout {layout.value!r} cannot be had: {error}") from error
            absent[layout] = str(error)
            notes.append(f"no layout {layout.value!r}: {error}")
            log.warning("no layout %r: %s", layout.value, error)
    first = sorted(found, key=lambda layout: layout.value != options.first_layout)
    return _RankGraphs({layout: found[layout] for layout in first}, absent)


def rank_sums(group_name: str, num_ranks: int) -> RankSums:
    """Collectives of the group `group_name` of `num_ranks` ranks, as nodes that Inductor knows."""
    ops = torch.ops._c10d_functional

    def all_reduce(graph: fx.Graph, node: fx.Node) -> fx.Node:
        begun = graph.call_function(ops.all_reduce.default, (node, "sum", group_name))
        begun.meta = dict(node.meta)
        return wait(graph, begun)

    def all_gather(graph: fx.Graph, node: fx.Node) -> fx.Node:
        # The operator copies bytes in the order in which they lie.
        dense = graph.call_method("contiguous", (node,))
        with graph.inserting_after(dense):
            begun = graph.call_function(
                ops.all_gather_into_tensor.default, (dense, num_ranks, group_name)
            )
        return wait(graph, begun)

    def wait(graph: fx.Graph, begun: fx.Node) -> fx.Node:
        with graph.inserting_after(begun):
            return graph.call_function(ops.wait_tensor.default, (begun,))

    return RankSums(all_reduce, all_gather)


def _model_of(
    graphs: _RankGraphs,
    real: Mapping[str, nn.Parameter],
    rank: int,
    num_ranks: int,
    group: dist.ProcessGroup,
) -> LayoutModel:
    """The model's weights: of an earlier graph, or moved into a new arena."""
    by_layout = graphs.by_layout
    layers = next(iter(by_layout.values())).layers
    if not layers:
        raise LayoutError(
            "no MoE block of this graph runs as an op; there is nothing to lay out over ranks. (A rank "
            "without requests has to pass a padding token: a graph for no tokens cannot be proven.)"
        )
    for layer in layers:
        earlier = model_of_parameter(real.get(layer.sources[0]))
        if earlier is not None:
            _read_pending(real)
            return _checked(earlier, graphs)
    missing = [s for layer in layers for s in layer.sources if s not in real]
    if missing:
        raise LayoutError(f"the experts {missing[:3]} are no parameters of the model")
    experts = {source for layer in layers for source in layer.sources}
    whole = {name: parameter for name, parameter in real.items() if name not in experts}
    plan = plan_arena(
        num_ranks=num_ranks,
        layouts=tuple(by_layout),
        experts=[layer.blocks for layer in layers],
        weights=[_use(name, p, by_layout.get(Layout.TP)) for name, p in whole.items()],
    )
    memory = allocate(plan, group)
    arena = Arena(plan, memory.local)
    transfer = memory.transfer(arena, rank, group)
    store = LayoutStore(
        *(arena, rank, transfer, next(iter(by_layout))),
        group=group,
        link_gbps=measure_link(transfer, plan),
        absent=graphs.absent,
        way_reason=memory.reason,
    )
    model = LayoutModel(store)
    if memory.peers is not None:
        weakref.finalize(model, memory.peers.close)
    sources = [source for p in real.values() if (source := pending_source(p))]
    with torch.no_grad(), Reading(sources) as reading:
        for name, parameter in whole.items():
            view = arena.weight(name, parameter.shape, parameter.dtype)
            source = pending_source(parameter)
            if source is None:
                view.copy_(parameter)
            else:
                with reading.of(name, source.num_bytes):
                    source.read(view)
                forget_source(parameter)
            parameter.data = view
        for layer in layers:
            model.take_experts(layer, tuple(real[source] for source in layer.sources), reading)
    log.info(
        "arena of %d bytes a rank for the layouts %s; %s",
        plan.num_bytes,
        list(by_layout),
        transfer.name,
    )
    return model


def _read_pending(real: Mapping[str, nn.Parameter]) -> None:
    """Parameters that no earlier graph has used: into memory of their own."""
    for parameter in real.values():
        source = pending_source(parameter)
        if source is not None:
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)
            source.read(parameter.data)
            forget_source(parameter)


def _checked(model: LayoutModel, graphs: _RankGraphs) -> LayoutModel:
    """The model of an earlier graph, once this graph wants what it holds."""
    planned = model.store.arena.plan
    wanted = tuple(layer.blocks for graph in graphs.by_layout.values() for layer in graph.layers)
    if set(graphs.by_layout) != set(planned.layouts) or not set(wanted) <= set(planned.experts):
        raise LayoutError(
            f"a graph of this model needs the layouts {list(graphs.by_layout)}; its arena was planned for "
            f"{list(planned.layouts)} by an earlier graph. Reasons: {dict(graphs.absent)}. Compile the model "
            "with the layouts that all of its graphs can have"
        )
    return model


def _use(name: str, parameter: nn.Parameter, graph: _RankGraph | None) -> WeightUse:
    """What a weight takes, and what of it the TP graph reads."""
    num_bytes = part = parameter.numel() * parameter.itemsize
    if graph is not None:
        pieces = {p.placeholder: p for p in graph.slices if p.source == name}
        inputs = graph.gm.graph.find_nodes(op="placeholder")
        if not any(n.name == name and n.users and name not in pieces for n in inputs):
            rows = sum(num_bytes * p.length // parameter.shape[p.axis] for p in pieces.values())
            part = min(rows, num_bytes)
    return WeightUse(name=name, num_bytes=num_bytes, tp_bytes=part)


def _build(graphs: Mapping[Layout, _RankGraph], placements: Sequence[Placement]) -> None:
    """Build what the narrow layers need."""
    targets = [p for p in placements if p.layer is not None]
    needed = []
    for graph in graphs.values():
        for layer, placement in zip(graph.layers, targets, strict=True):
            assert placement.layer is not None
            shapes = layer.local_plan.experts.tensor_roles
            narrow = dataclasses.replace(
                placement.layer,
                plan=layer.local_plan,
                weight_dtypes=(layer.blocks.dtype,) * len(shapes),
                expert_strides=tuple(
                    _strides(layer.local_plan.experts.tensor_shape(role)) for role in shapes
                ),
            )
            needed.append(dataclasses.replace(placement, layer=narrow))
    Builds(needed).finish()


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def _bind(
    graph: _RankGraph,
    model: LayoutModel,
    real: Mapping[str, nn.Parameter],
    names: Sequence[str],
    layout: Layout,
    compile_one: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]],
) -> Callable[[Sequence[Any]], Any]:
    """The compiled graph of a layout as a function of the source graph's inputs."""
    inputs = [n for n in graph.gm.graph.nodes if n.op == "placeholder"]
    fixed: dict[str, Tensor] = {}
    for piece in graph.slices:
        full = real[piece.source].data
        fixed[piece.placeholder] = full.narrow(piece.axis, piece.start, piece.length)
    for layer in graph.layers:
        index = model.index_of(real[layer.sources[0]])
        views = model.store.arena.experts(layout, index)
        fixed.update(zip(layer.placeholders, views, strict=True))
    position = {name: index for index, name in enumerate(names)}
    order = [(fixed.get(n.name), position.get(n.name, -1)) for n in inputs]
    compiled = compile_one(graph.gm, [value(n) for n in inputs])

    def run(args: Sequence[Any]) -> Any:
        return compiled(*(args[at] if held is None else held for held, at in order))

    return run
