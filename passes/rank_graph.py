"""Copies of a graph for one rank, and the proof by fake tensors that their shapes are what was planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from moe_compiler.passes.nodes import tensor, value
from moe_compiler.passes.shard_rules import Cut, ShardError, equal, local_shape


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """The same names and metadata; parameters and sub-modules are shared."""
    graph = fx.Graph()
    twins: dict[fx.Node, fx.Node] = {}
    result: Any = graph.graph_copy(gm.graph, twins, return_output_node=True)
    returned, output = result
    graph.output(returned).meta.update(output.meta)
    return fx.GraphModule(gm, graph)


def set_value(node: fx.Node, fake: torch.Tensor) -> None:
    """Record the fake value of a node under the name that its graph uses."""
    node.meta["val" if "val" in node.meta else "example_value"] = fake


class Propagation(fx.Interpreter):
    """Runs a rank's graph on fake tensors: every shape is what the cuts say, and is recorded.

    Args:
        gm: the graph; its nodes hold the fake values of the source graph, its placeholders their own.
        cuts: which nodes hold a piece.
    """

    def __init__(self, gm: fx.GraphModule, cuts: Mapping[fx.Node, Cut]) -> None:
        super().__init__(gm)
        self._gm = gm
        self._cuts = cuts
        self._mode: Any = None

    def check(self) -> None:
        """Run it.

        Raises:
            ShardError: a node does not run, or its shape is another one.
        """
        inputs = [value(n) for n in self._gm.graph.nodes if n.op == "placeholder"]
        modes = [v.fake_mode for v in inputs if isinstance(v, FakeTensor)]
        if not modes:
            raise ShardError("the graph has no fake tensors to propagate shapes with")
        self._mode = modes[0]
        with self._mode, torch.no_grad():
            self.run(*inputs, enable_io_processing=False)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and compare its shape with the source graph's."""
        try:
            found = super().run_node(n)
        except Exception as error:
            raise ShardError(f"'{n.name}' does not run on a rank's piece: {error}") from error
        if n.op == "get_attr" and isinstance(found, torch.Tensor):
            return self._mode.from_tensor(found)
        source = tensor(n)
        if n.op != "placeholder" and isinstance(found, torch.Tensor) and source is not None:
            shape: Any = source.shape
            if n in self._cuts:
                shape = local_shape(shape, self._cuts[n])
            if len(shape) != found.ndim or not all(map(equal, shape, found.shape)):
                raise ShardError(
                    f"'{n.name}' has shape {tuple(found.shape)} on a rank; {tuple(shape)} was planned"
                )
            set_value(n, found)
        return found
