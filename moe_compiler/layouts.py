"""One model over a process group in two layouts: compiled once a layout, switched live.

```
torch.compile(model, backend="moeflex", options={"group": "world", "layouts": ("ep", "tp"), "initial": "ep"})
moe_compiler.layout(model)          -> "ep"
moe_compiler.switch(model, "tp")    -> SwitchReport; every rank calls it between two steps
moe_compiler.refit(model, {...})    new values, in place, in the active layout
```

The first graph of a model plans the arena and moves the weights into it. EP: every rank calls the
model with requests of its own. TP: all ranks call it with the same batch. Inference only.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed import distributed_c10d

from moe_compiler.arena import WeightUse, plan_arena
from moe_compiler.errors import LayoutError, OptionError, UnsupportedError
from moe_compiler.expert_blocks import Layout
from moe_compiler.options import Options
from moe_compiler.passes.expert_layers import ExpertLayer, expert_parallel_graph
from moe_compiler.passes.nodes import find_parameters, value
from moe_compiler.passes.shard_rules import ShardError
from moe_compiler.passes.tensor_parallel import WeightSlice, shard_graph
from moe_compiler.placement import Builds, Placement
from moe_compiler.reference import expert_tensors
from moe_compiler.runtime import gathered_layer  # noqa: F401  defines the op
from moe_compiler.runtime.arena_views import Arena
from moe_compiler.runtime.stand_in import stand_in
from moe_compiler.runtime.switch import Collective, LayoutStore, SwitchReport

log = logging.getLogger(__name__)

_MARK = "_moeflex_layouts"


@dataclasses.dataclass(frozen=True)
class _RankGraph:
    gm: fx.GraphModule
    layers: tuple[ExpertLayer, ...]
    slices: tuple[WeightSlice, ...] = ()


class LayoutModel:
    """The weights of one model on one rank.

    Args:
        store: the arena and what of it serves the active layout.
    """

    def __init__(self, store: LayoutStore) -> None:
        self.store = store
        self.experts: list[tuple[ExpertLayer, tuple[nn.Parameter, ...]]] = []
        self._versions: list[tuple[nn.Parameter, int, int]] = []

    def take_experts(self, layer: ExpertLayer, parameters: tuple[nn.Parameter, ...]) -> None:
        """Write a layer into the arena; its parameters keep their shape and no memory."""
        index = len(self.experts)
        self.experts.append((layer, parameters))
        self._write(index, [p.detach() for p in parameters])
        for parameter in dict.fromkeys(parameters):
            parameter.data = stand_in(parameter.shape, parameter.dtype)
            setattr(parameter, _MARK, self)
            self._versions.append((parameter, parameter._version, parameter.data_ptr()))

    def index_of(self, first: nn.Parameter) -> int:
        """The arena's index of the layer whose first expert tensor this is.

        Raises:
            LayoutError: the layer is not in the arena.
        """
        for index, (_, parameters) in enumerate(self.experts):
            if parameters[0] is first:
                return index
        raise LayoutError(
            "an MoE layer arrived in a later graph than the arena was planned for; the whole model has to "
            "come as one graph (torch.compile(..., fullgraph=True) shows where it breaks)"
        )

    def check_untouched(self) -> None:
        """Refuse to run on after somebody wrote to a parameter whose values live in the arena.

        Raises:
            LayoutError: an expert parameter was written to, or got other memory.
        """
        for parameter, version, pointer in self._versions:
            if parameter._version != version or parameter.data_ptr() != pointer:
                raise LayoutError(
                    f"an expert parameter of shape {tuple(parameter.shape)} was written to directly; its values "
                    "live in the arena of every rank. Write them with moe_compiler.refit(model, {name: values})"
                )

    def refit(self, index: int, tensors: Sequence[Tensor]) -> None:
        """New values for all experts of a layer, in the active layout."""
        self._write(index, tensors)

    def _write(self, index: int, tensors: Sequence[Tensor]) -> None:
        spec = self.experts[index][0].plan.experts
        for expert in range(spec.num_experts):
            self.store.refit(index, spec, expert, expert_tensors(spec, tensors, expert))


def switch(
    model: nn.Module, target: str, *, check: bool = False, link_gbps: float = 0.0
) -> SwitchReport:
    """Bring a model into another layout, between two steps; every rank of its group calls this.

    Args:
        model: the compiled model, or the one that was compiled; it ran at least once.
        target: "ep" | "tp".
        check: compare sums over all blocks before and after.
        link_gbps: the measured link in GB/s a direction, for the report.

    Raises:
        LayoutError: the model has no such layout.
        SwitchError: a rank did not come; the message says whether the old layout still serves.
    """
    found = _of(model)
    if target not in {str(one) for one in Layout}:
        raise LayoutError(f"a layout is one of {', '.join(Layout)}; got {target!r}")
    return found.store.switch(Layout(target), check=check, link_gbps=link_gbps)


def layout(model: nn.Module) -> str:
    """The layout that a model serves: "ep" | "tp".

    Raises:
        LayoutError: the model was not compiled over a group, or has not run yet.
        SwitchError: an earlier switch was torn.
    """
    return str(_of(model).store.layout)


def refit(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write new values of parameters in place, in the active layout; the same values on every rank.

    Args:
        model: the compiled model.
        values: full tensors by qualified name. Of one layer's experts, all tensors or none.

    Raises:
        LayoutError: a name is unknown, a shape differs, or tensors of a layer are missing.
    """
    found = _of(model)
    names = {name.removeprefix("_orig_mod."): p for name, p in model.named_parameters()}
    given: dict[int, Tensor] = {}
    for name, new in values.items():
        parameter = names.get(name)
        if parameter is None or parameter.shape != new.shape:
            what = "no parameter" if parameter is None else f"shape {tuple(parameter.shape)}"
            raise LayoutError(
                f"refit of {name!r} with shape {tuple(new.shape)}: the model has {what}"
            )
        given[id(parameter)] = new
    for index, (_, parameters) in enumerate(found.experts):
        mine = [given.pop(id(p), None) for p in parameters]
        tensors = [t for t in mine if t is not None]
        if tensors and len(tensors) < len(parameters):
            raise LayoutError(
                f"refit of MoE layer {index} needs all of its {len(parameters)} tensors"
            )
        if tensors:
            found.refit(index, tensors)
    for parameter in names.values():
        if id(parameter) in given:
            parameter.data.copy_(given[id(parameter)])


def _of(model: nn.Module) -> LayoutModel:
    for parameter in model.parameters():
        found = getattr(parameter, _MARK, None)
        if isinstance(found, LayoutModel):
            return found
    raise LayoutError(
        "this model has no layouts: compile it with options={'group': 'world'} and call it once"
    )


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
    _build(graphs, placements)
    runs = {
        layout: _bind(graph, model, real, names, layout, compile_one)
        for layout, graph in graphs.items()
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
) -> dict[Layout, _RankGraph]:
    """The graph of every layout that can be had, the initial one first."""
    wanted = sorted(map(Layout, options.layouts), key=lambda one: one.value != options.first_layout)
    found: dict[Layout, _RankGraph] = {}
    for layout in wanted:
        try:
            if layout is Layout.EP:
                ep = expert_parallel_graph(gm, num_ranks=num_ranks, group=group.group_name)
                found[layout] = _RankGraph(ep.gm, ep.layers)
            else:
                tp = shard_graph(
                    gm,
                    num_ranks=num_ranks,
                    rank=rank,
                    all_reduce=_all_reduce(group.group_name),
                    parameters=parameters,
                )
                found[layout] = _RankGraph(tp.gm, tp.layers, tp.slices)
        except ShardError as error:
            if options.strict or layout.value == options.first_layout:
                raise LayoutError(f"layout {layout.value!r} cannot be had: {error}") from error
            notes.append(f"no layout {layout.value!r}: {error}")
            log.warning("no layout %r: %s", layout.value, error)
    return found


def _all_reduce(group_name: str) -> Callable[[fx.Graph, fx.Node], fx.Node]:
    def write(graph: fx.Graph, node: fx.Node) -> fx.Node:
        ops = torch.ops._c10d_functional
        begun = graph.call_function(ops.all_reduce.default, (node, "sum", group_name))
        begun.meta = dict(node.meta)
        with graph.inserting_after(begun):
            return graph.call_function(ops.wait_tensor.default, (begun,))

    return write


def _model_of(
    graphs: Mapping[Layout, _RankGraph],
    real: Mapping[str, nn.Parameter],
    rank: int,
    num_ranks: int,
    group: dist.ProcessGroup,
) -> LayoutModel:
    """The model's weights: of an earlier graph, or moved into a new arena."""
    layers = next(iter(graphs.values())).layers
    if not layers:
        raise LayoutError(
            "no MoE block of this graph runs as an op; there is nothing to lay out over ranks. (A rank "
            "without requests has to pass a padding token: a graph for no tokens cannot be proven.)"
        )
    for layer in layers:
        earlier = getattr(real.get(layer.sources[0]), _MARK, None)
        if isinstance(earlier, LayoutModel):
            return earlier
    missing = [s for layer in layers for s in layer.sources if s not in real]
    if missing:
        raise LayoutError(f"the experts {missing[:3]} are no parameters of the model")
    experts = {source for layer in layers for source in layer.sources}
    whole = {name: parameter for name, parameter in real.items() if name not in experts}
    parts = {piece.placeholder: piece for graph in graphs.values() for piece in graph.slices}
    plan = plan_arena(
        num_ranks=num_ranks,
        layouts=tuple(graphs),
        experts=[layer.blocks for layer in layers],
        weights=[_use(name, p, parts.get(name)) for name, p in whole.items()],
    )
    arena = Arena(plan, torch.zeros(plan.num_bytes, dtype=torch.uint8))
    model = LayoutModel(LayoutStore(arena, rank, Collective(arena, group), next(iter(graphs))))
    with torch.no_grad():
        for name, parameter in whole.items():
            view = arena.weight(name, parameter.shape, parameter.dtype)
            view.copy_(parameter)
            parameter.data = view
        for layer in layers:
            model.take_experts(layer, tuple(real[source] for source in layer.sources))
    log.info("arena of %d bytes a rank for the layouts %s", plan.num_bytes, ", ".join(graphs))
    return model


def _use(name: str, parameter: nn.Parameter, piece: WeightSlice | None) -> WeightUse:
    num_bytes = parameter.numel() * parameter.itemsize
    part = num_bytes if piece is None else num_bytes * piece.length // parameter.shape[piece.axis]
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
        full = real[piece.placeholder].data
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
