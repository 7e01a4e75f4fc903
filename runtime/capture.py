"""Getting a model's MoE blocks into one graph, and looking at the graphs that come out.

`capture_graphs` records what dynamo hands to a backend; `capture_export` is the ATen-level counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn


def capture_graphs(
    target: nn.Module | Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    *,
    fullgraph: bool = False,
    grad: bool = False,
) -> list[tuple[fx.GraphModule, list[Any]]]:
    """Run `target` once under dynamo and return its graphs with their example inputs, in call order.

    Args:
        target: a module (real, or on the meta device) or a function.
        args: positional arguments.
        kwargs: keyword arguments.
        dynamic: as in `torch.compile`.
        fullgraph: as in `torch.compile`.
        grad: trace with gradients enabled.

    Returns:
        One pair for each graph; the example inputs are what a backend receives.
    """
    graphs: list[tuple[fx.GraphModule, list[Any]]] = []

    def record(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append((gm, list(example_inputs)))
        return gm.forward

    compiled = torch.compile(target, backend=record, dynamic=dynamic, fullgraph=fullgraph)
    with torch.set_grad_enabled(grad):
        compiled(*args, **(kwargs or {}))
    return graphs


def capture_export(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> torch.export.ExportedProgram:
    """The ATen-level program of `module`, functional, without Inductor's decompositions."""
    with torch.no_grad():
        program = torch.export.export(
            module, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes
        )
    return program.run_decompositions({})
