"""The page and the picture of a report: they hold the whole report, and nothing from outside."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from moe_compiler.block_groups import group_blocks
from moe_compiler.codec import decode
from moe_compiler.codegen.floor import FORMULA, H200, expert_tensors, floor_points
from moe_compiler.codegen.report_dot import render_dot
from moe_compiler.codegen.report_html import REPORT_MARK, payload, render_html
from moe_compiler.errors import OptionError
from moe_compiler.ir import (
    ActivationKind,
    ActivationSpec,
    ExpertSpec,
    GateLayout,
    MoERegion,
    Normalize,
    Proof,
    RouterSpec,
    Score,
)
from moe_compiler.model_report import (
    BlockGraph,
    BlockReport,
    GraphNode,
    ModelReport,
    OutlineNode,
    OutsideNode,
    Stage,
    Status,
)

TEMPLATE = (Path(__file__).parents[2] / "templates" / "inspect.html").read_text(encoding="utf-8")
HOSTILE = '</script><img src="https://example.com/x" onerror=alert(1)>\\"'


def block(name: str) -> BlockReport:
    experts = ExpertSpec(
        num_experts=8,
        hidden=64,
        intermediate=32,
        gate_layout=GateLayout.CONCAT,
        activation=ActivationSpec(kind=ActivationKind.SILU, gate_max=7.0),
    )
    region = MoERegion(
        name=name,
        module_class="Moe",
        router=RouterSpec(score=Score.SOFTMAX, top_k=2, num_experts=8, normalize=Normalize.SUM),
        experts=experts,
        num_tokens=0,
        x_dtype="bf16",
        weight_dtype="bf16",
        out_dtype="bf16",
        form="grouped",
        proof=Proof(max_error=1e-16, num_runs=16, precision="fp64", seconds=0.5, peak_bytes=1000),
    )
    return BlockReport(
        name=name,
        module_class="Moe",
        status=Status.MATCHED,
        router=region.router.kind,
        region=region,
        target="cpu",
        tensors=expert_tensors(experts, "bf16"),
        expert_bytes=98304,
        bytes_per_expert=12288,
        active_bytes_per_token=24576,
        floors=floor_points(experts, 2, "bf16", H200, (1, 64)),
        graph_idx=0,
    )


@pytest.fixture
def report() -> ModelReport:
    refused = BlockReport(
        name="layers.2.mlp",
        module_class="Odd",
        status=Status.REFUSED,
        reason=HOSTILE,
        target="inductor",
    )
    graph = BlockGraph(
        nodes=(
            GraphNode(
                name="linear",
                op="linear",
                stage=Stage.ROUTER,
                shape="[T, 8] bf16",
                inputs=("x", "w"),
            ),
            GraphNode(
                name="sum_1",
                op="sum",
                stage=Stage.COMBINE,
                shape="[T, 64] bf16",
                inputs=("linear",),
            ),
        ),
        outside=(OutsideNode(name="x", role="x", shape="[T, 64] bf16"),),
        output="sum_1",
    )
    run = OutlineNode(
        label="layers.0-1",
        module_class="Layer",
        num_parameters=100,
        num_bytes=200,
        repeat=2,
        children=(
            OutlineNode(
                label="mlp", module_class="Moe", num_parameters=90, num_bytes=180, blocks=(0, 1)
            ),
        ),
    )
    return ModelReport(
        target='a "quoted" target',
        model_class="Model<T>",
        level="torch",
        phase="prefill",
        input_note="one sequence",
        dtype="bf16",
        num_parameters=1000,
        parameter_bytes=2000,
        num_graphs=1,
        num_graph_nodes=50,
        machine=H200,
        tokens=(1, 64),
        floor_formula=FORMULA,
        blocks=(block("layers.0.mlp"), block("layers.1.mlp"), refused),
        graphs=(graph,),
        outline=(
            run,
            OutlineNode(label="norm", module_class="Norm", num_parameters=64, num_bytes=128),
        ),
    )


class Collector(html.parser.HTMLParser):
    """Tags with their attributes, and the text of the data element."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.stored = ""
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script" and dict(attrs).get("id") == "data"

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, text: str) -> None:
        if self._inside:
            self.stored += text


def parse(page: str) -> Collector:
    collector = Collector()
    collector.feed(page)
    return collector


def test_the_page_holds_the_report(report: ModelReport) -> None:
    stored = json.loads(parse(render_html(report, TEMPLATE)).stored)
    assert decode(ModelReport, stored["report"]) == report
    assert [group["label"] for group in stored["groups"]] == ["layers.0-1.mlp", "layers.2.mlp"]
    assert stored["totals"]["floors"][0]["floor_us"] == pytest.approx(
        2 * report.blocks[0].floors[0].floor_us
    )


def test_text_of_the_model_never_becomes_markup(report: ModelReport) -> None:
    page = render_html(report, TEMPLATE)
    empty = render_html(dataclasses.replace(report, blocks=(), outline=(), graphs=()), TEMPLATE)
    assert [tag for tag, _ in parse(page).tags] == [tag for tag, _ in parse(empty).tags]
    assert "<title>Model&lt;T&gt; - moeflex inspect</title>" in page


def test_the_page_loads_nothing(report: ModelReport) -> None:
    page = render_html(report, TEMPLATE)
    for tag, attributes in parse(page).tags:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    for loader in (
        r"url\(\s*['\"]?(?!#)",
        r"@import",
        r"\bfetch\(",
        r"XMLHttpRequest",
        r"\bimport\(",
    ):
        assert not re.search(loader, TEMPLATE), loader


def test_the_curve_of_the_chart_covers_the_table(report: ModelReport) -> None:
    curve = payload(report)["groups"][0]["curve"]  # type: ignore[index]
    tokens = [point["tokens"] for point in curve]
    assert tokens == sorted(set(tokens))
    assert (tokens[0], tokens[-1]) == (1, 64)
    at_64 = next(point for point in curve if point["tokens"] == 64)
    assert at_64["floor_us"] == report.blocks[0].floors[1].floor_us


def test_a_template_without_its_mark_is_refused(report: ModelReport) -> None:
    with pytest.raises(OptionError, match="it has it 0 times"):
        render_html(report, TEMPLATE.replace(REPORT_MARK, ""))


def test_equal_blocks_are_one_group_whatever_their_proof_cost(report: ModelReport) -> None:
    first, second = report.blocks[:2]
    assert second.region is not None
    reused = dataclasses.replace(second.region.proof, seconds=0.0, reused=True)
    second = dataclasses.replace(second, region=dataclasses.replace(second.region, proof=reused))
    assert [group.indices for group in group_blocks((first, second))] == [(0, 1)]
    other = dataclasses.replace(second, target="inductor")
    assert [group.indices for group in group_blocks((first, other))] == [(0,), (1,)]


def test_dot_draws_each_run_once(report: ModelReport) -> None:
    text = render_dot(report)
    assert text.count("subgraph cluster_") == 1
    assert "layers.0-1  x2  (Layer)" in text
    assert "softmax>top2>sum" in text
    assert " -> " in text


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
def test_graphviz_accepts_the_picture(report: ModelReport) -> None:
    hostile = dataclasses.replace(report, outline=())  # lists the blocks, the hostile reason too
    for text in (render_dot(report), render_dot(hostile)):
        done = subprocess.run(
            ["dot", "-Tsvg"], input=text, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "<svg" in done.stdout
