"""`moeflex diff`: what is different between two artifacts."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_compiler.cli import EXIT_NOT_FULFILLED
from moe_compiler.cli.options import Json, Quiet

if TYPE_CHECKING:
    from moe_compiler.difference import Difference


def command(
    first: Annotated[str, typer.Argument(metavar="A", help="An artifact (.mflx).")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    json_file: Json = "",
    quiet: Quiet = False,
) -> None:
    """Show what differs between two artifacts: the model, the machine, versions, MoE blocks, kernels, weights, code.

    Both are checked as a load checks them, and neither is run; `moeflex verify A B` runs both. Exit code 0 for
    artifacts that are equal, 1 for those that differ.

    Example: `moeflex diff yesterday.mflx today.mflx`
    """
    import contextlib

    from moe_compiler.cli.terminal import give
    from moe_compiler.difference import differences
    from moe_compiler.runtime.artifact_runner import open_archive

    manifests = []
    for path in (first, second):
        archive, manifest = open_archive(path)
        with contextlib.closing(archive):
            manifests.append(manifest)
    found = differences(*manifests)
    report = {
        "first": first,
        "second": second,
        "equal": not found,
        "differences": [dataclasses.asdict(one) for one in found],
    }
    give(
        lambda out: _print(out, first, second, found),
        lambda: json.dumps(report, indent=2) + "\n",
        json_file=json_file,
        quiet=quiet,
    )
    if found:
        raise typer.Exit(EXIT_NOT_FULFILLED)


def _print(out: Any, first: str, second: str, found: list[Difference]) -> None:
    from rich.markup import escape
    from rich.table import Table

    if not found:
        out.print(f"[green]equal[/]: {escape(first)} and {escape(second)}")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("area", "what", first, second):
        table.add_column(escape(name), overflow="fold")
    for one in found:
        table.add_row(*map(escape, (one.area, one.what, one.first or "-", one.second or "-")))
    out.print(table)
