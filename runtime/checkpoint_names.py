"""Which stored tensors make up which parameter: by name, or by the conversions of transformers.

Checkpoints hold experts one by one where current models hold them stacked. transformers has a table of
such conversions for every model; it is read here, and nothing of it is written again. Conversions
that are renamings, stacks and concatenations are understood; others are refused by name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from moe_compiler.errors import CheckpointError
from moe_compiler.runtime.checkpoint import Checkpoint, ParameterSource, StoredTensor


def find_sources(
    model: nn.Module, checkpoint: Checkpoint, wanted: Mapping[str, Tensor]
) -> tuple[dict[str, ParameterSource], list[str]]:
    """The source of every wanted parameter or buffer that the checkpoint has, and the tensors that nobody wants.

    Args:
        model: a module; of transformers, its conversions are followed.
        checkpoint: what there is.
        wanted: parameters and buffers by qualified name.

    Raises:
        CheckpointError: a shape or dtype differs, or a conversion is not understood.
    """
    names = _Names(model, wanted)
    collected: dict[str, dict[str, list[StoredTensor]]] = {}
    ways: dict[str, Any] = {}
    unused = []
    for key in sorted(checkpoint.tensors, key=names.order):
        target, pattern, converter = names.resolve(key)
        if target not in wanted:
            unused.append(key)
            continue
        collected.setdefault(target, {}).setdefault(pattern, []).append(checkpoint.tensors[key])
        ways[target] = converter
    sources = {}
    faults = []
    for target, by_pattern in collected.items():
        source = _source(target, by_pattern, ways[target], wanted[target])
        fault = source.fault()
        if fault:
            faults.append(f"{target}: {fault}")
        sources[target] = source
    if faults:
        raise CheckpointError(
            f"{len(faults)} tensors of {checkpoint.folder} do not fit the model: "
            + "; ".join(faults[:5])
        )
    return sources, unused


class _Names:
    """Names of stored tensors as names of the model."""

    def __init__(self, model: nn.Module, wanted: Mapping[str, Tensor]) -> None:
        self._wanted = wanted
        self._rename: Any = None
        self._order: Any = None
        base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
        if base is None or not isinstance(model, base):
            return
        try:
            table = importlib.import_module("transformers.conversion_mapping")
            loading = importlib.import_module("transformers.core_model_loading")
            entries = table.get_model_conversion_mapping(model)
            self._rename, self._order = loading.rename_source_key, loading.dot_natural_key
            kind = loading.WeightConverter
        except (ImportError, AttributeError) as error:
            raise CheckpointError(
                f"the conversions of this transformers cannot be read ({error}); version 5.17 or newer is needed"
            ) from error
        self._prefix = model.base_model_prefix
        self._renamings = [entry for entry in entries if not isinstance(entry, kind)]
        self._converters = [entry for entry in entries if isinstance(entry, kind)]
        self._by_pattern = {p: c for c in self._converters for p in c.source_patterns}

    def order(self, key: str) -> Any:
        """Experts by number, not by spelling."""
        return self._order(key) if self._order is not None else key

    def resolve(self, key: str) -> tuple[str, str, Any]:
        """(name in the model, which part of it, its conversion or None)."""
        if key in self._wanted or self._rename is None:
            return key, "", None
        target, pattern = self._rename(
            key, self._renamings, self._converters, self._prefix, self._wanted
        )
        if pattern is None:
            return target, "", None
        return target, pattern, self._by_pattern.get(pattern)


def _source(
    target: str, by_pattern: Mapping[str, list[StoredTensor]], converter: Any, like: Tensor
) -> ParameterSource:
    stacked, axis, patterns = False, 0, list(by_pattern)
    if converter is not None:
        stacked, axis = _meaning(target, converter.operations)
        # The order of the parts is the table's, not that of the names.
        patterns = [p for p in converter.source_patterns if p in by_pattern]
        lacking = sorted(set(converter.source_patterns) - set(patterns))
        if lacking:
            raise CheckpointError(f"{target} is made of several tensors, and {lacking} are missing")
    return ParameterSource(
        parts=tuple(tuple(by_pattern[pattern]) for pattern in patterns),
        stacked=stacked,
        axis=axis,
        shape=tuple(like.shape),
        dtype=like.dtype,
    )


def _meaning(target: str, operations: Sequence[Any]) -> tuple[bool, int]:
    """(stacked along the first axis, axis of the concatenation) of a conversion."""
    kinds = [type(operation).__name__ for operation in operations]
    axes = [int(getattr(operation, "dim", None) or 0) for operation in operations]
    if kinds == ["MergeModulelist"] and axes == [0]:
        return True, 1
    if kinds == ["MergeModulelist", "Concatenate"] and axes[0] == 0 and axes[1]:
        return True, axes[1]
    if kinds == ["Concatenate"]:
        return False, axes[0]
    raise CheckpointError(
        f"{target} is made by the conversion {' + '.join(kinds)} of transformers, which is not read straight from "
        "files. Load the checkpoint with transformers once, and save it again in the model's own form "
        "(save_pretrained with save_original_format=False)"
    )
