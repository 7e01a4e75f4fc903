"""The module tree of a model as a short outline: layers expanded, runs of equal ones folded."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from moe_compiler.block_groups import fold_names, fold_numbers
from moe_compiler.model_report import BlockReport, OutlineNode

MAX_PERIOD = 8
"""Longest pattern of layers that is folded (hybrid models repeat four to eight different layers)."""

_LISTS = (nn.ModuleList, nn.Sequential)


def build_outline(module: nn.Module, blocks: Sequence[BlockReport]) -> tuple[OutlineNode, ...]:
    """The outline of `module`; empty when it has no submodules.

    Args:
        module: the model.
        blocks: its blocks; those whose name is a module's are shown at their place.
    """
    kinds: dict[BlockReport, int] = {}
    places: dict[str, int] = {}
    likeness = []
    for index, block in enumerate(blocks):
        likeness.append(kinds.setdefault(block.likeness, len(kinds)))
        places.setdefault(block.name, index)
    builder = _Builder(places, likeness)
    return builder.children(module, "", in_layer=False)


@dataclasses.dataclass(frozen=True)
class _Builder:
    places: Mapping[str, int]  # block name -> index
    likeness: Sequence[int]  # block index -> number of its kind

    def leaf(self, module: nn.Module, label: str, block: int | None) -> OutlineNode:
        parameters = list(module.parameters())
        return OutlineNode(
            label=label,
            module_class=type(module).__name__,
            num_parameters=sum(p.numel() for p in parameters),
            num_bytes=sum(p.numel() * p.element_size() for p in parameters),
            blocks=() if block is None else (block,),
        )

    def children(self, module: nn.Module, path: str, *, in_layer: bool) -> tuple[OutlineNode, ...]:
        found: list[OutlineNode] = []
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            if isinstance(child, _LISTS) and child_path not in self.places and not in_layer:
                entries = [
                    self.node(entry, f"{name}.{number}", f"{child_path}.{number}", in_layer=True)
                    for number, entry in child.named_children()
                ]
                found += self.fold(entries)
            else:
                found.append(self.node(child, name, child_path, in_layer=in_layer))
        return tuple(found)

    def node(self, module: nn.Module, label: str, path: str, *, in_layer: bool) -> OutlineNode:
        block = self.places.get(path)
        found = self.leaf(module, label, block)
        is_layer = in_layer and label.rpartition(".")[2].isdigit()
        if block is not None or not (
            is_layer or self._holds_block(path) or self._holds_list(module, in_layer)
        ):
            return found
        return dataclasses.replace(found, children=self.children(module, path, in_layer=in_layer))

    def _holds_block(self, path: str) -> bool:
        return any(name.startswith(f"{path}.") for name in self.places)

    @staticmethod
    def _holds_list(module: nn.Module, in_layer: bool) -> bool:
        return not in_layer and any(isinstance(m, _LISTS) and len(m) > 1 for m in module.modules())

    def signature(self, node: OutlineNode) -> Any:
        """Equal for nodes that differ in nothing but numbers in their names."""
        return (
            node.module_class,
            node.num_parameters,
            node.num_bytes,
            node.repeat,
            tuple(self.likeness[index] for index in node.blocks),
            tuple((child.label, self.signature(child)) for child in node.children),
        )

    def fold(self, nodes: Sequence[OutlineNode]) -> list[OutlineNode]:
        """Fold repeated patterns of neighbours, longest cover first."""
        signatures = [self.signature(node) for node in nodes]
        folded: list[OutlineNode] = []
        start = 0
        while start < len(nodes):
            period, count = _best_pattern(signatures[start:])
            run = nodes[start : start + period * count]
            folded.append(self._pattern(run, period) if period > 1 else _merge(run))
            start += period * count
        return folded

    def _pattern(self, run: Sequence[OutlineNode], period: int) -> OutlineNode:
        first = run[:period]
        children = []
        for _, group in itertools.groupby(
            range(period), key=lambda slot: self.signature(first[slot])
        ):
            slots = set(group)
            members = [node for place, node in enumerate(run) if place % period in slots]
            children.append(_merge(members, repeat=len(slots)))
        return OutlineNode(
            label=_label([node.label for node in run]),
            module_class="",
            num_parameters=sum(node.num_parameters for node in first),
            num_bytes=sum(node.num_bytes for node in first),
            repeat=len(run) // period,
            children=tuple(children),
        )


def _best_pattern(signatures: Sequence[Any]) -> tuple[int, int]:
    """(period, repetitions) of the pattern that covers most of the start; the shortest of equals."""
    best = (1, 1)
    for period in range(1, min(MAX_PERIOD, len(signatures) // 2) + 1):
        count = 1
        while signatures[count * period : (count + 1) * period] == signatures[:period]:
            count += 1
        if count > 1 and count * period > best[0] * best[1]:
            best = (period, count)
    return best


def _label(labels: Sequence[str]) -> str:
    """The labels in one; numbers that come out of order are sorted."""
    parts = [label.rpartition(".") for label in labels]
    if len({head for head, _, _ in parts}) == 1 and all(number.isdigit() for *_, number in parts):
        numbers = fold_numbers(sorted({int(number) for *_, number in parts}))
        return f"{parts[0][0]}.{numbers}"
    return fold_names(labels)


def _merge(nodes: Sequence[OutlineNode], repeat: int | None = None) -> OutlineNode:
    """One node for equal ones: their blocks side by side."""
    first = nodes[0]
    return dataclasses.replace(
        first,
        label=_label([node.label for node in nodes]),
        repeat=first.repeat * len(nodes) if repeat is None else repeat,
        blocks=tuple(index for node in nodes for index in node.blocks),
        children=tuple(
            _merge(column, repeat=column[0].repeat)
            for column in zip(*(node.children for node in nodes), strict=True)
        ),
    )
