"""Whatever an `ExpertSpec` can say is recognised from the graph alone."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch

from moe_compiler.ir import (
    ActivationKind,
    ActivationSpec,
    ExpertSpec,
    GateLayout,
    Orientation,
    WeightPosition,
)
from tests.passes import graphs

SILU = ActivationSpec(kind=ActivationKind.SILU)


def make(**changes: object) -> ExpertSpec:
    base = ExpertSpec(
        num_experts=5, hidden=12, intermediate=10, gate_layout=GateLayout.CONCAT, activation=SILU
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def found(spec: ExpertSpec, seed: int = 0) -> ExpertSpec:
    x = torch.randn(7, spec.hidden, generator=torch.Generator().manual_seed(seed))
    result = graphs.match(graphs.SpelledExperts(spec, seed=seed), x)
    assert [r.reason for r in result.refused] == []
    (block,) = result.matches
    return block.region.experts


@pytest.mark.parametrize("layout", list(GateLayout))
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "list"])
def test_gate_layout_is_found(layout: GateLayout, stacked: bool) -> None:
    spec = make(gate_layout=layout, stacked=stacked)
    assert found(spec) == spec


@pytest.mark.parametrize("up", list(Orientation))
@pytest.mark.parametrize("down", list(Orientation))
@pytest.mark.parametrize("sizes", [(12, 10), (12, 12), (12, 6)], ids=["plain", "H=I", "H=2I"])
def test_orientation_comes_from_the_graph_and_not_from_shapes(
    up: Orientation, down: Orientation, sizes: tuple[int, int]
) -> None:
    spec = make(hidden=sizes[0], intermediate=sizes[1], w13_orientation=up, w2_orientation=down)
    assert found(spec) == spec


ACTIVATIONS = [
    *(ActivationSpec(kind=kind) for kind in ActivationKind if kind is not ActivationKind.IDENTITY),
    ActivationSpec(
        kind=ActivationKind.SILU, alpha=1.702, gate_max=7.0, up_min=-7.0, up_max=7.0, up_shift=1.0
    ),
    ActivationSpec(kind=ActivationKind.SILU, gate_max=2.5),
    ActivationSpec(kind=ActivationKind.GELU_TANH, gate_min=-1.5, gate_max=1.5),
    ActivationSpec(kind=ActivationKind.SILU, up_min=-1.25, up_max=1.25),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.name)
@pytest.mark.parametrize("layout", [GateLayout.CONCAT, GateLayout.INTERLEAVED])
def test_activation_is_found(activation: ActivationSpec, layout: GateLayout) -> None:
    spec = make(activation=activation, gate_layout=layout)
    assert found(spec) == spec


@pytest.mark.parametrize("position", list(WeightPosition))
@pytest.mark.parametrize(
    "biases", [(False, False), (True, False), (False, True), (True, True)], ids=str
)
def test_weight_position_and_biases_are_found(
    position: WeightPosition, biases: tuple[bool, bool]
) -> None:
    spec = make(weight_position=position, has_b13=biases[0], has_b2=biases[1])
    if position is WeightPosition.HIDDEN and not biases[1]:
        # without a down bias this is the same function
        assert found(spec) == dataclasses.replace(spec, weight_position=WeightPosition.OUTPUT)
    else:
        assert found(spec) == spec


def test_random_specs_are_found() -> None:
    choose = random.Random(0)
    for seed in range(40):
        spec = make(
            num_experts=choose.choice([3, 5, 8]),
            hidden=choose.choice([6, 12, 20]),
            intermediate=choose.choice([6, 9, 12]),
            gate_layout=choose.choice(list(GateLayout)),
            w13_orientation=choose.choice(list(Orientation)),
            w2_orientation=choose.choice(list(Orientation)),
            stacked=choose.random() < 0.7,
            has_b13=choose.random() < 0.4,
            has_b2=choose.random() < 0.4,
            activation=choose.choice(ACTIVATIONS[:6]),
            weight_position=choose.choice([WeightPosition.OUTPUT, WeightPosition.INPUT]),
        )
        if (
            spec.activation.kind is ActivationKind.RELU
            and spec.weight_position is WeightPosition.INPUT
        ):
            continue  # softmax weights are positive, so that relu commutes with them where there is no bias
        assert found(spec, seed) == spec, seed


def test_unknown_activation_is_refused_with_a_reason() -> None:
    class Wavy(graphs.SpelledExperts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, ids = torch.softmax(x @ self.router.t(), -1).topk(self.top_k)
            rows = x.unsqueeze(1).expand(-1, self.top_k, -1)
            gate, up = self._split(self._project(rows, ids, "w13", "b13", False))
            y = self._project(torch.sin(gate) * up, ids, "w2", "b2", True)
            return (y * weights[..., None]).sum(1)

    result = graphs.match(Wavy(make()), torch.randn(7, 12))
    assert not result.matches
    (refusal,) = result.refused
    assert "activation" in refusal.reason


def test_every_layout_is_told_apart_in_one_graph() -> None:
    specs = [make(gate_layout=layout) for layout in GateLayout]

    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(
                graphs.SpelledExperts(s, seed=i) for i, s in enumerate(specs)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x

    result = graphs.match(Stack(), torch.randn(9, 12))
    assert [m.region.experts for m in result.matches] == specs
    assert [m.region.name for m in result.matches] == [f"blocks.{i}" for i in range(len(specs))]
    assert not result.refused


def test_equal_blocks_are_proven_once() -> None:
    spec = make(hidden=14)

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (graphs.SpelledExperts(spec, seed=i) for i in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    proofs = [m.region.proof for m in graphs.match(Twice(), torch.randn(11, 14)).matches]
    assert [p.reused for p in proofs] == [False, True]
    assert proofs[0].num_runs == proofs[1].num_runs > 5
    assert list(itertools.islice((p.seconds > 0 for p in proofs), 2)) == [True, False]
