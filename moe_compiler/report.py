"""What was done with each compiled graph: reports, dump folders and artifacts for `tlparse`."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import logging
import os
import threading
from typing import Any

import torch
from torch import fx

from moe_compiler.ir import MoERegion, NoMatch

log = logging.getLogger(__name__)

# Reports of older graphs are dropped: a process that compiles for days keeps a bounded number.
_MAX_REPORTS = 256

_lock = threading.Lock()
_reports: collections.deque[GraphReport] = collections.deque(maxlen=_MAX_REPORTS)
_dump_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GraphReport:
    """What was found in one graph and what became of it.

    Attributes:
        regions: the proven MoE blocks, in graph order.
        placements: for each region, what computes it: "cpu", "plain torch", "inductor: <reason>";
            empty where the graph was only analysed.
        refused: candidates that were left alone, and regions that no target takes, with their
            reasons.
        num_nodes: nodes of the graph as it came.
        stage_seconds: pairs (stage, wall seconds).
        notes: what else the user should know, one sentence each.
    """

    regions: tuple[MoERegion, ...] = ()
    placements: tuple[str, ...] = ()
    refused: tuple[NoMatch, ...] = ()
    num_nodes: int = 0
    stage_seconds: tuple[tuple[str, float], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_replaced(self) -> int:
        """Regions that run as `moeflex::moe_layer`."""
        return sum(not placement.startswith("inductor") for placement in self.placements)

    @property
    def seconds(self) -> float:
        """Wall seconds of all stages."""
        return sum(seconds for _, seconds in self.stage_seconds)


def record(report: GraphReport) -> None:
    """Keep a report for `reports` and `last_report`."""
    with _lock:
        _reports.append(report)


def reports() -> tuple[GraphReport, ...]:
    """Reports since the last `torch._dynamo.reset()`, oldest first; at most 256."""
    with _lock:
        return tuple(_reports)


def last_report() -> GraphReport | None:
    """The newest report, or None when nothing was compiled."""
    with _lock:
        return _reports[-1] if _reports else None


def clear() -> None:
    """Forget all reports."""
    with _lock:
        _reports.clear()


def new_dump_folder(dump_dir: str) -> str:
    """Create and return the folder of the next graph; "" when it is not wanted or fails."""
    if not dump_dir:
        return ""
    folder = os.path.join(dump_dir, f"graph-{os.getpid()}-{next(_dump_numbers):03d}")
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        log.warning("no dump: %s cannot be created (%s)", folder, error)
        return ""
    return folder


def show_graph(gm: fx.GraphModule, when: str, folder: str) -> None:
    """Make a graph visible: `<folder>/<when>.py`, and `moeflex_<when>` in a structured trace."""
    _trace(f"moeflex_{when}", "string", lambda: readable(gm))
    if folder:
        _write(os.path.join(folder, f"{when}.py"), readable(gm))


def show_report(report: GraphReport, folder: str) -> None:
    """Make a report visible: `<folder>/report.json`, and the artifact `moeflex_report`."""
    _trace("moeflex_report", "json", lambda: to_json(report))
    if folder:
        _write(os.path.join(folder, "report.json"), to_json(report))


def readable(gm: fx.GraphModule) -> str:
    """The code of a graph with shapes and dtypes, or without them where printing those fails."""
    try:
        return gm.print_readable(print_output=False) + "\n"
    except Exception as error:
        return f"# shapes left out: {error}\n{gm.code}\n"


def to_json(report: GraphReport) -> str:
    """The report as JSON text; infinite numbers become the strings "inf" and "-inf"."""
    return json.dumps(_plain(dataclasses.asdict(report)), indent=2, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return repr(value)
    return value


def _trace(name: str, encoding: str, payload: Any) -> None:
    trace_structured = getattr(torch._logging, "trace_structured", None)
    if trace_structured is None:
        return
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
    )


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        log.warning("no dump: %s cannot be written (%s)", path, error)
