"""Where a block stops gradients that its op would let through."""

from __future__ import annotations

import torch
from torch import fx

from moe_compiler.passes.candidates import Candidate
from moe_compiler.passes.nodes import is_float, op_name, tensor
from moe_compiler.passes.subgraph import Slice


def stop_of_experts(candidate: Candidate) -> str:
    """Why the gradients of the experts are not those of the op, or "".

    Nothing is stopped where the result needs no gradient, or where it is computed without.
    """
    if not torch.is_grad_enabled() or not _needs_gradient(candidate.output):
        return ""
    return _first_stop(candidate.part, set(candidate.part.body))


def stop_of_router(part: Slice) -> str:
    """Why the gradient of the combine weights does not reach the logits, or "".

    Args:
        part: from the logits to ids and weights. What lies in front of the ids alone has none.
    """
    logits, weights = part.inputs[0], part.outputs[-1]
    if not torch.is_grad_enabled() or not _needs_gradient(logits):
        return ""
    if not _needs_gradient(weights):
        return f"'{weights.name}' stops the gradient of the weights"
    body, path, stack = set(part.body), set(), [weights]
    while stack:
        node = stack.pop()
        if node in body and node not in path and is_float(node):
            path.add(node)
            stack.extend(part.flow.data_inputs[node])
    return _first_stop(part, path)


def _first_stop(part: Slice, nodes: set[fx.Node]) -> str:
    flow = part.flow
    for node in sorted(nodes, key=flow.position.__getitem__):
        name = op_name(node)
        if name.startswith("new_") or name.endswith("_like"):
            continue  # reads a shape
        if not is_float(node) or flow.constant[node] or _needs_gradient(node):
            continue
        if any(is_float(read) and _needs_gradient(read) for read in flow.inputs[node]):
            return f"'{node.name}' stops gradients inside of it, which the op would let through"
    return ""


def _needs_gradient(node: fx.Node) -> bool:
    found = tensor(node)
    return found is not None and found.requires_grad
