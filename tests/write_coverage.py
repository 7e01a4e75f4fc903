"""Write docs/coverage.md: what is matched, traced how, and what is left alone and why.

python -m tests.write_coverage [-j PROCESSES]
"""

from __future__ import annotations

import argparse
import multiprocessing
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from moe_compiler.ir import MoERegion
from moe_compiler.passes.match_moe import find_regions
from moe_compiler.runtime import capture
from tests.models import grid, styles, zoo

ROOT = Path(__file__).parent.parent

PHASES = {"prefill": "prefill", "decode_dynamic_cache": "decode", "decode_static_cache": "decode"}

HEAD = """# What is recognised

Written by `python -m tests.write_coverage` (torch {torch}, transformers {transformers}); the same
cells are tests in `tests/test_coverage.py`. Every model is the published architecture with tiny
random weights.

Each count is over several ways to trace the model: static and dynamic token counts, fp32 and bf16,
`torch.compile` (prefill, decode with a dynamic and with a static cache) and `torch.export`
(prefill). `2/2` says that both times every MoE block was found, proven by execution, and is what
the model's source code says.

## Hugging Face families

| family | experts | prefill | decode | router | experts as traced | expert tensors | shared |
|---|---|---|---|---|---|---|---|
"""

STYLES_HEAD = """
`eager` experts are a loop over the experts that have tokens, which does not trace; it is traced
through the `grouped_mm` function of transformers while dynamo works for this backend
(`runtime/hf.py`), hence `grouped`.

## Plain modules

| style | what it is | router | experts as traced | expert tensors |
|---|---|---|---|---|
"""

LEFT_HEAD = """
## Left alone

They run as Inductor, or dynamo without it, would run them.

| module | what it is | reason |
|---|---|---|
"""


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)


def _run(cell: grid.Cell) -> tuple[grid.Cell, grid.Outcome | str]:
    try:
        return cell, grid.run(cell)
    except Exception as error:
        return cell, f"{type(error).__name__}: {error}"


def _tensors(region: MoERegion) -> str:
    spec = region.experts
    parts = [spec.gate_layout.value.replace("_", " "), spec.w13_orientation.value]
    if spec.w2_orientation is not spec.w13_orientation:
        parts.append(f"down {spec.w2_orientation.value}")
    parts += ["biases"] if spec.has_b13 else []
    parts += ["weight on the input"] if spec.weight_position.value == "input" else []
    return ", ".join([*parts, spec.activation.name])


def _router(regions: Iterable[MoERegion]) -> str:
    return ", ".join(dict.fromkeys(f"`{r.router.kind}`" for r in regions))


def _score(outcomes: list[grid.Outcome | str]) -> str:
    if not outcomes:
        return ""
    good = sum(isinstance(o, grid.Outcome) and bool(o.regions) and not o.problems for o in outcomes)
    return f"{good}/{len(outcomes)}"


def _family_rows(results: Mapping[grid.Cell, grid.Outcome | str], left: list[str]) -> list[str]:
    rows = []
    for name, family in zoo.FAMILIES.items():
        for implementation in family.implementations:
            cells = [c for c in results if (c.family, c.implementation) == (name, implementation)]
            by_phase: dict[str, list[grid.Outcome | str]] = {"prefill": [], "decode": []}
            for cell in cells:
                by_phase[PHASES[cell.phase]].append(results[cell])
            outcomes = [o for o in map(results.get, cells) if isinstance(o, grid.Outcome)]
            regions = [r for outcome in outcomes for r in outcome.regions]
            reasons = list(dict.fromkeys(r for outcome in outcomes for r in outcome.reasons))
            if not regions:
                reason = _shorten(reasons[0].partition(": ")[2] if reasons else "not seen")
                left.append(f"| `{name}` | Hugging Face, its own expert code | {reason} |")
                continue
            rows.append(
                f"| `{name}` | {implementation or 'its own'} | {_score(by_phase['prefill'])} "
                f"| {_score(by_phase['decode'])} | {_router(regions)} | {regions[0].form} "
                f"| {_tensors(regions[0])} | {regions[0].shared_expert} |"
            )
    return rows


def _shorten(reason: str) -> str:
    reason = reason.replace(str(ROOT) + "/", "").replace("|", "\\|").replace("\n", " ")
    head, mark, path = reason.partition("/site-packages/")
    return head.rpartition(" ")[0] + " " + path if mark else reason


def _style(name: str) -> tuple[list[MoERegion], list[str]]:
    torch._dynamo.reset()
    graphs = capture.capture_graphs(styles.build(name), (styles.rows(),))
    regions, reasons = [], []
    for gm, inputs in graphs:
        found = find_regions(gm, inputs)
        regions += [match.region for match in found.matches]
        reasons += [refused.reason for refused in found.refused]
        fragment = capture.fragment_reason(gm)
        reasons += [fragment.reason] if fragment is not None else []
    return regions, reasons


def _what(cls: Any) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0].replace("|", "\\|")


def _style_rows(left: list[str]) -> list[str]:
    rows = []
    for name, cls in {**styles.STYLES, **styles.UNKNOWN_ROUTERS}.items():
        regions, _ = _style(name)
        for region in regions:
            rows.append(
                f"| `{name}` | {_what(cls)} | `{region.router.kind}` | {region.form} "
                f"| {_tensors(region)} |"
            )
    for name, cls in {**styles.LOOPS, **styles.LOOKALIKES}.items():
        regions, reasons = _style(name)
        if regions:
            raise SystemExit(f"{name} must not match, and did: {regions}")
        reason = _shorten(reasons[0]) if reasons else "holds no selection of experts"
        left.append(f"| `{name}` | {_what(cls)} | {reason} |")
    return rows


def main() -> None:
    """Run the cells and write the table."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-j", "--jobs", type=int, default=2)
    arguments = parser.parse_args()
    _quiet()
    todo = list(grid.table_cells(tuple(zoo.FAMILIES)))
    results: dict[grid.Cell, grid.Outcome | str] = {}
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.jobs, initializer=_quiet, maxtasksperchild=60) as pool:
        for cell, outcome in pool.imap(_run, todo, chunksize=4):
            results[cell] = outcome
            text = outcome if isinstance(outcome, str) else ", ".join(outcome.problems) or "ok"
            print(f"{len(results)}/{len(todo)} {cell}: {text[:200]}", flush=True)
    left: list[str] = []
    head = HEAD.format(
        torch=torch.__version__.partition("+")[0], transformers=transformers.__version__
    )
    lines = [head + "\n".join(_family_rows(results, left))]
    lines.append(STYLES_HEAD + "\n".join(_style_rows(left)))
    lines.append(LEFT_HEAD + "\n".join(dict.fromkeys(left)) + "\n")
    path = ROOT / "docs" / "coverage.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
