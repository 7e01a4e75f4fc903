"""`moeflex cache`: what lies in the cache folder, whether it is whole, and how to make it smaller."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_compiler.cli import EXIT_NOT_FULFILLED
from moe_compiler.cli.options import Json, Quiet
from moe_compiler.errors import OptionError

if TYPE_CHECKING:
    from moe_compiler.runtime.cache_files import Entry

_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


class Action(str, enum.Enum):
    """What to do."""

    ls = "ls"
    verify = "verify"
    prune = "prune"


def command(
    action: Annotated[
        Action,
        typer.Argument(
            help="ls: list; verify: read every build and compare it with what was recorded; prune: remove."
        ),
    ] = Action.ls,
    older_than: Annotated[
        float,
        typer.Option(metavar="DAYS", min=0.0, help="prune: builds and proofs that are older."),
    ] = 90.0,
    max_bytes: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            show_default=False,
            help="prune: keep the youngest up to this size, as 500MB or 2GB.",
        ),
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="prune: say what would go, remove nothing.")
    ] = False,
    json_file: Json = "",
    quiet: Quiet = False,
) -> None:
    """List, verify or prune the folder where kernels, libraries and proofs are kept between processes.

    Nothing in it is needed: what is missing is built or proven again. A damaged build is never used; `verify` finds it
    (exit code 1), and `prune` removes it, together with the logs of failed builds and what interrupted processes left.

    Example: `moeflex cache prune --older-than 30 --max-bytes 1GB`
    """
    keep = parse_bytes(max_bytes) if max_bytes else None

    from moe_compiler.cli.terminal import give, progress_line
    from moe_compiler.runtime import cache_files
    from moe_compiler.runtime.build import cache_root

    root = cache_root()
    with progress_line(quiet=quiet) as progress:
        progress("reading the cache folder")
        found = cache_files.entries(root)
        states: dict[str, str] = {}
        if action is Action.verify:
            for entry in found:
                progress(f"verifying {entry.name}")
                states[entry.name] = cache_files.check(root, entry).value
        shown = found
        if action is Action.prune:
            shown = cache_files.outdated(
                root, found, older_than_s=older_than * 86400, keep_bytes=keep
            )
            if not dry_run:
                shown = cache_files.remove(root, shown)
    give(
        lambda out: _print(out, root, action, shown, states, dry_run),
        lambda: _report(root, action, shown, states, dry_run),
        json_file=json_file,
        quiet=quiet,
    )
    if "damaged" in states.values():
        raise typer.Exit(EXIT_NOT_FULFILLED)


def parse_bytes(text: str) -> int:
    """`500MB`, `2 GB`, `1000` to a number of bytes; powers of ten.

    Raises:
        OptionError: it is no size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)b?\s*", text.lower())
    if match is None:
        raise OptionError(f"--max-bytes takes a size such as 500MB or 2GB; got {text!r}")
    return int(float(match[1]) * _BYTES[match[2]])


def _report(
    root: Path, action: Action, shown: list[Entry], states: dict[str, str], dry_run: bool
) -> str:
    rows: list[dict[str, Any]] = []
    for entry in shown:
        row = {**dataclasses.asdict(entry), "kind": entry.kind.value, "age_s": round(entry.age_s)}
        if entry.name in states:
            row["state"] = states[entry.name]
        rows.append(row)
    report = {"folder": str(root), "action": action.value, "dry_run": dry_run, "entries": rows}
    return json.dumps(report, indent=2) + "\n"


def _print(
    out: Any, root: Path, action: Action, shown: list[Entry], states: dict[str, str], dry_run: bool
) -> None:
    from rich.markup import escape
    from rich.table import Table

    from moe_compiler.cli.units import bytes_text

    total = bytes_text(sum(entry.num_bytes for entry in shown))
    if action is Action.prune:
        verb = "would be removed" if dry_run else "removed"
        out.print(f"[bold]{escape(str(root))}[/]: {len(shown)} entries {verb}, {total}")
    else:
        out.print(f"[bold]{escape(str(root))}[/]: {len(shown)} entries, {total}")
    if not shown:
        return
    table = Table(box=None, pad_edge=False)
    for name, justify in (("kind", "left"), ("entry", "left"), ("size", "right"), ("age", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    if states:
        table.add_column("state")
    for entry in _folded(shown):
        cells = [entry.kind.value, escape(entry.name), bytes_text(entry.num_bytes), age_text(entry)]
        if states:
            state = states.get(entry.name, "unknown")
            cells.append(f"[red]{state}[/]" if state == "damaged" else state)
        table.add_row(*cells)
    out.print(table)


def _folded(shown: list[Entry]) -> list[Entry]:
    """Proofs, of which there are hundreds, as one row."""
    proofs = [entry for entry in shown if entry.kind.value == "proof"]
    if len(proofs) < 2:
        return shown
    total = sum(entry.num_bytes for entry in proofs)
    oldest = max(entry.age_s for entry in proofs)
    row = dataclasses.replace(
        proofs[0], name=f"{len(proofs)} files in proofs/", num_bytes=total, age_s=oldest
    )
    return [*(entry for entry in shown if entry.kind.value != "proof"), row]


def age_text(entry: Entry) -> str:
    """`12 s`, `3 h`, `40 days`."""
    for limit, factor, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if entry.age_s < limit:
            return f"{entry.age_s / factor:.0f} {unit}"
    return f"{entry.age_s / 86400:.0f} days"
