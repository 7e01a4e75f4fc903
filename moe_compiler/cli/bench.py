"""`moeflex bench`: a model or a block, compiled by moeflex, by Inductor alone, and in eager mode."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_compiler.cli.options import (
    MODEL_HELP,
    Axis,
    Dtype,
    Experts,
    Json,
    Quiet,
    parse_shape,
    parse_tokens,
)
from moe_compiler.settings import parse_names

if TYPE_CHECKING:
    from moe_compiler.bench import BenchReport


def command(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", show_default=False, help=MODEL_HELP + ".")
    ] = "",
    shape: Annotated[
        str,
        typer.Option(
            metavar="E,K,H,I",
            show_default=False,
            help="Instead of a model: a Qwen3-MoE block of this shape, random weights.",
        ),
    ] = "",
    tokens: Annotated[str, typer.Option(metavar="T,T,...", help="Token counts.")] = "1,16,256",
    contenders: Annotated[
        str, typer.Option(metavar="NAME,...", help="Some of moeflex, inductor, eager.")
    ] = "moeflex,inductor,eager",
    seconds: Annotated[
        float, typer.Option(min=0.0, help="To spend on a row, once everything is compiled.")
    ] = 2.0,
    threads: Annotated[
        int, typer.Option(min=0, metavar="N", help="Of the CPU; 0 for torch's choice.")
    ] = 0,
    public: Annotated[
        str,
        typer.Option(
            metavar="CSV",
            show_default=False,
            help="Published times to print beside: experts, top_k, hidden, intermediate, tokens, latency_us.",
        ),
    ] = "",
    axis: Axis = 0,
    dtype: Annotated[Dtype | None, typer.Option(help="Instead of the model's own.")] = None,
    experts_implementation: Experts = "",
    json_file: Json = "",
    quiet: Quiet = False,
) -> None:
    """Measure a model or one MoE block on this CPU: moeflex, Inductor alone, eager, and the floor of the experts.

    Contenders take turns on fresh random inputs; medians are shown. The floor is the time below which the experts
    cannot run here, from the read speed and the matrix rate measured on this machine.

    Example: `moeflex bench --shape 64,6,1024,704 --tokens 1,16,256 --dtype bf16`
    """
    from moe_compiler.bench import Request, bench
    from moe_compiler.cli.terminal import give, working

    request = Request(
        model=model,
        shape=parse_shape(shape) if shape else (),
        tokens=parse_tokens(tokens),
        contenders=parse_names(contenders),
        seconds=seconds,
        axis=axis,
        dtype=dtype.value if dtype else "",
        experts_implementation=experts_implementation,
        threads=threads,
        public=public,
    )
    with working(quiet=quiet) as progress:
        report = bench(request, progress)
    give(lambda out: _print(out, report), lambda: _json(report), json_file=json_file, quiet=quiet)


def _json(report: BenchReport) -> str:
    rows = [{**dataclasses.asdict(row), "speedup": row.speedup} for row in report.rows]
    fields = {**dataclasses.asdict(report), "rows": rows}
    return json.dumps(fields, indent=2) + "\n"


def _print(out: Any, report: BenchReport) -> None:
    from rich.markup import escape
    from rich.table import Table

    from moe_compiler.cli.units import time_text

    out.print(f"[bold]{escape(report.title)}[/] on {escape(report.machine)}")
    names = list(report.rows[0].times_us)
    table = Table(box=None, pad_edge=False)
    for name in ("tokens", *names, "floor", "published", "inductor / moeflex"):
        table.add_column(name, justify="right")
    for row in report.rows:
        times = [row.times_us[name] for name in names] + [row.floor_us, row.public_us]
        cells = ["-" if value is None else time_text(value) for value in times]
        speedup = "-" if row.speedup is None else f"{row.speedup:.2f}x"
        table.add_row(str(row.tokens), *cells, speedup)
    out.print(table)
    for note in report.notes:
        out.print(f"note: {escape(note)}")
