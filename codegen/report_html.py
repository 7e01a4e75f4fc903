"""A model report as one self-contained page: the template `inspect.html` with the report in it."""

from __future__ import annotations

import json

from moe_compiler.block_groups import group_blocks
from moe_compiler.codec import encode
from moe_compiler.codegen.floor import floor_points
from moe_compiler.describe_block import (
    experts_text,
    form_text,
    layout_text,
    proof_text,
    router_steps,
    shared_text,
    weight_text,
)
from moe_compiler.errors import OptionError
from moe_compiler.model_report import BlockReport, ModelReport

REPORT_MARK = "/*REPORT*/"
TITLE_MARK = "<!--TITLE-->"


def render_html(report: ModelReport, template: str) -> str:
    """Put `report` into the text of `templates/inspect.html`.

    Raises:
        OptionError: the template has not each mark once.
    """
    for mark in (REPORT_MARK, TITLE_MARK):
        if template.count(mark) != 1:
            raise OptionError(
                f"the page template needs {mark} once; it has it {template.count(mark)} times"
            )
    page = template.replace(TITLE_MARK, _escape(f"{report.model_class} - moeflex inspect"))
    return page.replace(REPORT_MARK, script_json(payload(report)))


def payload(report: ModelReport) -> dict[str, object]:
    """What the page reads: the report, the groups of equal blocks, and each group in words."""
    return {
        "report": encode(report),
        "groups": [
            {
                "label": group.label,
                "indices": list(group.indices),
                "words": _words(group.block),
                "curve": _curve(report, group.block),
            }
            for group in group_blocks(report.blocks)
        ],
        "totals": {
            "expert_bytes": report.expert_bytes,
            "proof_seconds": report.proof_seconds,
            "proof_peak_bytes": report.proof_peak_bytes,
            "floors": [
                {
                    "tokens": tokens,
                    "floor_us": report.floor_us(tokens),
                    "floor_random_us": report.floor_us(tokens, routing="random"),
                }
                for tokens in report.tokens
            ],
        },
    }


def _words(block: BlockReport) -> dict[str, object]:
    if block.region is None:
        return {}
    return {
        "router": list(router_steps(block.region.router)),
        "experts": experts_text(block.region),
        "activation": block.region.experts.activation.name,
        "layout": layout_text(block.region),
        "weight": weight_text(block.region),
        "form": form_text(block.region),
        "shared": shared_text(block.region),
        "proof": proof_text(block.region.proof),
    }


def _curve(report: ModelReport, block: BlockReport) -> list[object]:
    """Floors at four token counts an octave, from 1 to the largest one asked for, for the chart."""
    region = block.region
    if region is None:
        return []
    last = max(*report.tokens, 16)
    steps = range(4 * last.bit_length())
    tokens = sorted({1, last, *(count for i in steps if (count := round(2 ** (i / 4))) < last)})
    points = floor_points(region.experts, region.top_k, region.weight_dtype, report.machine, tokens)
    return [encode(point) for point in points]


def script_json(value: object) -> str:
    """JSON that may stand inside of a `<script>` element: no tag can end it, no comment can open in it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
