"""Which target takes a layer: the rule, and that its reasons reach the report."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moe_compiler import targets
from moe_compiler.ir import (
    ActivationKind,
    ActivationSpec,
    ExpertSpec,
    GateLayout,
    MoEPlan,
    RouterSpec,
    Score,
)
from moe_compiler.targets import Choice, Device, Layer, choose_target, device_of

SPEC = ExpertSpec(
    num_experts=8,
    hidden=64,
    intermediate=32,
    gate_layout=GateLayout.CONCAT,
    activation=ActivationSpec(kind=ActivationKind.SILU),
)
PLAN = MoEPlan(router=RouterSpec(score=Score.EXTERNAL, top_k=2, num_experts=8), experts=SPEC)
LAYER = Layer(plan=PLAN, x_dtype="bf16", weight_dtypes=("bf16", "bf16"))


@dataclasses.dataclass(frozen=True)
class Refuses:
    """A target with one answer."""

    NAME: str
    answer: str

    def unsupported(self, layer: Layer, device: Device) -> str:
        return self.answer

    def prepare(self, layer: Layer, device: Device) -> None:
        raise AssertionError("not asked for")

    def finish(self) -> None:
        raise AssertionError("not asked for")


def test_the_first_that_takes_the_layer_wins_and_says_why_not_a_better_one(monkeypatch):
    first, second, third = Refuses("a", "too odd"), Refuses("b", ""), Refuses("c", "")
    monkeypatch.setitem(targets.TARGETS, "cuda", (first, second, third))
    assert choose_target(Device(type="cuda"), LAYER) == Choice(target=second, reason="too odd")


def test_a_target_that_is_asked_for_is_the_only_one(monkeypatch):
    first, second = Refuses("a", ""), Refuses("b", "")
    monkeypatch.setitem(targets.TARGETS, "cuda", (first, second))
    assert choose_target(Device(type="cuda"), LAYER, only="b") == Choice(target=second)
    found = choose_target(Device(type="cpu"), LAYER, only="b")
    assert found.target is None and "'target': 'b'" in found.reason and "cpu" in found.reason


def test_all_reasons_are_said_once_when_none_takes_it(monkeypatch):
    monkeypatch.setitem(
        targets.TARGETS, "cuda", (Refuses("a", "x"), Refuses("b", "y"), Refuses("c", "x"))
    )
    assert choose_target(Device(type="cuda"), LAYER) == Choice(target=None, reason="x; y")


def test_a_device_without_targets_says_so():
    choice = choose_target(Device(type="xpu"), LAYER)
    assert choice == Choice(target=None, reason="no XPU target in this version")


@pytest.mark.parametrize(
    ("devices", "found"),
    [
        (["cpu", "cpu"], Device(type="cpu")),
        (["meta"], Device(type="meta")),
        (["cpu", "meta"], None),
        (["cuda:0", "cuda:1"], None),
    ],
)
def test_a_layer_lies_on_one_device(devices, found):
    assert device_of(torch.device(name) for name in devices) == found


def test_the_capability_is_that_of_the_device_of_the_tensors(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, index))
    found = device_of([torch.device("cuda:6")])
    assert found == Device(type="cuda", capability=(8, 6))
    assert found.title == "sm_86"
