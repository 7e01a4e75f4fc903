"""`moeflex doctor`: what this machine has, what will work, and what to do about the rest."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import typer

from moe_compiler.cli import EXIT_NOT_FULFILLED
from moe_compiler.cli.options import Json, Quiet

if TYPE_CHECKING:
    from moe_compiler.runtime.doctor import Finding

_STYLES = {"ok": "green", "absent": "yellow", "broken": "red"}


def command(json_file: Json = "", quiet: Quiet = False) -> None:
    """Look at the packages, the compilers, the GPUs, the shared memory and the cache folder of this machine.

    Each is shown with what it means for moeflex: *ok*, *absent* (not here, and what it would add), or *broken* (needed
    and not working, with what to do). Exit code 1 where something is broken.

    Example: `moeflex doctor --json -`
    """
    from moe_compiler import __version__
    from moe_compiler.cli.terminal import give, progress_line
    from moe_compiler.runtime import doctor

    with progress_line(quiet=quiet) as progress:
        findings = doctor.examine(progress)
    works = doctor.works(findings)
    report: dict[str, Any] = {
        "moeflex": __version__,
        "system": doctor.system(),
        "works": works,
        "findings": [{**dataclasses.asdict(f), "verdict": f.verdict.value} for f in findings],
    }
    give(
        lambda out: _print(out, findings, f"moeflex {__version__} on {doctor.system()}"),
        lambda: json.dumps(report, indent=2) + "\n",
        json_file=json_file,
        quiet=quiet,
    )
    if not works:
        raise typer.Exit(EXIT_NOT_FULFILLED)


def _print(out: Any, findings: list[Finding], title: str) -> None:
    from rich.markup import escape
    from rich.table import Table

    out.print(f"[bold]{escape(title)}[/]")
    table = Table(box=None, pad_edge=False)
    for name in ("", "what", "found", "means"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        means = escape(finding.effect)
        if finding.advice:
            means += ("; " if means else "") + f"[bold]to do[/]: {escape(finding.advice)}"
        verdict = finding.verdict.value
        table.add_row(
            f"[{_STYLES[verdict]}]{verdict}[/]", escape(finding.what), escape(finding.found), means
        )
    out.print(table)
