"""Equal blocks put together under one label, for tables and pictures."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from moe_compiler.model_report import BlockReport


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockGroup:
    """Blocks that differ in nothing but their name.

    Attributes:
        label: e.g. `model.layers.3-60.mlp`.
        indices: their places in `ModelReport.blocks`.
        block: the first of them.
    """

    label: str
    indices: tuple[int, ...]
    block: BlockReport


def group_blocks(blocks: Sequence[BlockReport]) -> tuple[BlockGroup, ...]:
    """Put equal blocks together, in the order in which each kind first appears."""
    members: dict[BlockReport, list[int]] = {}
    for index, block in enumerate(blocks):
        members.setdefault(block.likeness, []).append(index)
    return tuple(
        BlockGroup(
            label=fold_names([blocks[index].name for index in indices]),
            indices=tuple(indices),
            block=blocks[indices[0]],
        )
        for indices in members.values()
    )


def fold_names(names: Sequence[str]) -> str:
    """One label for names that differ in one number: `a.3-60.mlp`, `a.1,3,5.mlp`, `a.1-93:2.mlp`.

    Names that differ otherwise become `first .. last`.
    """
    if len(set(names)) == 1:
        return names[0]
    rows = [name.split(".") for name in names]
    if len({len(row) for row in rows}) == 1:
        varying = [i for i, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1]
        if len(varying) == 1 and all(row[varying[0]].isdigit() for row in rows):
            folded = list(rows[0])
            folded[varying[0]] = fold_numbers([int(row[varying[0]]) for row in rows])
            return ".".join(folded)
    return f"{names[0]} .. {names[-1]}"


def fold_numbers(numbers: Sequence[int]) -> str:
    """`3-60` for consecutive numbers, `1-93:2` for a fixed step, else `0-2,4-6,9` (at most six runs)."""
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1 and min(steps) > 1:
        return f"{numbers[0]}-{numbers[-1]}:{steps.pop()}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs]
    return ",".join(texts) if len(texts) <= 6 else ",".join([*texts[:4], "..", texts[-1]])
