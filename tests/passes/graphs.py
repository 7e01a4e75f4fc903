"""Graphs for the tests of the passes: captured from plain modules, in eager mode, without a compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from moe_compiler.ir import GateLayout, MoEPlan, Orientation, RouterSpec, Score, WeightPosition
from moe_compiler.passes.dataflow import DataFlow
from moe_compiler.passes.match_moe import MatchResult, find_regions
from moe_compiler.passes.replace import replace_region
from moe_compiler.reference import activate
from moe_compiler.runtime import op  # noqa: F401  defines the op


def capture(
    module: Callable[..., Any],
    *args: Any,
    dynamic: bool | None = None,
    edit: Callable[[fx.GraphModule, Sequence[Any]], None] | None = None,
) -> tuple[list[tuple[fx.GraphModule, list[Any]]], Any]:
    """The torch-level graphs of a call, and its result when run as (edited) graphs."""
    graphs: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append((gm, list(example_inputs)))
        if edit is not None:
            edit(gm, example_inputs)
        return gm.forward

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        result = torch.compile(module, backend=backend, dynamic=dynamic)(*args)
    return graphs, result


def match(module: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> MatchResult:
    """`find_regions` on the only graph of a call."""
    with torch.no_grad():
        graphs, _ = capture(module, *args, dynamic=dynamic)
    assert len(graphs) == 1
    return find_regions(*graphs[0])


def replaced(
    module: Callable[..., Any], *args: Any, absorb: bool = False, dynamic: bool | None = None
) -> tuple[Any, fx.GraphModule, int]:
    """Result, edited graph and number of blocks after every block has become an op."""
    seen: list[tuple[fx.GraphModule, int]] = []

    def edit(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        found = find_regions(gm, example_inputs)
        for block in found.matches:
            region = block.region
            inside = absorb and region.router.score is not Score.EXTERNAL
            external = RouterSpec(score=Score.EXTERNAL, top_k=region.top_k)
            plan = MoEPlan(
                router=region.router if inside else external,
                experts=region.experts,
                out_dtype=region.out_dtype,
                round_gemms=bool(region.gemm_dtype),
            )
            replace_region(gm, block, plan, flow=found.flow, absorb_router=inside)
        gm.graph.lint()
        gm.recompile()
        seen.append((gm, len(found.matches)))

    _, result = capture(module, *args, edit=edit, dynamic=dynamic)
    assert len(seen) == 1
    return result, *seen[0]


class SpelledExperts(nn.Module):
    """Softmax routing and gathered experts that spell an `ExpertSpec` in their own words."""

    def __init__(
        self, spec: Any, top_k: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32
    ):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.spec, self.top_k = spec, top_k

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter((0.3 * torch.randn(*shape, generator=generator)).to(dtype))

        self.router = parameter(spec.num_experts, spec.hidden)
        self.roles = spec.tensor_roles
        for role in self.roles:
            shape = spec.tensor_shape(role)
            if spec.stacked:
                self.register_parameter(role, parameter(*shape))
            else:
                group = nn.ParameterList(parameter(*shape) for _ in range(spec.num_experts))
                self.add_module(role, group)

    def _project(self, x: torch.Tensor, ids: torch.Tensor, weight: str, bias: str, down: bool):
        spec = self.spec
        orientation = spec.w2_orientation if down else spec.w13_orientation
        matrix = getattr(self, weight)[ids]
        equation = "tki,tkoi->tko" if orientation is Orientation.OUT_IN else "tki,tkio->tko"
        y = torch.einsum(equation, x, matrix)
        return y + getattr(self, bias)[ids] if bias in self.roles else y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        weights, ids = torch.softmax(x @ self.router.t(), -1).topk(self.top_k)
        if not spec.stacked:
            return self._loop(x, ids, weights)
        rows = x.unsqueeze(1).expand(-1, self.top_k, -1)
        scaled = rows * weights[..., None]
        rows = scaled if spec.weight_position is WeightPosition.INPUT else rows
        if spec.gate_layout is GateLayout.SEPARATE:
            gate = self._project(rows, ids, "w1", "b1", False)
            up = self._project(rows, ids, "w3", "b3", False)
        elif spec.gated:
            gate, up = self._split(self._project(rows, ids, "w13", "b13", False))
        else:
            gate, up = self._project(rows, ids, "w1", "b1", False), None
        hidden = activate(spec.activation, gate, up)
        if spec.weight_position is WeightPosition.HIDDEN:
            hidden = hidden * weights[..., None]
        y = self._project(hidden, ids, "w2", "b2", True)
        if spec.weight_position is WeightPosition.OUTPUT:
            y = y * weights[..., None]
        return y.sum(1)

    def _split(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layout = self.spec.gate_layout
        if layout in (GateLayout.CONCAT, GateLayout.CONCAT_UP_FIRST):
            first, second = both.chunk(2, -1)
        else:
            first, second = both[..., ::2], both[..., 1::2]
        up_first = layout in (GateLayout.CONCAT_UP_FIRST, GateLayout.INTERLEAVED_UP_FIRST)
        return (second, first) if up_first else (first, second)

    def _loop(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        out = torch.zeros_like(x)

        def linear(rows: torch.Tensor, weight: str, bias: str, e: int, down: bool) -> torch.Tensor:
            orientation = spec.w2_orientation if down else spec.w13_orientation
            matrix = getattr(self, weight)[e]
            y = rows @ (matrix.t() if orientation is Orientation.OUT_IN else matrix)
            return y + getattr(self, bias)[e] if bias in self.roles else y

        for e in range(spec.num_experts):
            token, slot = torch.where(ids == e)
            weight = weights[token, slot, None]
            rows = x[token] * weight if spec.weight_position is WeightPosition.INPUT else x[token]
            if spec.gate_layout is GateLayout.SEPARATE:
                gate, up = linear(rows, "w1", "b1", e, False), linear(rows, "w3", "b3", e, False)
            elif spec.gated:
                gate, up = self._split(linear(rows, "w13", "b13", e, False))
            else:
                gate, up = linear(rows, "w1", "b1", e, False), None
            hidden = activate(spec.activation, gate, up)
            hidden = hidden * weight if spec.weight_position is WeightPosition.HIDDEN else hidden
            y = linear(hidden, "w2", "b2", e, True)
            y = y * weight if spec.weight_position is WeightPosition.OUTPUT else y
            out.index_add_(0, token, y)
        return out


class Built:
    """A torch-level graph written node by node, each executed to know its value."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, name: str, example: torch.Tensor) -> fx.Node:
        """A placeholder."""
        node = self.graph.placeholder(name)
        node.meta["example_value"] = example
        return node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of a method (a name) or of a function."""
        method = isinstance(target, str)
        node = self.graph.create_node(
            "call_method" if method else "call_function", target, args, kwargs
        )
        values: Any = fx.node.map_arg((args, kwargs), lambda n: n.meta["example_value"])
        call = (lambda x, *rest, **named: getattr(x, target)(*rest, **named)) if method else target
        node.meta["example_value"] = call(*values[0], **values[1])
        return node

    def flow(self, *outputs: fx.Node, parameters: Sequence[fx.Node] = ()) -> DataFlow:
        """End the graph and trace its data flow."""
        self.graph.output(outputs)
        return DataFlow(self.graph, parameters)
