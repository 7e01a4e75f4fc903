"""Find MoE blocks in an FX graph by structure, and hand each candidate to the proof.

1. anchor: an integer tensor [T, K] that is computed from data: the routing ids, whatever made them;
2. output: the nearest float post-dominator of the anchor with T rows of size H;
3. input: the nearest float dominator of the output with T rows of size H from which the anchor is computed;
4. logits: the last matrix product before the anchor;
5. weights: the latest [T, K] (or [T, E]) float such that the experts can be computed from input, ids and weights
   alone, without looking at the logits;
6. what is left between the cut and the output must be experts: `match_experts` names the roles, `prove` runs them.

Source: dominator-based region finding is standard compiler practice; the cut at (x, ids, weights) is ours.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import fx

from moe_compiler.ir import MoERegion, NoMatch
from moe_compiler.passes.dataflow import (
    CASTS,
    CONTRACTIONS,
    VIEWS,
    DataFlow,
    chain,
    find_parameters,
    is_float,
    is_hidden,
    is_integer,
    last_size,
    num_rows,
    op_name,
    shape_hint,
    tensor,
)
from moe_compiler.passes.match_experts import NoSpec, Operands, find_operands
from moe_compiler.passes.prove import prove_region
from moe_compiler.passes.subgraph import Slice, SliceError, cut

logger = logging.getLogger(__name__)

MAX_TOP_K = 64
MAX_CUTS = 3


@dataclasses.dataclass(frozen=True)
class Match:
    """A proven block and where it lies in the graph.

    Attributes:
        region: the block, as data.
        x: hidden states, T rows of H.
        logits: router logits [T, E], or None when there are none.
        router_bias: the selection bias [E], or None.
        ids: [T, K].
        weights: [T, K], or [T, E] when `region.dense_weights`.
        experts: the expert weights in the order of `ExpertSpec.tensor_roles`.
        output: the node that the op replaces.
        nodes: router and experts, for pictures.
        body: the nodes between (x, ids, weights) and the output.
    """

    region: MoERegion
    x: fx.Node
    logits: fx.Node | None
    router_bias: fx.Node | None
    ids: fx.Node
    weights: fx.Node
    experts: tuple[fx.Node, ...]
    output: fx.Node
    nodes: frozenset[fx.Node]
    body: tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True)
class MatchResult:
    """What `find_regions` found.

    Attributes:
        matches: proven blocks in graph order.
        refused: candidates that were left alone, each with its reason.
        flow: the data flow of the graph, which `replace_region` needs.
    """

    matches: tuple[Match, ...]
    refused: tuple[NoMatch, ...]
    flow: DataFlow


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A block found by structure, not yet proven; the fields are those of `Match`."""

    flow: DataFlow
    x: fx.Node
    ids: fx.Node
    weights: fx.Node
    dense: bool
    logits: fx.Node | None
    output: fx.Node
    part: Slice
    operands: Operands

    @property
    def top_k(self) -> int:
        """K."""
        found = last_size(self.ids)
        assert found is not None
        return found


def may_hold_moe(gm: fx.GraphModule) -> bool:
    """Cheap test: without a selection of experts there is nothing to find."""
    return any(
        is_integer(node) and node.op in ("call_function", "call_method") and _is_anchor(node)
        for node in gm.graph.nodes
    )


def find_regions(
    gm: fx.GraphModule,
    example_inputs: Sequence[object] | None = None,
    *,
    parameters: Iterable[fx.Node] | None = None,
) -> MatchResult:
    """Find and prove every MoE block of a graph.

    Args:
        gm: a torch-level graph (Dynamo) or an ATen graph (`torch.export`) with fake values in `node.meta`.
        example_inputs: what the placeholders were traced with; tells parameters from activations.
        parameters: the placeholders that are weights or buffers, when the caller knows (an ExportedProgram's
            signature); found from `example_inputs` otherwise.

    Returns:
        Proven blocks, and candidates that were left alone with their reasons. The graph is not changed.
    """
    weights = set(parameters) if parameters is not None else find_parameters(gm, example_inputs)
    flow = DataFlow(gm.graph, weights)
    matches: list[Match] = []
    refused: list[NoMatch] = []
    claimed: set[fx.Node] = set()
    for anchor in anchors(flow):
        if anchor in claimed:
            continue
        match, reasons = _match_anchor(flow, anchor, claimed)
        if match is not None:
            matches.append(match)
            claimed.update(match.nodes)
            logger.info(
                "matched %s: %s", match.region.name or anchor.name, match.region.router.kind
            )
        refused.extend(reasons)
    taken = {id_ for match in matches for id_ in match.nodes}
    left = _drop_covered(flow, refused, taken)
    for reason in left:
        logger.info(
            "left alone %s (%s): %s", reason.name or reason.node, reason.node, reason.reason
        )
    return MatchResult(matches=tuple(matches), refused=tuple(left), flow=flow)


def _drop_covered(flow: DataFlow, refused: Sequence[NoMatch], taken: set[fx.Node]) -> list[NoMatch]:
    """One reason a block: none for a node inside of a match, the first one for a module seen twice."""
    names = {node.name for node in taken}
    kept: dict[str, NoMatch] = {}
    for reason in refused:
        if reason.node not in names:
            kept.setdefault(reason.detail, reason)
    return list(kept.values())


def _is_anchor(node: fx.Node) -> bool:
    found = tensor(node)
    if found is None or found.ndim not in (2, 3):
        return False
    width = last_size(node)
    return width is not None and 1 <= width <= MAX_TOP_K


def anchors(flow: DataFlow) -> Iterator[fx.Node]:
    """Integer tensors [.., K] that are computed from data."""
    for node in flow.nodes:
        if node.op in ("call_function", "call_method") and not flow.constant[node]:
            if is_integer(node) and _is_anchor(node):
                yield node


def _match_anchor(
    flow: DataFlow, anchor: fx.Node, claimed: set[fx.Node]
) -> tuple[Match | None, list[NoMatch]]:
    reasons: list[NoMatch] = []
    for x, output in _frames(flow, anchor):
        if output in claimed:
            break
        outcome = _match_frame(flow, anchor, x, output)
        if isinstance(outcome, Match):
            return outcome, []
        if outcome is not None:
            reasons.append(outcome)
    # the reason of the outermost frame that looked like experts says most
    return None, reasons[:1]


def _frames(flow: DataFlow, anchor: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs (x, output) around an anchor, tightest first."""
    rows = num_rows(anchor)
    if rows is None:
        return
    above = [
        n
        for n in itertools.islice(chain(flow.dominators, anchor), 80)
        if is_float(n) and num_rows(n) == rows and last_size(n) is not None
    ]
    tried: set[int] = set()
    count = 0
    for hidden in (last_size(n) for n in above):
        if hidden is None or hidden in tried:
            continue
        tried.add(hidden)
        for output in itertools.islice(chain(flow.post_dominators(hidden, rows), anchor), 40):
            if not is_hidden(output, hidden, rows):
                continue
            x = _nearest_input(flow, output, above, hidden)
            if x is None:
                continue
            count += 1
            yield x, output
            if count >= 12:
                return


def _nearest_input(
    flow: DataFlow, output: fx.Node, above: Sequence[fx.Node], hidden: int
) -> fx.Node | None:
    allowed = {n for n in above if last_size(n) == hidden}
    return next((n for n in chain(flow.dominators, output) if n in allowed), None)


def _match_frame(
    flow: DataFlow, anchor: fx.Node, x: fx.Node, output: fx.Node
) -> Match | NoMatch | None:
    if not _has_two_gemms(flow, anchor, x, output):
        return None
    name, module_class = module_of(output, anchor)
    # `detail` names the place, so that a block with several anchors is reported once
    place = name or output.name

    def refuse(reason: str) -> NoMatch:
        return NoMatch(
            name=name, module_class=module_class, node=anchor.name, reason=reason, detail=place
        )

    logits = find_logits(flow, anchor, x)
    cuts = list(itertools.islice(_cuts(flow, anchor, x, output, logits), MAX_CUTS))
    if isinstance(cuts[0], str):
        return refuse(cuts[0])
    failures = []
    for found in cuts:
        if isinstance(found, str):
            continue
        weights, dense, part = found
        try:
            candidate = Candidate(
                flow=flow,
                x=x,
                ids=anchor,
                weights=weights,
                dense=dense,
                logits=logits,
                output=output,
                part=part,
                operands=find_operands(part),
            )
            proven = prove_region(candidate, name=name, module_class=module_class)
        except (NoSpec, SliceError) as error:
            failures.append(str(error))
            continue
        except Exception as error:  # a candidate that breaks us must not break the user's model
            logger.warning("matching %s failed", place, exc_info=True)
            return refuse(f"internal error while matching: {type(error).__name__}: {error}")
        block = flow.ancestors([output], stop=[x], first=flow.position[x]) - {x}
        return Match(
            region=proven.region,
            x=x,
            logits=logits,
            router_bias=proven.router_bias,
            ids=anchor,
            weights=weights,
            experts=proven.experts,
            output=output,
            nodes=frozenset(block),
            body=part.body,
        )
    return refuse(failures[0])


def _has_two_gemms(flow: DataFlow, anchor: fx.Node, x: fx.Node, output: fx.Node) -> bool:
    """At least one GEMM with a weight of its own behind another one, off the way to the anchor."""
    first, last = flow.position[x], flow.position[output]
    router = flow.ancestors([anchor], first=first)
    depth: dict[fx.Node, int] = {}
    for node in flow.nodes[first : last + 1]:
        if flow.constant[node]:
            continue
        before = max((depth.get(a, 0) for a in flow.data_inputs[node]), default=0)
        if node not in router and op_name(node) in CONTRACTIONS:
            if any(flow.weight_leaf(a) is not None for a in flow.inputs[node]):
                before += 1
        depth[node] = before
    return depth.get(output, 0) >= 2


def find_logits(flow: DataFlow, anchor: fx.Node, x: fx.Node) -> fx.Node | None:
    """The router logits: the last matrix product that dominates the anchor, with the bias added to it."""
    previous = anchor
    first = flow.position[x]
    for node in chain(flow.dominators, anchor):
        if flow.position[node] <= first:
            return None
        if op_name(node) in CONTRACTIONS:
            return previous if _adds_bias(flow, previous, node) else node
        previous = node
    return None


def _adds_bias(flow: DataFlow, node: fx.Node, product: fx.Node) -> bool:
    return (
        op_name(node) in ("add", "add_", "iadd")
        and flow.data_inputs[node] == [product]
        and is_float(node)
        and shape_hint(node) == shape_hint(product)
    )


def _cuts(
    flow: DataFlow, anchor: fx.Node, x: fx.Node, output: fx.Node, logits: fx.Node | None
) -> Iterator[tuple[fx.Node, bool, Slice] | str]:
    """Places for the combine weights, latest first: (node, dense, slice); the reason when there is none."""
    router = _router_only(flow, anchor, x, output, logits)
    rows, top_k = num_rows(anchor), last_size(anchor)
    width = last_size(logits) if logits is not None else None
    reason, count = "", 0
    for weights in sorted(router, key=flow.position.__getitem__, reverse=True):
        size = last_size(weights)
        if not is_float(weights) or num_rows(weights) != rows or size not in (top_k, width):
            continue
        if weights is logits:
            continue
        try:
            part = cut(flow, [x, anchor, weights], [output])
        except SliceError as error:
            reason = reason or str(error)
            continue
        body = set(part.body)
        if (logits is not None and logits in body) or weights not in _read_by(flow, body):
            continue
        count += 1
        yield weights, size != top_k, part
    if count == 0:
        yield reason or "no combine weights [T, K] or [T, E] are computed beside the ids"


def _read_by(flow: DataFlow, body: set[fx.Node]) -> set[fx.Node]:
    return {read for node in body for read in flow.inputs[node]}


def _router_only(
    flow: DataFlow, anchor: fx.Node, x: fx.Node, output: fx.Node, logits: fx.Node | None
) -> list[fx.Node]:
    """Nodes computed from the logits alone, without another look at the hidden states."""
    start = logits if logits is not None else anchor
    inside = {start}
    for node in flow.nodes[flow.position[start] + 1 : flow.position[output]]:
        reads = flow.data_inputs[node]
        if reads and all(a in inside for a in reads):
            inside.add(node)
    return sorted(inside, key=flow.position.__getitem__)


def module_of(output: fx.Node, anchor: fx.Node) -> tuple[str, str]:
    """Qualified name and class of the innermost module that holds both nodes; for reports only."""
    stacks = [list((n.meta.get("nn_module_stack") or {}).values()) for n in (output, anchor)]
    found = ("", "")
    for a, b in zip(*stacks, strict=False):
        if a[0] != b[0]:
            break
        kind = a[1]
        found = (
            _plain_name(str(a[0])),
            kind.__name__ if isinstance(kind, type) else str(kind).split(".")[-1],
        )
    return found


def _plain_name(name: str) -> str:
    """`L['self']._modules['model']._modules['layers']...` or `L['self'].model.layers.0` -> `model.layers.0`."""
    for prefix in ("L['self'].", "L['self']", "L__self___", "self."):
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    for old, new in (("._modules['", "."), ("_modules['", ""), ("']", ""), ("[", "."), ("]", "")):
        name = name.replace(old, new)
    return name.strip(".")


def is_layout_only(node: fx.Node) -> bool:
    """Whether a node moves or casts elements without arithmetic."""
    return op_name(node) in VIEWS | CASTS | {"getitem"}


def dtype_of(node: fx.Node) -> torch.dtype:
    """dtype of a tensor node."""
    found = tensor(node)
    assert found is not None
    return found.dtype
