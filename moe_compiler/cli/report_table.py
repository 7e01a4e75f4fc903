"""A model report as tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moe_compiler.block_groups import BlockGroup, group_blocks
from moe_compiler.cli.terminal import output_console
from moe_compiler.cli.units import bytes_text, count_text, time_text
from moe_compiler.describe_block import (
    experts_text,
    form_text,
    layout_text,
    proof_text,
    shared_text,
)
from moe_compiler.model_report import FloorPoint, ModelReport, Status

WIDE = 200
"""Columns from which on each fact gets a column of its own on a terminal."""

_STYLES = {Status.MATCHED: "green", Status.REFUSED: "yellow", Status.UNSEEN: "red"}


def print_report(
    report: ModelReport, *, show_all: bool = False, console: Console | None = None
) -> None:
    """Print a report.

    Args:
        report: what to print.
        show_all: one row per block; equal blocks share a row otherwise.
        console: where to; standard output by default.
    """
    out = console or output_console()
    groups = _singles(report) if show_all else group_blocks(report.blocks)
    _print_head(report, out)
    matched = [group for group in groups if group.block.status is Status.MATCHED]
    if matched:
        out.print(_blocks_table(matched, out))
        for group in matched:
            if group.block.region and group.block.region.router_note:
                note = f"{_label(group)}: the router stays in the graph: {group.block.region.router_note}"
                out.print(escape(note))
        out.print(_floors_table(report, matched, out))
        _print_floor_notes(report, out)
    _print_unmatched([g for g in groups if g.block.status is not Status.MATCHED], out)
    _print_foot(report, out)


def _singles(report: ModelReport) -> tuple[BlockGroup, ...]:
    return tuple(
        BlockGroup(label=block.name, indices=(index,), block=block)
        for index, block in enumerate(report.blocks)
    )


def _print_head(report: ModelReport, out: Console) -> None:
    out.print(
        f"[bold]{escape(report.model_class)}[/]  {count_text(report.num_parameters)} parameters, "
        f"{bytes_text(report.parameter_bytes)} {report.dtype}"
    )
    level = "torch level (dynamo)" if report.level == "torch" else "ATen level (torch.export)"
    out.print(
        f"{_plural(report.num_graphs, 'graph')} of {report.num_graph_nodes} nodes at {level}; "
        f"{report.phase}: {escape(report.input_note)}"
    )
    for note in (*report.capture_notes, *report.notes):
        out.print(f"note: {escape(note)}")
    if not report.blocks:
        out.print(
            "\nNo MoE block and no candidate for one was found: moeflex compiles this model as Inductor would."
        )
        return
    counts = ", ".join(
        f"[{_STYLES[status]}]{report.count(status)} {status}[/]"
        for status in Status
        if report.count(status)
    )
    share = report.expert_bytes / report.parameter_bytes if report.parameter_bytes else 0.0
    experts = f"; matched experts {bytes_text(report.expert_bytes)}" if report.expert_bytes else ""
    percent = f", {share:.1%} of the model" if 0.0 < share <= 1.0 else ""
    out.print(f"{_plural(len(report.blocks), 'MoE block')}: {counts}{experts}{percent}\n")


def _table(title: str, out: Console) -> Table:
    """A boxed table on a terminal; elsewhere columns of one line per row."""
    if out.is_terminal:
        return Table(title=title, title_justify="left", title_style="bold", box=box.ROUNDED)
    out.print(f"# {title}")
    return Table(box=None, pad_edge=False)


def _blocks_table(groups: Iterable[BlockGroup], out: Console) -> Table:
    """Every fact in a column of its own where lines may be long; grouped into few columns on a screen."""
    wide = not out.is_terminal or out.width >= WIDE
    table = _table("MoE blocks", out)
    columns = (
        "block",
        "class",
        "router",
        "experts",
        "weights",
        "form",
        "shared",
        "runs on",
        "proof",
    )
    for name in columns if wide else ("block", "router", "experts", "runs on, proof"):
        table.add_column(name, overflow="fold")
    for column in ("bytes", "a token reads") if wide else ("bytes\na token",):
        table.add_column(column, justify="right", no_wrap=True)
    for group in groups:
        facts = [escape(text) for text in _facts(group)]
        facts[0] = f"[green]{facts[0]}[/]"
        if wide:
            table.add_row(*facts)
            continue
        label, module_class, router, experts, layout, form, shared, target, proof, size, read = (
            facts
        )
        extra = "" if shared == "none" else f"\nshared expert: {shared}"
        table.add_row(
            f"{label}\n{module_class}",
            router,
            f"{experts}\n{layout}\n{form}{extra}",
            f"{target}\n{proof}",
            f"{size}\n{read}",
            end_section=True,
        )
    return table


def _facts(group: BlockGroup) -> tuple[str, ...]:
    block = group.block
    region = block.region
    assert region is not None
    return (
        _label(group),
        block.module_class,
        block.router,
        experts_text(region),
        layout_text(region),
        form_text(region),
        shared_text(region),
        block.target,
        proof_text(region.proof),
        bytes_text(block.expert_bytes),
        bytes_text(block.active_bytes_per_token),
    )


def _label(group: BlockGroup) -> str:
    return group.label + (f" x{len(group.indices)}" if len(group.indices) > 1 else "")


def _floors_table(report: ModelReport, groups: Sequence[BlockGroup], out: Console) -> Table:
    table = _table(f"Floor of one block on {report.machine.title}", out)
    table.add_column("block", overflow="fold")
    for tokens in report.tokens:
        table.add_column(f"T={tokens}", justify="right")
    for group in groups:
        table.add_row(escape(_label(group)), *(_floor_text(point) for point in group.block.floors))
    if len(report.blocks) > 1:
        table.add_section()
        total = (time_text(report.floor_us(tokens)) for tokens in report.tokens)
        table.add_row("all matched blocks", *total)
    return table


def _floor_text(point: FloorPoint) -> str:
    text = time_text(point.floor_us) + (" F" if point.bound == "flop" else " W")
    if point.floor_random_us < 0.995 * point.floor_us:
        text += f" ({time_text(point.floor_random_us)})"
    return text


def _print_floor_notes(report: ModelReport, out: Console) -> None:
    machine = report.machine
    dtypes = dict.fromkeys(block.region.weight_dtype for block in report.blocks if block.region)
    rates = "; ".join(
        f"{machine.rate(dtype).flop_per_s / 1e12:.4g} TFLOP/s {dtype} ({machine.rate(dtype).source})"
        for dtype in dtypes
    )
    out.print(
        "W: bound by reading weights, F: by FLOP. Routes spread evenly; in brackets the mean under random routing, "
        "where it differs."
    )
    out.print(escape(f"{report.floor_formula}."))
    out.print(
        escape(f"{machine.weight_bytes_per_s / 1e9:.4g} GB/s ({machine.weight_source}); {rates}."),
    )
    sizes = [block.workspace_bytes for block in report.blocks if any(block.workspace_bytes)]
    if sizes:
        largest = (max(column) for column in zip(*sizes, strict=True))
        counts = zip(report.tokens, largest, strict=True)
        text = ", ".join(f"T={tokens} {bytes_text(size)}" for tokens, size in counts)
        out.print(escape(f"Workspace of a launch, shared by all blocks: {text}."))
    out.print()


def _print_unmatched(groups: Sequence[BlockGroup], out: Console) -> None:
    if not groups:
        return
    table = _table("Left to Inductor", out)
    for name in ("block", "class", "status", "reason"):
        table.add_column(name, overflow="fold")
    for group in groups:
        block = group.block
        style = _STYLES[block.status]
        table.add_row(
            escape(_label(group)),
            escape(block.module_class),
            f"[{style}]{block.status}[/]",
            escape(block.reason),
        )
    out.print(table)


def _print_foot(report: ModelReport, out: Console) -> None:
    stages = ", ".join(f"{stage.name} {stage.seconds:.1f} s" for stage in report.stages)
    proof = ""
    if report.count(Status.MATCHED):
        proof = f"proofs {report.proof_seconds:.1f} s and at most {bytes_text(report.proof_peak_bytes)}; "
    out.print(f"{proof}{stages}; peak memory {bytes_text(report.peak_rss_bytes)}")


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
