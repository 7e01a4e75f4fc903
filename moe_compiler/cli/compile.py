"""`moeflex compile`: a model becomes one file that runs without a compiler and without the model's code."""

from __future__ import annotations

import enum
import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from moe_compiler.cli.options import (
    MODEL_HELP,
    Axis,
    Dtype,
    Experts,
    Json,
    Quiet,
    parse_range,
)
from moe_compiler.settings import parse_names

if TYPE_CHECKING:
    from rich.console import Console

    from moe_compiler.artifact import Manifest


class Target(str, enum.Enum):
    """What the artifact runs on."""

    cpu = "cpu"
    sm_90a = "sm_90a"


class Place(str, enum.Enum):
    """Where the weights go."""

    inside = "inside"
    outside = "outside"


class CpuIsa(str, enum.Enum):
    """What the CPU must have."""

    native = "native"
    avx2 = "avx2"
    avx512 = "avx512"


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP + ".")],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="The artifact.")
    ] = "model.mflx",
    tokens: Annotated[
        str,
        typer.Option(
            metavar="MIN:MAX", help="Token counts that a call may have; one count for only that."
        ),
    ] = "1:8192",
    axis: Axis = 0,
    dtype: Annotated[Dtype | None, typer.Option(help="Instead of the model's own.")] = None,
    target: Annotated[Target, typer.Option(help="What the artifact runs on.")] = Target.cpu,
    layouts: Annotated[
        str, typer.Option(metavar="NAME,...", help="single; ep and tp are not built yet.")
    ] = "single",
    weights: Annotated[
        Place,
        typer.Option(help="inside: in the artifact; outside: in a safetensors file beside it."),
    ] = Place.inside,
    cpu_isa: Annotated[
        CpuIsa,
        typer.Option(help="native: CPUs like this one; avx2, avx512: any CPU that has these."),
    ] = CpuIsa.native,
    experts_implementation: Experts = "",
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail when a block would be left to Inductor.")
    ] = False,
    json_file: Json = "",
    quiet: Quiet = False,
) -> None:
    """Compile a model into one file that loads without a compiler, without transformers and without the model's code.

    Load it with `moe_compiler.load("model.mflx")` and call it as the model is called. A configuration without a
    checkpoint beside it gets random weights; other ones can be loaded afterwards. The last line is the SHA-256 that
    `load(..., sha256=...)` pins.

    Example: `moeflex compile ./Qwen3-30B-A3B -o qwen3.mflx --tokens 1:8192`
    """
    from moe_compiler.ahead import Request, compile_model
    from moe_compiler.cli.terminal import give, working

    request = Request(
        model=model,
        output=output,
        tokens=parse_range(tokens),
        axis=axis,
        dtype=dtype.value if dtype else "",
        target=target.value,
        layouts=parse_names(layouts),
        weights=weights.value,
        cpu_isa=cpu_isa.value,
        experts_implementation=experts_implementation,
        strict=strict,
    )
    start = time.perf_counter()
    with working(quiet=quiet) as progress:
        manifest, sha256 = compile_model(request, progress)
    seconds = time.perf_counter() - start
    give(
        lambda out: _print(manifest, output, sha256, seconds, out),
        lambda: report(manifest, output, sha256),
        json_file=json_file,
        quiet=quiet,
    )


def report(manifest: Manifest, path: str, sha256: str) -> str:
    """An artifact as JSON text."""
    fields = json.loads(manifest.to_json())
    return json.dumps({"path": path, "sha256": sha256, "manifest": fields}, indent=2) + "\n"


def _print(manifest: Manifest, path: str, sha256: str, seconds: float, out: Console) -> None:
    from rich.markup import escape

    from moe_compiler.cli.units import bytes_text

    first, last = manifest.tokens
    out.print(
        f"[bold]{escape(path)}[/]  {escape(manifest.model)} for {manifest.target}, {first} to {last} tokens, "
        f"in {seconds:.1f} s"
    )
    counts: dict[str, int] = {}
    for block in manifest.blocks:
        counts[block.target] = counts.get(block.target, 0) + 1
    for title, count in counts.items():
        style = "yellow" if title.startswith("inductor") else "green"
        out.print(f"[{style}]{count} MoE blocks[/]: {escape(title)}")
    if not manifest.blocks:
        out.print("[yellow]no MoE block[/] was matched: Inductor compiled all of it")
    for refused in manifest.refused:
        where = escape(refused.name or refused.node)
        out.print(f"[yellow]left to Inductor[/]: {where}: {escape(refused.reason)}")
    code = sum(m.num_bytes for m in manifest.members if m.name.endswith(".so"))
    place = "inside" if manifest.weights.where == "inside" else f"in {manifest.weights.file}"
    origin = f" ({manifest.weights.origin})" if manifest.weights.origin else ""
    out.print(
        f"code {bytes_text(code)}; weights {bytes_text(manifest.weights.num_bytes)} {escape(place + origin)}"
    )
    for note in manifest.notes:
        out.print(f"note: {escape(note)}")
    out.print(f"sha256 {sha256}")
