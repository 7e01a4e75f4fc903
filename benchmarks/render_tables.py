"""Write the tables of README.md and docs/results.md from what they describe.

A table stands between `<!-- table NAME -->` and `<!-- end of table -->`. NAME is `options`,
`switches`, or the name of a file in `benchmarks/results` without `.json`. `--check` writes nothing
and fails when a table is not current.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_compiler.options import OPTION_NAMES, Options
from moe_compiler.settings import SWITCHES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")
MARKED = re.compile(r"(<!-- table (\S+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)

# What was run, in the order of the columns; one is left out when all rows agree.
SUBJECT = ("model", "shape", "dtype", "layout", "routing", "phase", "cache", "tokens", "threads")
# Whose times are no rival's: lower bounds, and what people do without a compiler.
BOUNDS = ("floor_us", "matmul_us", "public_us")
NO_RIVALS = ("eager_us",)


@dataclasses.dataclass(frozen=True)
class Wording:
    """How a benchmark's fields are called in its table."""

    unit: str = "us"
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ratio: str = "best rival / moeflex"
    inverted: bool = False  # the ratio column says how much more time moeflex takes
    more: Mapping[str, str] = dataclasses.field(default_factory=dict)  # further fields, last


WORDINGS = {
    "cpu_layer": Wording(
        labels={
            "inductor_grouped_us": "Inductor, `grouped_mm`",
            "inductor_batched_us": "Inductor, `batched_mm`",
            "matmul_us": "plain matmuls (ceiling)",
        }
    ),
    "h200_e2e": Wording(
        labels={"inductor_grouped_us": "Inductor, `grouped_mm`"},
        more={
            "ours_tokens_per_s_48_layers": "moeflex, tokens/s",
            "inductor_grouped_tokens_per_s_48_layers": "Inductor, tokens/s",
        },
    ),
    "h200_layer": Wording(
        labels={
            "triton_us": "fused Triton, without its sort",
            "grouped_graph_us": "`_grouped_mm` chain in a graph",
            "matmul_us": "`bmm` of equal FLOPs",
        }
    ),
    "compile_time": Wording(
        unit="s",
        labels={"inductor_us": "Inductor alone"},
        ratio="moeflex / Inductor",
        inverted=True,
    ),
}
LABELS = {"ours_us": "moeflex", "eager_us": "eager", "floor_us": "floor", "public_us": "published"}


def is_time(row: Mapping[str, Any], field: str) -> bool:
    """Whether a field holds the time of ours or of a peer."""
    return field.endswith("_us") and not field.startswith("stage_") and row[field] is not None


def columns(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """The fields that say what was run, and the fields that hold times."""
    names = [name for row in rows for name in row]
    subject = [
        name
        for name in SUBJECT
        if name in names and (name == "tokens" or len({str(row.get(name)) for row in rows}) > 1)
    ]
    times = dict.fromkeys(name for row in rows for name in row if is_time(row, name))
    last = [name for name in BOUNDS if name in times]
    return subject, [name for name in times if name not in BOUNDS] + last


def format_time(microseconds: float | None, unit: str) -> str:
    """Three significant digits at most, `-` where nothing was measured."""
    if microseconds is None:
        return "-"
    value = microseconds / 1e6 if unit == "s" else microseconds
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{min(digits, 2)}f}"


def ratio(row: Mapping[str, Any], inverted: bool) -> float | None:
    """Time of the fastest rival over ours, or the inverse."""
    rivals = [
        row[name]
        for name in row
        if is_time(row, name) and name not in (*BOUNDS, *NO_RIVALS, "ours_us")
    ]
    if not rivals or not row.get("ours_us"):
        return None
    value = float(min(rivals) / row["ours_us"])
    return 1 / value if inverted else value


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def render(result: Mapping[str, Any]) -> str:
    """One result file as a Markdown table with its circumstances below."""
    rows = result["rows"]
    wording = WORDINGS.get(result["benchmark"], Wording())
    subject, times = columns(rows)
    ratios = [ratio(row, wording.inverted) for row in rows]
    names = {**LABELS, **wording.labels}
    head = [name.replace("_", " ") for name in subject]
    head += [f"{names.get(n, n[:-3].replace('_', ' '))}, {wording.unit}" for n in times]
    known = [value for value in ratios if value is not None]
    if known:
        head.append(wording.ratio)
    head += wording.more.values()
    lines = ["| " + " | ".join(head) + " |"]
    lines.append(
        "|" + "|".join([" --- "] * len(subject) + [" ---: "] * (len(head) - len(subject))) + "|"
    )
    for row, value in zip(rows, ratios, strict=True):
        cells = [str(row.get(name, "-")) for name in subject]
        cells += [format_time(row.get(name), wording.unit) for name in times]
        if known:
            cells.append("-" if value is None else f"{value:.2f}x")
        cells += [f"{row[name]:,.0f}" if row.get(name) else "-" for name in wording.more]
        lines.append("| " + " | ".join(cells) + " |")
    if known:
        lines += ["", f"Geometric mean of the last column: **{geometric_mean(known):.2f}x**."]
    versions = ", ".join(
        f"{name} {version}" for name, version in result["versions"].items() if version
    )
    lines += [
        "",
        f"{result['device']}; {versions}; commit {result['commit'][:9]}, {result['date'][:10]}; "
        f"`{result['command']}`",
    ]
    return "\n".join(lines) + "\n"


def switches_table() -> str:
    """The environment switches."""
    lines = ["| switch | default | effect |", "| --- | --- | --- |"]
    lines += [f"| `{s.name}` | {s.default} | {s.effect} |" for s in SWITCHES]
    return "\n".join(lines) + "\n"


def options_table() -> str:
    """The options of `torch.compile`, from the docstring of `Options`."""
    attributes = inspect.cleandoc(Options.__doc__ or "").split("Attributes:\n")[1]
    effects = dict(re.findall(r"^    (\w+): (.*(?:\n      .*)*)", attributes, re.MULTILINE))
    lines = ["| option | default | effect |", "| --- | --- | --- |"]
    for field in dataclasses.fields(Options):
        if field.name in OPTION_NAMES:
            effect = " ".join(effects[field.name].split())
            lines.append(f"| `{field.name}` | `{field.default!r}` | {effect} |")
    return "\n".join(lines) + "\n"


GENERATED = {"options": options_table, "switches": switches_table}


def rendered(text: str) -> str:
    """The text with every marked table rendered anew; a table whose file is missing says so."""

    def replace(match: re.Match[str]) -> str:
        path = RESULTS / f"{match[2]}.json"
        if match[2] in GENERATED:
            body = GENERATED[match[2]]()
        elif path.exists():
            body = render(json.loads(path.read_text()))
        else:
            body = f"Not measured yet (`benchmarks/results/{path.name}` does not exist).\n"
        return f"{match[1]}{body}{match[4]}"

    return MARKED.sub(replace, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 when `--check` finds a table that is not current."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    check = parser.parse_args(arguments).check
    stale = []
    for page in PAGES:
        text = page.read_text()
        new = rendered(text)
        if new == text:
            print(f"{page.name}: every table is current")
        elif check:
            stale.append(page.name)
        else:
            page.write_text(new)
            print(f"{page.name}: tables written")
    if stale:
        print(
            f"a table of {', '.join(stale)} differs from what it shows; run: make tables",
            file=sys.stderr,
        )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
