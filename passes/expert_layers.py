"""The MoE layers of a rank's graph: full experts give way to the narrow ones that a layout holds."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from moe_compiler.errors import UnsupportedError
from moe_compiler.expert_blocks import ExpertBlocks, Layout
from moe_compiler.ir import MoEPlan, Score
from moe_compiler.passes.nodes import op_name, tensor
from moe_compiler.passes.rank_graph import Propagation, copied
from moe_compiler.passes.shard_rules import ShardError
from moe_compiler.reference import DTYPE_NAMES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """One MoE layer of the graph.

    Attributes:
        plan: the plan of the source graph.
        local_plan: the plan that a rank's op runs.
        blocks: its experts, cut along I.
        sources: placeholders of the full expert tensors in the source graph, which the rank's graph lacks.
        placeholders: those of the narrow ones, in the order of the op's expert tensors.
    """

    plan: MoEPlan
    local_plan: MoEPlan
    blocks: ExpertBlocks
    sources: tuple[str, ...]
    placeholders: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ExpertParallelGraph:
    """What `expert_parallel_graph` made.

    Attributes:
        gm: the rank's graph; its inputs are those of the source, without full expert tensors, then the narrow ones.
        layers: the MoE layers, in graph order.
    """

    gm: fx.GraphModule
    layers: tuple[ExpertLayer, ...]


def expert_parallel_graph(
    gm: fx.GraphModule, *, num_ranks: int, group: str, whole: bool = False
) -> ExpertParallelGraph:
    """Write the graph that every rank runs on tokens of its own, its experts being spread over the ranks.

    Args:
        gm: a torch-level graph with fake values, its MoE blocks replaced by `moeflex::moe_layer`; not changed.
        num_ranks: R.
        group: name of the process group.
        whole: experts are not cut, because the model will never run under TP.

    Raises:
        ShardError: the experts cannot be cut into blocks.
    """
    gm = copied(gm)
    layers: list[ExpertLayer] = []
    for node in list(gm.graph.nodes):
        if op_name(node) != "moe_layer":
            continue
        layer = narrow_experts(gm.graph, node, Layout.EP, num_ranks, len(layers), whole=whole)
        x, router, experts, key = node.args
        blocks = layer.blocks
        node.target = torch.ops.moeflex.gathered_moe_layer.default
        node.args = (
            *(x, router, experts, key, layer.plan.out_dtype, group),
            *(blocks.num_experts, blocks.num_blocks),
        )
        layers.append(layer)
    gm.graph.lint()
    gm.recompile()
    Propagation(gm, {}).check()
    return ExpertParallelGraph(gm=gm, layers=tuple(layers))


def narrow_experts(
    graph: fx.Graph,
    node: fx.Node,
    layout: Layout,
    num_ranks: int,
    index: int,
    *,
    whole: bool = False,
) -> ExpertLayer:
    """Let one `moe_layer` of a graph read narrow experts through new placeholders.

    Raises:
        ShardError: its experts are computed in the graph, shared, of mixed dtypes, or not to be cut.
    """
    x, router, experts, key = node.args
    plan = MoEPlan.from_key(str(key))
    if plan.router.score is not Score.EXTERNAL:
        raise ShardError(
            f"the router of '{node.name}' runs inside of the op; it has to stay outside"
        )
    sources: list[fx.Node] = list(experts)  # type: ignore[arg-type]
    if any(s.op != "placeholder" for s in sources):
        raise ShardError(f"the experts of '{node.name}' are computed in the graph (a cast, say)")
    values = [v for v in map(tensor, sources) if v is not None]
    dtypes = {v.dtype for v in values}
    if len(dtypes) != 1:
        raise ShardError(f"the experts of '{node.name}' have several dtypes")
    try:
        blocks = ExpertBlocks.of(plan.experts, num_ranks, DTYPE_NAMES[dtypes.pop()], whole=whole)
    except UnsupportedError as error:
        raise ShardError(str(error)) from error
    local = _local_plan(plan, blocks, layout)
    inputs = _new_placeholders(graph, index, local, values[0])
    node.args = (x, router, inputs, local.key)
    for source in dict.fromkeys(sources):
        if source.users:
            raise ShardError(f"the expert weight '{source.name}' is used in several places")
        graph.erase_node(source)
    return ExpertLayer(
        plan=plan,
        local_plan=local,
        blocks=blocks,
        sources=tuple(s.name for s in sources),
        placeholders=tuple(p.name for p in inputs),
    )


def _local_plan(plan: MoEPlan, blocks: ExpertBlocks, layout: Layout) -> MoEPlan:
    local = dataclasses.replace(plan, experts=blocks.local_spec(plan.experts, layout))
    if layout is Layout.TP:
        return local
    router = dataclasses.replace(
        plan.router,
        top_k=plan.router.top_k * blocks.num_blocks,
        num_experts=local.experts.num_experts,
    )
    # The results of several ranks are added before they are rounded.
    wide = "fp64" if blocks.dtype == "fp64" else "fp32"
    return dataclasses.replace(local, router=router, out_dtype=wide)


def _new_placeholders(
    graph: fx.Graph, index: int, plan: MoEPlan, like: torch.Tensor
) -> list[fx.Node]:
    spec = plan.experts
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    found = []
    for role in spec.tensor_roles:
        with graph.inserting_after(last):
            last = graph.placeholder(f"moeflex_layer{index}_{role}")
        last.meta["example_value"] = like.new_empty(spec.tensor_shape(role))
        found.append(last)
    return found
