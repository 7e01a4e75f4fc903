"""Find MoE blocks in an FX graph by structure, and hand each candidate to the proof.

`candidates` finds x, ids, weights and output around every selection of experts; what is left
between them must be experts: `operands` names the roles of the weights, `prove` runs them.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Sequence

from torch import fx

from moe_compiler.ir import MoERegion, NoMatch
from moe_compiler.passes.candidates import (
    Candidate,
    anchors,
    cuts,
    find_logits,
    frames,
    has_two_gemms,
    may_hold_moe,
)
from moe_compiler.passes.dataflow import DataFlow
from moe_compiler.passes.gradients import stop_of_experts
from moe_compiler.passes.nodes import find_parameters, given_weights, num_rows, op_name
from moe_compiler.passes.operands import NoSpecError, find_operands
from moe_compiler.passes.prove import prove_region
from moe_compiler.passes.subgraph import SliceError

__all__ = ["Candidate", "Match", "MatchResult", "find_regions", "may_hold_moe", "module_of"]

logger = logging.getLogger(__name__)

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


_TRANSFORMED = NoMatch(
    name="",
    module_class="",
    node="",
    reason="the graph holds a transform of torch.func (grad, vmap, jvp), under which a tensor is more "
    "than its shape says; compile the module inside of the transform instead",
    detail="",
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
        parameters: the placeholders that are weights or buffers, when the caller knows (an
            ExportedProgram's signature); found from `example_inputs` otherwise.

    Returns:
        Proven blocks, and candidates that were left alone with their reasons. The graph is not
        changed.
    """
    weights = set(parameters) if parameters is not None else find_parameters(gm, example_inputs)
    found = _find(DataFlow(gm.graph, weights))
    if found.matches or parameters is not None:
        return found
    # A function may be given its weights: then they are inputs like any other.
    given = given_weights(gm, weights, {num_rows(anchor) for anchor in anchors(found.flow)})
    if not given:
        return found
    retried = _find(DataFlow(gm.graph, weights | given))
    return retried if retried.matches else found


def _find(flow: DataFlow) -> MatchResult:
    if any("increment_nesting" in op_name(node) for node in flow.nodes):
        return MatchResult(matches=(), refused=(_TRANSFORMED,), flow=flow)
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


def _match_anchor(
    flow: DataFlow, anchor: fx.Node, claimed: set[fx.Node]
) -> tuple[Match | None, list[NoMatch]]:
    reasons: list[NoMatch] = []
    for x, output in frames(flow, anchor):
        if output in claimed:
            break
        outcome = _match_frame(flow, anchor, x, output)
        if isinstance(outcome, Match):
            return outcome, []
        if outcome is not None:
            reasons.append(outcome)
    # the reason of the outermost frame that looked like experts says most
    return None, reasons[:1]


def _match_frame(
    flow: DataFlow, anchor: fx.Node, x: fx.Node, output: fx.Node
) -> Match | NoMatch | None:
    if not has_two_gemms(flow, anchor, x, output):
        return None
    name, module_class = module_of(output, anchor)
    # `detail` names the place, so that a block with several anchors is reported once
    place = name or output.name

    def refuse(reason: str) -> NoMatch:
        return NoMatch(
            name=name, module_class=module_class, node=anchor.name, reason=reason, detail=place
        )

    if num_rows(anchor) == 0:
        return refuse("it was captured without tokens, on which nothing can be proven")
    logits = find_logits(flow, anchor, x)
    places = list(itertools.islice(cuts(flow, anchor, x, output, logits), MAX_CUTS))
    if isinstance(places[0], str):
        return refuse(places[0])
    if flow.has_parts:
        # only where the parameters as they are fail: their parts are strided, and more of them
        split = cuts(flow, anchor, x, output, logits, parts=True)
        places += itertools.islice(split, MAX_CUTS)
    failures = []
    for found in places:
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
            stop = stop_of_experts(candidate)
            if stop:
                raise NoSpecError(stop)
            proven = prove_region(candidate, name=name, module_class=module_class)
        except (NoSpecError, SliceError) as error:
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
    """`L['self'].model.layers[0]`, or the same with `_modules['..']`, -> `model.layers.0`."""
    for prefix in ("L['self'].", "L['self']", "L__self___", "self."):
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    for old, new in (("._modules['", "."), ("_modules['", ""), ("']", ""), ("[", "."), ("]", "")):
        name = name.replace(old, new)
    return name.strip(".")
