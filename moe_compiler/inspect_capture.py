"""The graphs of a target: those of dynamo, or the one of `torch.export`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from moe_compiler.errors import InspectError, MoeflexError
from moe_compiler.inspect_target import Target
from moe_compiler.runtime import capture


@dataclasses.dataclass(frozen=True)
class CapturedGraph:
    """One graph and what the matcher may know of its inputs.

    Attributes:
        gm: the graph.
        example_inputs: what its placeholders were traced with; None for an exported program.
        parameters: the placeholders that are weights; None where the example inputs tell.
    """

    gm: fx.GraphModule
    example_inputs: Sequence[Any] | None
    parameters: tuple[fx.Node, ...] | None


@dataclasses.dataclass(frozen=True)
class Captured:
    """The graphs of a model in call order, and how it was made traceable."""

    graphs: tuple[CapturedGraph, ...]
    notes: tuple[str, ...]


def capture_target(target: Target, *, level: str, dynamic: bool) -> Captured:
    """Trace a target.

    Args:
        target: the model and its example inputs.
        level: "torch" | "aten".
        dynamic: the token count becomes a symbol, where the target says which axis it is.

    Raises:
        InspectError: it cannot be traced.
    """
    dynamic = dynamic and target.token_axis is not None
    try:
        if level == "aten":
            return _capture_aten(target, dynamic)
        return _capture_torch(target, dynamic)
    except MoeflexError:
        raise
    except Exception as error:
        tracer = "torch.export" if level == "aten" else "dynamo"
        raise InspectError(
            f"{tracer} cannot trace {type(target.module).__name__} with {target.input_note}: "
            f"{type(error).__name__}: {_first_lines(error)}"
        ) from error


def _capture_torch(target: Target, dynamic: bool) -> Captured:
    graphs = capture.capture_graphs(
        target.module, target.args, target.kwargs, dynamic=True if dynamic else None
    )
    ways = dict.fromkeys(way for gm, _ in graphs for way in gm.meta.get("capture_ways", ()))
    return Captured(tuple(CapturedGraph(gm, inputs, None) for gm, inputs in graphs), tuple(ways))


def _capture_aten(target: Target, dynamic: bool) -> Captured:
    shapes = _dynamic_shapes(target) if dynamic else None
    program = capture.capture_export(
        target.module, target.args, target.kwargs, dynamic_shapes=shapes
    )
    signature = program.graph_signature
    constant = {*signature.inputs_to_parameters, *signature.inputs_to_buffers}
    constant.update(signature.inputs_to_lifted_tensor_constants)
    nodes = program.graph_module.graph.nodes
    parameters = tuple(n for n in nodes if n.op == "placeholder" and n.name in constant)
    ways = getattr(program, "capture_ways", ())
    return Captured((CapturedGraph(program.graph_module, None, parameters),), tuple(ways))


def _dynamic_shapes(target: Target) -> Any:
    """The token axis of the first argument is a symbol, all else is static, by the names of the forward's arguments."""
    assert target.token_axis is not None
    first = {target.token_axis: torch.export.Dim.DYNAMIC}
    names = list(inspect.signature(target.module.forward).parameters)
    return {names[0]: first, **dict.fromkeys(target.kwargs)}


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:500]
