"""`moeflex verify` and `moeflex diff`: equal things pass, and what differs is named with its place."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import Tensor

from moe_compiler import ahead, cli
from moe_compiler.deviation import EPS, compare
from moe_compiler.difference import differences
from moe_compiler.errors import OptionError
from moe_compiler.ir import ActivationKind
from moe_compiler.runtime import op
from moe_compiler.runtime.artifact_runner import open_archive
from moe_compiler.verify import Request, tensors_of, verify
from tests.cases.blocks import Block, rand

SMALL = {"tokens": (2, 7), "routings": 2}


def block() -> tuple[Block, Tensor]:
    return Block(form="grouped"), rand(5, 16)


def other_block() -> tuple[Block, Tensor]:
    return Block(form="grouped", seed=3), rand(5, 16)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("verify")
    paths = {}
    for name in ("block", "other_block"):
        paths[name] = str(folder / f"{name}.mflx")
        request = ahead.Request(model=f"{__file__}:{name}", output=paths[name], tokens=(2, 64))
        ahead.compile_model(request)
    return paths


def test_a_model_and_its_blocks_are_within_the_rule() -> None:
    report = verify(Request(subject=f"{__file__}:block", **SMALL))
    assert report.passed
    assert [check.num_inputs for check in report.checks] == [4, 4]
    assert report.checks[0].what == "whole model"
    assert 0 < report.checks[1].worst.error <= report.checks[1].worst.allowed


def test_a_wrong_kernel_is_found_in_its_block(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_plan = op.read_plan

    def other_activation(key: str) -> object:
        plan = read_plan(key)
        wrong = dataclasses.replace(plan.experts.activation, kind=ActivationKind.RELU)
        return dataclasses.replace(
            plan, experts=dataclasses.replace(plan.experts, activation=wrong)
        )

    monkeypatch.setattr("moe_compiler.verify.op.read_plan", other_activation)
    code = cli.main(["verify", f"{__file__}:block", "--tokens", "5", "--json", "-", "-q"])
    found = json.loads(capsys.readouterr().out)
    assert code == 1 and not found["passed"]
    whole, one = found["checks"]
    assert whole["passed"] and not one["passed"]
    assert one["worst"]["error"] > one["worst"]["allowed"]
    assert len(one["worst"]["index"]) == 2


def test_an_artifact_is_compared_with_its_model(
    artifacts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", artifacts["other_block"], "--tokens", "2,9"]) == 0
    out = capsys.readouterr().out
    assert out.count("within") == 2 and "whole model" in out


def test_two_artifacts(artifacts: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = artifacts["block"], artifacts["other_block"]
    assert cli.main(["verify", first, first, "--tokens", "3"]) == 0
    assert cli.main(["verify", first, second, "--tokens", "3"]) == 1
    assert "beyond" in capsys.readouterr().out
    with pytest.raises(OptionError, match="the other way round"):
        verify(Request(subject=f"{__file__}:block", against=first))


def test_diff_names_what_differs(
    artifacts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = artifacts["block"], artifacts["other_block"]
    assert cli.main(["diff", first, first]) == 0
    assert "equal" in capsys.readouterr().out
    assert cli.main(["diff", first, second, "--json", "-"]) == 1
    found = json.loads(capsys.readouterr().out)["differences"]
    assert {(d["area"], d["what"]) for d in found} >= {("model", "source"), ("weights", "sha256")}
    assert not {d["area"] for d in found} & {"blocks", "kernels", "machine", "versions"}


def test_every_area_of_a_manifest_is_compared(artifacts: dict[str, str]) -> None:
    archive, manifest = open_archive(artifacts["block"])
    archive.close()
    (one,) = manifest.blocks
    experts = dataclasses.replace(one.region.experts, intermediate=99)
    changes = {
        "model": {"tokens": (2, 65)},
        "machine": {"isa": "scalar"},
        "versions": {"moeflex": "9.9"},
        "blocks": {
            "blocks": (
                dataclasses.replace(one, region=dataclasses.replace(one.region, experts=experts)),
            )
        },
        "kernels": {"kernels": ()},
        "weights": {"constants": manifest.constants[1:]},
        "code": {"members": manifest.members[1:]},
    }
    assert differences(manifest, manifest) == []
    for area, change in changes.items():
        found = differences(manifest, dataclasses.replace(manifest, **change))
        assert area in {one.area for one in found}, area


def test_inputs_that_cannot_be_made() -> None:
    with pytest.raises(OptionError, match="--axis 5 is not an axis"):
        verify(Request(subject=f"{__file__}:block", axis=5))


def test_the_rule() -> None:
    exact = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    eager = exact + torch.tensor([[0.0, 1e-3], [0.0, 0.0]])
    within, beyond = exact.clone(), exact.clone()
    within[1, 0] += 1.9e-3
    beyond[1, 0] += 2.2e-3
    assert compare(within, eager, exact).passed
    found = compare(beyond, eager, exact)
    assert not found.passed and found.index == (1, 0)
    assert found.allowed == pytest.approx(2 * 1e-3 / 4 + EPS[torch.float32], rel=1e-3)
    broken = exact.clone()
    broken[0, 0] = float("nan")
    found = compare(broken, eager, exact)
    assert not found.passed and "nan" in found.note
    assert "instead of" in compare(exact[:1], eager, exact).note
    ids = torch.tensor([1, 2])
    assert compare(ids, ids, ids).passed and not compare(ids, ids + 1, ids).passed
    # the best half of the rows is right
    assert compare(beyond, eager, exact, share=0.0).passed


def test_tensors_of_a_result() -> None:
    t = torch.zeros(1)
    found = [name for name, _ in tensors_of({"logits": t, "more": (t, None, [t])})]
    assert found == ["logits", "more[0]", "more[2][0]"]
