"""`moeflex replay`: how a routing would be scheduled over several ranks."""

from __future__ import annotations

import dataclasses
import enum
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_compiler.cli.options import Json, Quiet, parse_shape
from moe_compiler.errors import OptionError

_BYTES = 2  # of one value that is sent


class Schedule(str, enum.Enum):
    """What the search may choose from."""

    all = "spatial+temporal"
    spatial = "spatial"
    serial = "serial"


def command(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="balanced, random, power-law:A (such as power-law:1.2), or a file of ids: .npy [T, K] or [L, T, K]; "
            ".csv, a token a line; .jsonl, a layer a line.",
        ),
    ],
    shape: Annotated[
        str,
        typer.Option(
            metavar="E,K,H,I", help="Experts, experts a token, hidden, expert intermediate."
        ),
    ],
    ranks: Annotated[int, typer.Option(min=1, max=1024, help="GPUs that share the experts.")] = 2,
    tokens: Annotated[
        int,
        typer.Option(min=1, max=1 << 20, help="Tokens of all ranks together, where generated."),
    ] = 4096,
    schedule: Annotated[
        Schedule, typer.Option(help="What the search may choose from.")
    ] = Schedule.all,
    json_file: Json = "",
    quiet: Quiet = False,
) -> None:
    """Plan the layers of a routing trace, for every GPU. The scheduler is that of the kernels; the times are simulated.

    Each row shows how many SMs communicate, in how many chunks the experts are computed, and how many tiles the
    communicating SMs take over.

    Example: `moeflex replay power-law:1.2 --shape 128,8,2048,768 --ranks 4`
    """
    sizes = parse_shape(shape)
    if ranks > sizes[0]:
        raise OptionError(f"--ranks {ranks} is more than the {sizes[0]} experts of --shape")
    rows = _plan(trace, sizes, ranks, tokens, schedule.value)

    from moe_compiler.cli.terminal import give
    from moe_compiler.runtime.schedule_twin import AssumedMachine

    note = f"SIMULATED with assumed curves ({AssumedMachine().title}); no time was measured"
    report = {"note": note, "schedule": schedule.value, "ranks": ranks, "rows": rows}
    give(
        lambda out: _print(out, rows, note),
        lambda: json.dumps(report, indent=2) + "\n",
        json_file=json_file,
        quiet=quiet,
    )


def _plan(
    trace: str, shape: tuple[int, int, int, int], num_ranks: int, num_tokens: int, schedule: str
) -> list[dict[str, Any]]:
    from moe_compiler.runtime import routing_trace, schedule_twin

    num_experts, top_k, hidden, _ = shape
    if Path(trace).suffix in (".npy", ".csv", ".jsonl"):
        ids = routing_trace.read(Path(trace))
        if ids.shape[2] != top_k:
            raise OptionError(f"{trace} has {ids.shape[2]} ids a token, --shape has K = {top_k}")
    else:
        ids = routing_trace.generate(trace, num_tokens, num_experts, top_k)
    rows = []
    for layer, routes in enumerate(ids):
        for rank, load in enumerate(routing_trace.traffic(routes, num_experts, num_ranks)):
            plan = schedule_twin.plan_rank(
                load.counts,
                shape=shape,
                num_ranks=num_ranks,
                num_tokens=load.num_tokens,
                in_bytes=load.arrivals * hidden * _BYTES,
                out_bytes=load.results * hidden * _BYTES,
                schedule=schedule,
            )
            own = {"layer": layer, "rank": rank, "num_tokens": load.num_tokens}
            rows.append({**own, **dataclasses.asdict(plan)})
    return rows


def _print(console: Any, rows: list[dict[str, Any]], note: str) -> None:
    from rich import box
    from rich.table import Table

    from moe_compiler.cli.units import bytes_text, time_text

    table = Table(box=box.SIMPLE_HEAD)
    heads = "layer,GPU,tokens,rows,fullest expert,in,out,comm SMs,chunks,stolen tiles,predicted,simulated"
    for head in heads.split(","):
        table.add_column(head, justify="right")
    for row in rows:
        names = ("layer", "rank", "num_tokens", "num_rows", "max_expert_rows")
        cells = [str(row[name]) for name in names]
        cells += [bytes_text(row["in_bytes"]), bytes_text(row["out_bytes"])]
        if row["num_rows"] == 0:
            cells += ["-"] * 5
        else:
            cells += [str(row[n]) for n in ("num_comm_sms", "num_chunks", "num_steal_tiles")]
            cells += [time_text(row["predicted_us"]), time_text(row["simulated_us"])]
        table.add_row(*cells)
    console.print(table)
    console.print(note)
