"""`moeflex bench`: what is measured, what stands beside it, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import moe_compiler
from moe_compiler import cli
from moe_compiler.bench import MIN_ROUNDS, Request, bench, read_published
from moe_compiler.errors import OptionError
from tests.cases.blocks import Block, rand

PUBLISHED = """engine,experts,top_k,hidden,intermediate,tp,ep,tokens,latency_us
a,8,2,16,32,1,1,3,50.0
b,8,2,16,32,1,1,3,40.0
b,8,2,16,32,2,1,3,10.0
"""


def block() -> tuple[Block, Tensor]:
    return Block(form="grouped"), rand(5, 16)


def two_blocks() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(Block(form="grouped"), Block(form="grouped", seed=1)), rand(5, 16)


def test_a_block_of_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    words = ["bench", "--shape", "8,2,64,32", "--tokens", "1,9", "--seconds", "0", "--json", "-"]
    assert cli.main([*words, "--dtype", "fp32"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["tokens"] for row in found["rows"]] == [1, 9]
    for row in found["rows"]:
        assert set(row["times_us"]) == {"moeflex", "inductor", "eager"}
        assert all(0 < row["floor_us"] < value for value in row["times_us"].values())
        assert row["rounds"] == MIN_ROUNDS
        times = row["times_us"]
        assert row["speedup"] == pytest.approx(times["inductor"] / times["moeflex"])
    assert "1 MoE blocks" in found["title"] and "float32" in found["title"]
    assert {p for r in moe_compiler.reports() for p in r.placements} == {"cpu"}


def test_floors_and_published_times_of_all_blocks_add_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "public.csv"
    spec = Block(form="grouped").w13.shape  # [E, 2I, H]
    table.write_text(PUBLISHED.replace("8,2,16,32", f"{spec[0]},2,{spec[2]},{spec[1] // 2}"))
    common = {"tokens": (3,), "seconds": 0.0, "contenders": ("eager",), "public": str(table)}
    one = bench(Request(model=f"{__file__}:block", **common)).rows[0]
    two = bench(Request(model=f"{__file__}:two_blocks", **common)).rows[0]
    assert one.public_us == 40.0 and two.public_us == 80.0
    assert one.floor_us is not None and two.floor_us == pytest.approx(2 * one.floor_us)
    assert one.speedup is None and set(one.times_us) == {"eager"}
    code = cli.main(
        ["bench", f"{__file__}:block", "--tokens", "3", "--contenders", "eager", "--seconds", "0"]
    )
    out = capsys.readouterr().out
    assert code == 0 and "eager" in out and "moeflex," not in out


def test_what_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in (
        ([], "give a model, or --shape"),
        (["m:f", "--shape", "8,2,16,32"], "not both"),
        (["--shape", "8,2,16"], "takes E,K,H,I"),
        (["--shape", "8,2,x,16"], "takes E,K,H,I"),
        (["--shape", "2,8,16,32"], "K <= E"),
        (["m:f", "--contenders", "vllm"], "moeflex, inductor, eager"),
    ):
        assert cli.main(["bench", *words]) == 2
        assert text in capsys.readouterr().err
    missing = tmp_path / "no.csv"
    with pytest.raises(OptionError, match="cannot be read"):
        read_published(str(missing))
    missing.write_text("experts,tokens\n1,2\n")
    with pytest.raises(OptionError, match="needs the columns"):
        read_published(str(missing))


def test_every_call_gets_tokens_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.numpy().tobytes())
            return x + self.weight

    monkeypatch.setattr(f"{__name__}.block", lambda: (Watching(), torch.randn(4, 3)), raising=True)
    module = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "watched", module)
    report = bench(Request(model="watched:block", tokens=(2,), seconds=0.0, contenders=("eager",)))
    measured = seen[-MIN_ROUNDS:]
    assert len(set(measured)) == MIN_ROUNDS
    assert report.rows[0].floor_us is None
