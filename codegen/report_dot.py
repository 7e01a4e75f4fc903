"""A model report as a graphviz picture: the model from top to bottom, MoE blocks coloured."""

from __future__ import annotations

from collections.abc import Iterator

from moe_compiler.model_report import BlockReport, ModelReport, OutlineNode, Status

_COLOURS = {Status.MATCHED: "#c9efd5", Status.REFUSED: "#fde7b0", Status.UNSEEN: "#f6cccc"}


def render_dot(report: ModelReport) -> str:
    """The text of one `digraph`. Runs of equal layers are one box; a model without a module tree lists its blocks."""
    writer = _Writer(report)
    lines = [
        "digraph model {",
        '  graph [rankdir=TB, fontname="Helvetica", labelloc=t, compound=true, label='
        + _quote(_title(report))
        + "];",
        '  node [shape=box, style="rounded,filled", fillcolor="#f4f5f7", color="#8a93a3", fontname="Helvetica"];',
        '  edge [color="#8a93a3"];',
        *writer.outline(report.outline or _flat(report), indent="  "),
        *writer.edges,
        "}",
    ]
    return "\n".join(lines) + "\n"


def _title(report: ModelReport) -> str:
    return f"{report.model_class}: {report.count(Status.MATCHED)} of {len(report.blocks)} MoE blocks matched"


def _flat(report: ModelReport) -> tuple[OutlineNode, ...]:
    return tuple(
        OutlineNode(
            label=block.name,
            module_class=block.module_class,
            num_parameters=0,
            num_bytes=0,
            blocks=(i,),
        )
        for i, block in enumerate(report.blocks)
    )


class _Writer:
    def __init__(self, report: ModelReport) -> None:
        self.report = report
        self.edges: list[str] = []
        self._count = 0
        self._last = ""

    def outline(self, nodes: tuple[OutlineNode, ...], indent: str) -> Iterator[str]:
        for node in nodes:
            self._count += 1
            if node.children:
                yield f"{indent}subgraph cluster_{self._count} {{"
                yield f'{indent}  style="rounded"; color="#8a93a3"; label={_quote(_heading(node))};'
                yield from self.outline(node.children, indent + "  ")
                yield f"{indent}}}"
            else:
                yield f"{indent}{self._leaf(node)}"

    def _leaf(self, node: OutlineNode) -> str:
        name = f"n{self._count}"
        if self._last:
            self.edges.append(f"  {self._last} -> {name};")
        self._last = name
        lines = [_heading(node)]
        if not node.blocks:
            return f"{name} [label={_quote(*lines)}];"
        blocks = [self.report.blocks[index] for index in node.blocks]
        lines += _block_lines(blocks[0])
        colour = _COLOURS[blocks[0].status]
        return f'{name} [label={_quote(*lines)}, fillcolor="{colour}", tooltip={_quote(blocks[0].name)}];'


def _heading(node: OutlineNode) -> str:
    times = f"  x{node.repeat}" if node.repeat > 1 else ""
    return f"{node.label}{times}" + (f"  ({node.module_class})" if node.module_class else "")


def _block_lines(block: BlockReport) -> list[str]:
    if block.region is None:
        return [f"{block.status}: {block.reason[:120]}"]
    spec = block.region.experts
    return [
        block.router,
        f"E{spec.num_experts} K{block.region.top_k} H{spec.hidden} I{spec.intermediate} {block.region.weight_dtype}",
    ]


def _quote(*lines: str) -> str:
    escaped = (line.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") for line in lines)
    return '"' + "\\n".join(escaped) + '"'
