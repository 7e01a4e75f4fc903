"""What one node of an FX graph is: its operator's name, its fake value, its sizes.

Works on torch-level graphs (from Dynamo, with methods and in-place operators) and on ATen graphs
(from `torch.export`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

VIEWS = frozenset(
    (
        "view",
        "reshape",
        "unsqueeze",
        "squeeze",
        "transpose",
        "permute",
        "t",
        "contiguous",
        "clone",
        "expand",
        "flatten",
        "_unsafe_view",
        "alias",
        "detach",
        "swapaxes",
        "movedim",
        "narrow",
        "unflatten",
        "expand_as",
        "view_as",
        "reshape_as",
        "ravel",
        "T",
        "mT",
        "numpy_T",
        "select",
        "slice",
        "matrix_transpose",
        "adjoint",
        "lift_fresh_copy",
        "to_local",
        "wait_tensor",
    )
)
"""Operators whose result holds the elements of their first argument and no arithmetic."""

CASTS = frozenset(
    (
        "to",
        "_to_copy",
        "float",
        "bfloat16",
        "half",
        "double",
        "type",
        "type_as",
        "convert_element_type",
    )
)
CONTRACTIONS = frozenset(
    (
        "mm",
        "bmm",
        "matmul",
        "linear",
        "addmm",
        "baddbmm",
        "einsum",
        "_grouped_mm",
        "grouped_mm",
        "grouped_mm_fallback",
        "rmatmul",
        "tensordot",
    )
)
_INPLACE_FUNCTIONS = frozenset(
    ("itruediv", "iadd", "imul", "isub", "setitem", "ifloordiv", "ipow", "iand", "ior")
)


def op_name(node: fx.Node) -> str:
    """Bare name of the operator, the same for method, function and ATen spellings."""
    target = node.target
    if node.op == "call_method":
        return str(target)
    if node.op == "call_function":
        if isinstance(target, torch._ops.OpOverload):
            return str(target._schema.name).split("::")[1]
        return str(getattr(target, "__name__", target))
    return node.op


def value(node: fx.Node) -> object:
    """The fake value recorded for this node, or None."""
    return node.meta.get("val", node.meta.get("example_value"))


def tensor(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor recorded for this node, or None when it is not a tensor."""
    found = value(node)
    return found if isinstance(found, torch.Tensor) else None


def is_float(node: fx.Node) -> bool:
    """Whether this node is a floating-point tensor."""
    found = tensor(node)
    return found is not None and found.is_floating_point()


def is_integer(node: fx.Node) -> bool:
    """Whether this node is a tensor of an index dtype."""
    found = tensor(node)
    return found is not None and found.dtype in (torch.int64, torch.int32)


def size_hint(size: Any) -> int | None:
    """The size as an int; for a symbol the size seen while tracing; None when there is none."""
    if isinstance(size, torch.SymInt):
        node = size.node
        return int(node.hint) if node.has_hint() else None
    return int(size)


def shape_hint(node: fx.Node) -> tuple[int | None, ...]:
    """Shape of a tensor node with symbols replaced by hints."""
    found = tensor(node)
    assert found is not None
    return tuple(size_hint(s) for s in found.shape)


def num_rows(node: fx.Node) -> int | None:
    """Product of all sizes but the last, or None when one has no hint."""
    rows = 1
    for size in shape_hint(node)[:-1]:
        if size is None:
            return None
        rows *= size
    return rows


def last_size(node: fx.Node) -> int | None:
    """Last size when it is static, else None."""
    found = tensor(node)
    return None if found is None or found.ndim == 0 else static_size(found.shape[-1])


def static_size(size: Any) -> int | None:
    """The size when it is fixed, also where a symbol was specialised to a number; else None."""
    if isinstance(size, torch.SymInt):
        fixed = size.node.maybe_as_int()
        return None if fixed is None else int(fixed)
    return int(size)


def is_inplace(node: fx.Node) -> bool:
    """Whether this node writes to its first argument."""
    name = op_name(node)
    if node.op == "call_method":
        return name.endswith("_") and not name.endswith("__")
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable and node.target.namespace == "aten"
    return name in _INPLACE_FUNCTIONS or (
        name.endswith("_") and not name.endswith("__") and name != "_"
    )


def is_hidden(node: fx.Node, hidden: int, rows: int) -> bool:
    """Whether this node is a float tensor of `rows` rows and last size `hidden`."""
    return is_float(node) and last_size(node) == hidden and num_rows(node) == rows


def is_static_input(node: fx.Node, example: object) -> bool:
    """Whether a placeholder is a parameter or a buffer rather than an activation."""
    if isinstance(example, torch.nn.Parameter) or isinstance(value(node), torch.nn.Parameter):
        return True
    tensor_dict = node.meta.get("tensor_dict") or {}
    if "_dynamo_static_input_type" in tensor_dict:
        return True
    return any(mark in node.name for mark in ("_parameters_", "_buffers_"))


def find_parameters(gm: fx.GraphModule, example_inputs: Sequence[object] | None) -> set[fx.Node]:
    """Placeholders and attributes that are weights or buffers."""
    found: set[fx.Node] = set()
    examples = list(example_inputs or ())
    index = 0
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            if is_static_input(node, examples[index] if index < len(examples) else None):
                found.add(node)
            index += 1
        elif node.op == "get_attr":
            found.add(node)
    return found


def given_weights(
    gm: fx.GraphModule, parameters: set[fx.Node], rows: Collection[int | None]
) -> set[fx.Node]:
    """Placeholders that can be weights handed to a function: matrices that do not have `rows` rows.

    Empty where there are too few of them for a router and experts.
    """
    found = {
        node
        for node in gm.graph.find_nodes(op="placeholder")
        if node not in parameters
        and is_float(node)
        and len(shape_hint(node)) in (2, 3)
        and num_rows(node) not in rows
        and not any(isinstance(size, torch.SymInt) for size in tensor(node).shape)  # type: ignore[union-attr]
    }
    return found if len(found) > 1 else set()
