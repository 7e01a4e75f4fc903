"""`moeflex verify`: what the compiled model gives beside what eager gives."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_compiler.cli import EXIT_NOT_FULFILLED
from moe_compiler.cli.options import (
    MODEL_HELP,
    Axis,
    Dtype,
    Experts,
    Json,
    Quiet,
    parse_tokens,
)

if TYPE_CHECKING:
    from moe_compiler.verify import Check, VerifyReport


def command(
    subject: Annotated[
        str, typer.Argument(metavar="A", help=f"An artifact (.mflx), or {MODEL_HELP}.")
    ],
    against: Annotated[
        str,
        typer.Argument(
            metavar="[B]",
            show_default=False,
            help="What it is compared with: the same kinds; by default the model of A in eager mode.",
        ),
    ] = "",
    tokens: Annotated[str, typer.Option(metavar="T,T,...", help="Token counts.")] = "2,16,64",
    routings: Annotated[
        int, typer.Option(min=1, metavar="N", help="Random inputs for each count.")
    ] = 3,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the first input.")] = 0,
    axis: Axis = 0,
    dtype: Annotated[Dtype | None, typer.Option(help="Instead of the model's own.")] = None,
    experts_implementation: Experts = "",
    json_file: Json = "",
    quiet: Quiet = False,
) -> None:
    """Compare a compiled model, or an artifact, with eager: the whole, and every MoE block by itself.

    Our error against fp32 may be twice that of eager in the same dtype, and one unit in the last place; in a half type
    the whole model is judged by the best three quarters of its rows, because rounding sends some tokens to other
    experts. The worst deviation is shown with its place. Exit code 1 where something is farther away.

    Example: `moeflex verify model.mflx --tokens 1,64,512`
    """
    from moe_compiler.cli.terminal import give, working
    from moe_compiler.verify import Request, verify

    request = Request(
        subject=subject,
        against=against,
        tokens=parse_tokens(tokens),
        routings=routings,
        seed=seed,
        axis=axis,
        dtype=dtype.value if dtype else "",
        experts_implementation=experts_implementation,
    )
    with working(quiet=quiet) as progress:
        report = verify(request, progress)
    give(lambda out: _print(out, report), lambda: _json(report), json_file=json_file, quiet=quiet)
    if not report.passed:
        raise typer.Exit(EXIT_NOT_FULFILLED)


def _json(report: VerifyReport) -> str:
    fields = dataclasses.asdict(report) | {"passed": report.passed}
    for row, check in zip(fields["checks"], report.checks, strict=True):
        row["passed"] = check.worst.passed
        if check.worst.note:  # JSON has no infinity
            row["worst"]["error"] = None
    return json.dumps(fields, indent=2) + "\n"


def _print(out: Any, report: VerifyReport) -> None:
    from rich.markup import escape
    from rich.table import Table

    out.print(f"[bold]{escape(report.subject)}[/] against {escape(report.against)}")
    table = Table(box=None, pad_edge=False)
    for name in ("", "what", "inputs", "worst error", "allowed", "where"):
        table.add_column(name, overflow="fold")
    for check in report.checks:
        worst = check.worst
        verdict = "[green]within[/]" if worst.passed else "[red]beyond[/]"
        error = worst.note or f"{worst.error:.2e}"
        cells = (check.what, str(check.num_inputs), error, f"{worst.allowed:.2e}", place(check))
        table.add_row(verdict, *map(escape, cells))
    out.print(table)
    for note in report.notes:
        out.print(f"note: {escape(note)}")


def place(check: Check) -> str:
    """`64 tokens, input 2: logits[0, 3, 7] is 1.25, should be 1.5`."""
    text = f"{check.tokens} tokens, input {check.seed}"
    if check.worst.note:
        return f"{text}: {check.output}" if check.output else text
    index = ", ".join(map(str, check.worst.index))
    return (
        f"{text}: {check.output}[{index}] is {check.worst.value:.6g}, should be "
        f"{check.worst.reference:.6g}"
    )
