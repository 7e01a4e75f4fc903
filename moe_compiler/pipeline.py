"""The stages that a graph passes, in order, and what each one may do to it.

A stage that fails never breaks the user's model: its traceback is logged and the graph goes to
Inductor as it came. Under `strict` the error is raised instead.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from moe_compiler import inductor
from moe_compiler import report as report_module
from moe_compiler.errors import BuildError, NoMatchError, OptionError, ToolchainError
from moe_compiler.ir import MoERegion, NoMatch
from moe_compiler.options import Options
from moe_compiler.placement import (
    Builds,
    Placement,
    place,
    warn_no_compiler,
)
from moe_compiler.report import GraphReport, clear, last_report, reports
from moe_compiler.targets import Device

__all__ = [
    "STAGES",
    "GraphReport",
    "analyse",
    "clear",
    "edit_exported",
    "last_report",
    "reports",
    "run",
]

log = logging.getLogger(__name__)

# The one list of the stages; dumps, logs, reports and MOEFLEX_DISABLE use these names.
STAGES: tuple[str, ...] = (
    "capture",  # let whole blocks arrive in one graph (off by MOEFLEX_DISABLE only)
    "match",  # find MoE blocks and prove them
    "plan",  # choose the target of each block
    "build",  # start the compilers that the targets need, in the background
    "replace",  # put moeflex::moe_layer into the graph
    "inductor",  # compile the rest; then wait for the builds
)

# A graph without one of these can hold no MoE block, so that nothing of the passes is even imported
# for it: routing selects (first row), and experts given their routes from outside contract, gather
# or scatter (second row).
_ROUTING = frozenset(("topk", "max", "argmax", "sort", "argsort", "kthvalue", "one_hot"))
_SELECTION = frozenset(("topk", "argmax", "one_hot"))
_EXPERTS = frozenset(
    (
        "grouped_mm",
        "_grouped_mm",
        "bmm",
        "baddbmm",
        "einsum",
        "index_add",
        "index_add_",
        "scatter_add",
        "scatter_add_",
    )
)


def run(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """Compile a graph from dynamo.

    Args:
        gm: the graph; owned and edited by this call.
        example_inputs: its inputs as dynamo hands them to a backend.
        options: what the user asked for.

    Returns:
        The compiled callable.

    Raises:
        NoMatchError: under `strict`, when a candidate was left alone.
        BuildError: under `strict`, when a build failed.
    """
    work = _Work(gm, example_inputs, options)
    work.probe()
    work.capture()
    work.match()
    work.plan()
    work.build()
    work.replace()
    return work.inductor()


def analyse(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> GraphReport:
    """Find and prove the MoE blocks of a graph and choose their targets; edit nothing."""
    work = _Work(gm, example_inputs, options)
    work.capture()
    work.match()
    work.plan()
    return work.report()


def edit_exported(
    gm: fx.GraphModule, parameters: Sequence[fx.Node], options: Options, device: Device
) -> tuple[GraphReport, tuple[Placement, ...]]:
    """Put the op into the graph of an exported program, and start the builds that it needs.

    Args:
        gm: the program's graph; edited.
        parameters: the placeholders that are weights.
        options: what the user asked for.
        device: where the program will run.

    Returns:
        What was found, and what computes each block.

    Raises:
        NoMatchError: under `strict`, when a candidate was left alone.
        BuildError: under `strict`, when a build could not be started.
    """
    work = _Work(gm, (), options, parameters, device)
    work.match()
    work.plan()
    work.build()
    work.replace()
    return work.report(), tuple(work.placements)


class _Work:
    """One graph on its way through the stages."""

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        options: Options,
        parameters: Sequence[fx.Node] | None = None,
        device: Device | None = None,
    ) -> None:
        self.gm = gm
        self.parameters = parameters
        self.device = device
        self.example_inputs = example_inputs
        self.options = options
        self.num_nodes = len(gm.graph.nodes)
        self.matches: list[Any] = []
        self.flow: Any = None
        self.placements: list[Placement] = []
        self.refused: list[NoMatch] = []
        self.notes: list[str] = []
        self.stage_seconds: dict[str, float] = {}
        self.original: fx.Graph | None = None
        self.builds: Builds | None = None
        self.folder = report_module.new_dump_folder(options.dump_dir)
        report_module.show_graph(gm, "before", self.folder)

    @property
    def regions(self) -> tuple[MoERegion, ...]:
        return tuple(match.region for match in self.matches)

    def report(self) -> GraphReport:
        return GraphReport(
            regions=self.regions,
            placements=tuple(placement.title for placement in self.placements),
            refused=tuple(self.refused),
            num_nodes=self.num_nodes,
            stage_seconds=tuple(self.stage_seconds.items()),
            notes=tuple(self.notes),
        )

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; without `strict`, log its failure and give all regions back to Inductor."""
        start = time.perf_counter()
        try:
            yield
        except OptionError:
            raise
        except Exception as error:
            if self.options.strict:
                raise
            _log_failure(name, error)
            self.give_back(f"the stage '{name}' failed: {type(error).__name__}: {error}")
        finally:
            self.stage_seconds[name] = (
                self.stage_seconds.get(name, 0.0) + time.perf_counter() - start
            )

    def skips(self, name: str) -> bool:
        return name in self.options.disable

    def give_back(self, reason: str) -> None:
        """Leave every region of the graph to Inductor, and the graph as it came."""
        if self.original is not None:
            self.gm.graph = self.original
            self.original = None
        self.builds = None
        self.notes.append(f"left to Inductor: {reason}")
        self.placements = [Placement(target="", reason=reason) for _ in self.matches]

    def probe(self) -> None:
        """Start what Inductor would wait for later."""
        devices = {getattr(value, "device", None) for value in self.example_inputs}
        if not self.skips("inductor") and torch.device("cpu") in devices:
            inductor.start_probe(self.options)

    def capture(self) -> None:
        """Note how the graph was captured, and a block that a graph break cut in two."""
        if self.skips("capture"):
            return
        with self.stage("capture"):
            from moe_compiler.runtime import capture

            self.notes += capture.taken_ways(self.gm)
            fragment = capture.fragment_reason(self.gm)
            if fragment is not None:
                self.refused.append(fragment)
                log.info("left alone: %s: %s", fragment.name or fragment.node, fragment.reason)

    def match(self) -> None:
        if self.skips("match"):
            return
        self.refused += _blocks_in_subgraphs(self.gm)
        if not may_hold_moe(self.gm):
            return
        with self.stage("match"):
            from moe_compiler.passes.match_moe import find_regions

            _remember_proofs()
            found = find_regions(self.gm, self.example_inputs, parameters=self.parameters)
            self.matches = list(found.matches)
            self.flow = found.flow
            self.refused += found.refused
        for region in self.regions:
            log.debug("matched %s", region)

    def plan(self) -> None:
        if self.skips("plan") or not self.matches:
            return self._check_strict()
        with self.stage("plan"):
            self.placements = [
                place(match, self.options, device=self.device) for match in self.matches
            ]
            for region, placement in zip(self.regions, self.placements, strict=True):
                if not placement.target:
                    self._refuse(
                        region, placement.reason, "proven, and left to Inductor without a target"
                    )
        for region, placement in zip(self.regions, self.placements, strict=True):
            log.info(
                "%s: %s -> %s", region.name or "MoE block", region.router.kind, placement.title
            )
            log.debug("plan %s", placement.plan.key if placement.plan else None)
        return self._check_strict()

    def _check_strict(self) -> None:
        if self.options.strict and self.refused:
            lines = [f"  {r.name or r.node}: {r.reason}" for r in self.refused]
            raise NoMatchError(
                "strict was asked for, and these MoE candidates would be left to Inductor:\n"
                + "\n".join(lines)
            )

    def build(self) -> None:
        if self.skips("build") or not any(p.target for p in self.placements):
            return
        with self.stage("build"):
            self.builds = Builds(self.placements)

    def replace(self) -> None:
        if not any(placement.target for placement in self.placements):
            return
        if self.skips("replace"):
            self.give_back("the stage 'replace' is disabled")
            return
        with self.stage("replace"):
            from moe_compiler.runtime import op  # noqa: F401  defines the op

            self.original = _copy_graph(self.gm.graph)
            self.placements = [
                self._replace_one(match, placement)
                for match, placement in zip(self.matches, self.placements, strict=True)
            ]
            self.gm.graph.lint()
            self.gm.recompile()
        report_module.show_graph(self.gm, "after", self.folder)
        self._check_strict()

    def _replace_one(self, match: Any, placement: Placement) -> Placement:
        """Replace one region; where its surroundings do not allow that, it stays with Inductor."""
        from moe_compiler.passes.replace import ReplaceError, replace_region

        if placement.plan is None:
            return placement
        try:
            replace_region(
                self.gm,
                match,
                placement.plan,
                flow=self.flow,
                absorb_router=placement.absorb_router,
                router=placement.router,
                layer_op=placement.layer_op,
            )
        except ReplaceError as error:
            self._refuse(match.region, str(error), "proven, and left to Inductor in its graph")
            return Placement(target="", reason=str(error))
        return placement

    def _refuse(self, region: MoERegion, reason: str, detail: str) -> None:
        self.refused.append(
            NoMatch(
                name=region.name,
                module_class=region.module_class,
                node="",
                reason=reason,
                detail=detail,
            )
        )

    def inductor(self) -> Callable[..., Any]:
        start = time.perf_counter()
        try:
            compiled = self._compile()
            if self.builds is not None:
                compiled = self._finish_builds(compiled)
        finally:
            self.stage_seconds["inductor"] = time.perf_counter() - start
        report = self.report()
        report_module.record(report)
        report_module.show_report(report, self.folder)
        log.info(
            "graph of %d nodes: %d MoE blocks, %d as moeflex::moe_layer, %d refused; %s",
            report.num_nodes,
            len(report.regions),
            report.num_replaced,
            len(report.refused),
            ", ".join(f"{name} {seconds:.2f} s" for name, seconds in report.stage_seconds),
        )
        return compiled

    def _finish_builds(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wait for the builds; where one failed, compile the graph again as it came."""
        assert self.builds is not None
        start = time.perf_counter()
        try:
            self.builds.finish()
        except BuildError as error:
            if self.options.strict:
                raise
            log.warning("a target could not be built; its MoE blocks go to Inductor. %s", error)
            self.give_back(f"build failed: {error}")
            return self._compile()
        finally:
            self.stage_seconds["build"] += time.perf_counter() - start
        return compiled

    def _compile(self) -> Callable[..., Any]:
        if self.options.group:
            return self._compile_layouts()
        from moe_compiler.runtime.stand_in import check_read

        check_read(self.example_inputs)
        if self.skips("inductor"):
            return self.gm.forward
        holds_op = any(placement.target for placement in self.placements)
        try:
            return inductor.compile_graph(self.gm, self.example_inputs, self.options, holds_op)
        except ToolchainError as error:
            warn_no_compiler(str(error))
            self.notes.append("no C++ compiler: the graph runs as plain torch")
            return self.gm.forward

    def _compile_layouts(self) -> Callable[..., Any]:
        """One graph for every layout of the group; what fails here has to be known on every rank."""
        from moe_compiler.layout_graphs import compile_layouts

        def compile_one(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            if self.skips("inductor"):
                return gm.forward
            return inductor.compile_graph(gm, example_inputs, self.options, True)

        return compile_layouts(
            self.gm, self.example_inputs, self.options, self.placements, compile_one, self.notes
        )


@functools.cache
def _remember_proofs() -> None:
    """Let proofs outlive the process; they hold for these sources and this torch."""
    import torch

    from moe_compiler.passes import prove
    from moe_compiler.runtime.proof_cache import ProofFiles

    prove.remember_in(ProofFiles(f"{inductor.source_digest()} torch {torch.__version__}"))


def may_hold_moe(gm: fx.GraphModule) -> bool:
    """A cheap look at a graph for anything that could route or be routed; True says nothing."""
    return any(
        name in _ROUTING or name in _EXPERTS or "grouped_mm" in name or "moe" in name
        for name in _op_names(gm)
    )


def _blocks_in_subgraphs(gm: fx.GraphModule) -> Iterator[NoMatch]:
    """Refusals for sub-graphs (of activation checkpointing, say) that select and contract."""
    for name, module in gm.named_modules():
        if module is gm or not isinstance(module, fx.GraphModule):
            continue
        found = set(_op_names(module))
        if found & _SELECTION and found & (_EXPERTS | {"linear", "matmul", "mm"}):
            yield NoMatch(
                name="",
                module_class="",
                node=name,
                reason="an MoE block may lie in a sub-graph (activation checkpointing, control "
                "flow), where this version does not look",
            )


def _op_names(gm: fx.GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method"):
            yield node.target if isinstance(node.target, str) else _name(node.target)


def _name(target: Any) -> str:
    packet = getattr(target, "overloadpacket", None)
    return str(getattr(packet or target, "__name__", ""))


def _copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy with the same names and metadata."""
    copied = fx.Graph()
    copied._codegen = graph._codegen
    twins: dict[fx.Node, fx.Node] = {}
    output: Any = copied.graph_copy(graph, twins, return_output_node=True)
    value, old_output = output
    copied.output(value).meta.update(old_output.meta)
    # Dynamo hangs the source of an input on its node, and AOT autograd asks for it.
    for node, twin in twins.items():
        if hasattr(node, "_dynamo_source"):
            twin._dynamo_source = node._dynamo_source
    return copied


_logged_failures: set[tuple[str, str]] = set()


def _log_failure(stage: str, error: Exception) -> None:
    """Log a failed stage: with its traceback the first time, in one line after that."""
    key = (stage, f"{type(error).__name__}: {error}")
    first = key not in _logged_failures
    _logged_failures.add(key)
    log.warning(
        "the stage '%s' failed and this graph goes to Inductor as it came: %s. "
        "This is a fault of moeflex; please report it.",
        *key,
        exc_info=first,
    )
