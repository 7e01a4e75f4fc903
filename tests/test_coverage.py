"""Every MoE block of every family is proven to be what its source code says, and look-alikes are not.

The default tier runs two cells a family; `-m slow` runs them all. `python -m tests.write_coverage`
prints the same as the table in `docs/coverage.md`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from moe_compiler.backend import moeflex
from moe_compiler.ir import (
    ActivationKind,
    GateLayout,
    Normalize,
    Orientation,
    Score,
    WeightPosition,
)
from moe_compiler.passes.match_moe import find_regions
from moe_compiler.runtime import capture
from tests.models import expected, grid, styles, zoo

DOC = Path(__file__).parent.parent / "docs" / "coverage.md"

DEFAULT = list(grid.default_cells())
FULL = [c for c in grid.cells(tuple(expected.EXPECTED)) if c not in DEFAULT]


def check(cell):
    outcome = grid.run(cell)
    assert outcome.problems == (), outcome.reasons
    assert outcome.num_graphs == 1
    assert bool(outcome.ways) == (cell.implementation == "eager")


@pytest.mark.parametrize("cell", DEFAULT, ids=str)
def test_every_block_is_proven(cell):
    check(cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", FULL, ids=str)
def test_every_block_is_proven_in_every_way(cell):
    check(cell)


def test_the_default_cells_hold_every_value_of_every_axis():
    assert {c.family for c in DEFAULT} == set(expected.EXPECTED) >= set(zoo.MAIN)
    assert {c.implementation for c in DEFAULT} == {*zoo.IMPLEMENTATIONS, ""}
    assert {c.phase for c in DEFAULT} == set(zoo.PHASES)
    axes = {(c.dynamic, c.dtype, c.level) for c in DEFAULT}
    assert {(d, t) for d, t, _ in axes} == {(d, t) for d in (False, True) for t in grid.DTYPES}
    assert {level for _, _, level in axes} == {"torch", "aten"}


def test_a_family_with_its_own_loop_gives_the_reason():
    cell = grid.Cell("dbrx", "", "prefill", False, "fp32", "torch")
    outcome = grid.run(cell)
    assert not outcome.regions
    assert any(expected.UNMATCHED["dbrx"] in reason for reason in outcome.reasons)


def _match(name, **sizes):
    module = styles.build(name, **sizes)
    (graph,) = capture.capture_graphs(module, (styles.rows(dtype=module.gate.dtype),))
    return find_regions(*graph)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", styles.STYLES)
def test_a_plain_module_is_proven(name, dtype):
    found = _match(name, dtype=dtype)
    assert len(found.matches) == 1, found.refused
    region = found.matches[0].region
    experts, router = region.experts, region.router
    assert (experts.num_experts, experts.hidden, experts.intermediate) == (8, 64, 32)
    assert experts.gate_layout is GateLayout.SEPARATE
    assert experts.activation.kind is ActivationKind.SILU
    assert experts.w13_orientation is experts.w2_orientation is Orientation.OUT_IN
    before = name in ("grouped_score_before", "dense_bmm")
    assert experts.weight_position is (WeightPosition.INPUT if before else WeightPosition.OUTPUT)
    assert experts.stacked == (not isinstance(styles.build(name), styles.ListBlock))
    if name.startswith("grouped"):
        assert router.score is Score.SIGMOID
        assert router.has_bias
    elif name in ("dense_bmm", "loop_plus_equals"):
        assert router.score is Score.IDENTITY
        sigmoid = name == "dense_bmm"
        assert router.normalize is (Normalize.SIGMOID if sigmoid else Normalize.SOFTMAX)
    else:
        assert router.score is Score.SOFTMAX
        assert router.normalize is Normalize.SUM


@pytest.mark.parametrize("name", styles.LOOKALIKES)
def test_a_lookalike_is_left_alone(name):
    found = _match(name)
    assert not found.matches
    assert all(refused.reason for refused in found.refused)


@pytest.mark.parametrize(
    "name", sorted(set(styles.LOOKALIKES) - {"topk_without_experts", "soft_mixture"})
)
def test_a_lookalike_is_named_with_its_reason(name):
    # the other two hold nothing that selects experts for a matrix product
    assert len(_match(name).refused) == 1


@pytest.mark.parametrize("name", styles.UNKNOWN_ROUTERS)
def test_an_unknown_router_stays_in_the_graph(name):
    found = _match(name)
    assert [match.region.router.score for match in found.matches] == [Score.EXTERNAL]
    assert found.matches[0].region.router_note


def _compiled_equals_eager(name, implementation, phase, dtype):
    model = zoo.build(name, implementation, dtype)
    with torch.no_grad():
        args, kwargs = zoo.inputs(model, phase, grid.LENGTH)
        want = model(*args, **kwargs).logits
        args, kwargs = zoo.inputs(model, phase, grid.LENGTH)
        got = torch.compile(model, backend=moeflex)(*args, **kwargs).logits
    exact = dtype is torch.float32
    error = (got.double() - want.double()).abs().max() / want.double().abs().max()
    assert error < (1e-4 if exact else 6e-2)


@pytest.mark.parametrize(
    ("name", "implementation", "phase"),
    [
        ("qwen3_moe", "eager", "decode_static_cache"),
        ("deepseek_v3", "grouped_mm", "prefill"),
        ("gpt_oss", "batched_mm", "decode_dynamic_cache"),
    ],
)
def test_compiled_equals_eager(name, implementation, phase):
    _compiled_equals_eager(name, implementation, phase, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("phase", zoo.PHASES)
@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_compiled_equals_eager_in_every_family(name, phase):
    _compiled_equals_eager(name, zoo.FAMILIES[name].implementations[-1], phase, torch.float32)


def test_the_published_table_holds_every_family():
    text = DOC.read_text()
    missing = [name for name in zoo.FAMILIES if f"`{name}`" not in text]
    assert not missing, f"docs/coverage.md lacks {missing}; run: python -m tests.write_coverage"
