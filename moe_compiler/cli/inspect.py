"""`moeflex inspect`: what moeflex finds in a model, and how fast it could be."""

from __future__ import annotations

import enum
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from moe_compiler.cli import EXIT_NOT_FULFILLED
from moe_compiler.cli.options import Dtype, Experts, Json, Quiet, parse_tokens, write_text
from moe_compiler.errors import OptionError

if TYPE_CHECKING:
    from moe_compiler.model_report import ModelReport

TOKENS = "1,16,64,256,2048,8192"


class Phase(str, enum.Enum):
    """Which example input a language model is traced with."""

    prefill = "prefill"
    decode = "decode"


class Shapes(str, enum.Enum):
    """How the token count is traced."""

    dynamic = "dynamic"
    static = "static"


class Device(str, enum.Enum):
    """The machine of the floors."""

    h200 = "h200"
    a100 = "a100"
    l40s = "l40s"
    b200 = "b200"
    cpu = "cpu"


class Level(str, enum.Enum):
    """The graph that is looked at."""

    torch = "torch"
    aten = "aten"


def command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="MODULE:FACTORY or FILE.py:FACTORY (gives a module, or a pair (module, example_inputs)), or a "
            "Hugging Face config.json or its folder (built without weights).",
        ),
    ],
    tokens: Annotated[
        str, typer.Option(metavar="T,T,...", help="Token counts of the floor times.")
    ] = TOKENS,
    phase: Annotated[
        Phase,
        typer.Option(help="prefill: one sequence of T tokens; decode: T sequences of one token."),
    ] = Phase.prefill,
    shapes: Annotated[
        Shapes, typer.Option(help="Trace the token count as a symbol, or as the first of --tokens.")
    ] = Shapes.dynamic,
    experts_implementation: Experts = "",
    dtype: Annotated[Dtype | None, typer.Option(help="Instead of the model's own.")] = None,
    device: Annotated[
        Device, typer.Option(help="The machine of the floor times and of the target.")
    ] = Device.h200,
    bandwidth: Annotated[
        float,
        typer.Option(
            metavar="GB/S",
            min=0.0,
            show_default=False,
            help="Instead of the device's weight-read speed.",
        ),
    ] = 0.0,
    tflops: Annotated[
        float,
        typer.Option(
            metavar="TFLOP/S",
            min=0.0,
            show_default=False,
            help="Instead of the device's matrix rate.",
        ),
    ] = 0.0,
    level: Annotated[
        Level, typer.Option(help="torch: the graph of dynamo; aten: that of torch.export.")
    ] = Level.torch,
    meta: Annotated[
        bool,
        typer.Option("--meta", help='Call the factory under torch.device("meta"): no weights.'),
    ] = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="One row per block; equal blocks are folded otherwise.")
    ] = False,
    json_file: Json = "",
    dot_file: Annotated[
        str,
        typer.Option(
            "--dot", metavar="FILE", help="Write a graphviz picture; - for standard output."
        ),
    ] = "",
    html_file: Annotated[
        str, typer.Option("--html", metavar="FILE", help="Write one self-contained page.")
    ] = "",
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 when a block was not matched.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Find the MoE blocks of a model, prove them, and predict how fast they could be. Nothing is compiled.

    Each block is shown with its router, its experts, what runs it, and its floor: the time below which its experts
    cannot run, from the bytes that must be read and the products that must be computed. A block that was left alone is
    shown with the reason.

    Example: `moeflex inspect ./Qwen3-235B-A22B/config.json --html report.html`
    """
    counts = parse_tokens(tokens)
    if [json_file, dot_file, html_file].count("-") > 1:
        raise OptionError("only one of --json, --dot and --html can go to standard output (-)")

    from moe_compiler.cli.terminal import reader_may_leave, working
    from moe_compiler.inspection import Request, inspect_model
    from moe_compiler.model_report import Status

    request = Request(
        target=target,
        tokens=counts,
        phase=phase.value,
        shapes=shapes.value,
        experts_implementation=experts_implementation,
        dtype=dtype.value if dtype else "",
        device=device.value,
        level=level.value,
        meta=meta,
        bandwidth_gbps=bandwidth,
        tflops=tflops,
    )
    with working(quiet=quiet) as progress:
        report = inspect_model(request, progress)
    to_stdout = "-" in (json_file, dot_file, html_file)
    with reader_may_leave():
        if not quiet and not to_stdout:
            from moe_compiler.cli.report_table import print_report

            print_report(report, show_all=show_all)
        _write_files(report, json_file, dot_file, html_file)
    unmatched = len(report.blocks) - report.count(Status.MATCHED)
    if strict and unmatched:
        print(
            f"moeflex: --strict: {unmatched} of {len(report.blocks)} blocks not matched",
            file=sys.stderr,
        )
        raise typer.Exit(EXIT_NOT_FULFILLED)


def _write_files(report: ModelReport, json_file: str, dot_file: str, html_file: str) -> None:
    if json_file:
        write_text("--json", json_file, report.to_json(indent=2) + "\n")
    if dot_file:
        from moe_compiler.codegen.report_dot import render_dot

        write_text("--dot", dot_file, render_dot(report))
    if html_file:
        from importlib import resources

        from moe_compiler.codegen.report_html import render_html

        page = resources.files("moe_compiler.templates").joinpath("inspect.html")
        write_text("--html", html_file, render_html(report, page.read_text(encoding="utf-8")))
