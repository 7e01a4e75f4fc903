"""`moeflex replay`: traces, what ranks move, and the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_compiler import cli
from moe_compiler.errors import OptionError, ToolchainError
from moe_compiler.runtime import routing_trace, toolchain

SHAPE = "16,2,256,128"


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    try:
        toolchain.find_compiler()
    except ToolchainError as error:
        pytest.skip(str(error))


def replay(
    capsys: pytest.CaptureFixture[str], trace: object, *options: str
) -> list[dict[str, Any]]:
    code = cli.main(["replay", str(trace), "--shape", SHAPE, "--json", "-", *options])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    rows: list[dict[str, Any]] = json.loads(out)["rows"]
    return rows


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("kind", ["balanced", "random", "power-law:1.2"])
def test_traffic_is_that_of_a_plain_count(kind: str, ranks: int) -> None:
    ids = routing_trace.generate(kind, 50, 10, 3)[0]
    assert all(len(set(token)) == 3 for token in ids.tolist())
    ids[4, 1], ids[5, 0] = -1, 10  # no routes
    found = routing_trace.traffic(ids, 10, ranks)
    per_rank = -(-10 // ranks)
    first = 0
    counts: dict[int, int] = dict.fromkeys(range(10), 0)
    arrivals, results = [set() for _ in range(ranks)], [0] * ranks
    for home, load in enumerate(found):
        for token in range(first, first + load.num_tokens):
            for e in ids[token].tolist():
                if not 0 <= e < 10:
                    continue
                counts[e] += 1
                if e // per_rank != home:
                    arrivals[e // per_rank].add(token)
                    results[e // per_rank] += 1
        first += load.num_tokens
    assert first == 50
    assert [e for load in found for e in load.counts] == list(counts.values())
    assert [load.arrivals for load in found] == [len(a) for a in arrivals]
    assert [load.results for load in found] == results


def test_files_of_all_kinds_give_one_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = routing_trace.generate("power-law:1", 300, 16, 2)[0]
    np.save(tmp_path / "a.npy", ids.numpy())
    (tmp_path / "a.csv").write_text("".join(f"{a},{b}\n" for a, b in ids.tolist()))
    (tmp_path / "a.jsonl").write_text(json.dumps(ids.tolist()) + "\n")
    plans = [replay(capsys, tmp_path / f"a.{kind}") for kind in ("npy", "csv", "jsonl")]
    assert plans[0] == plans[1] == plans[2]
    assert sum(row["num_rows"] for row in plans[0]) == 600
    assert plans[0][0]["num_rows"] > plans[0][1]["num_rows"]
    np.save(tmp_path / "b.npy", torch.stack([ids, ids.flip(0)]).numpy())
    assert [row["layer"] for row in replay(capsys, tmp_path / "b.npy")] == [0, 0, 1, 1]


def test_schedules_narrow_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--tokens", "20000", "--ranks", "2")
    every, spatial, serial = (
        replay(capsys, "random", *options, "--schedule", name)
        for name in ("spatial+temporal", "spatial", "serial")
    )
    for a, b, c in zip(every, spatial, serial, strict=True):
        assert a["predicted_us"] <= min(b["predicted_us"], c["predicted_us"])
        assert (b["num_chunks"], b["num_steal_tiles"]) == (1, 0)
        assert c["num_comm_sms"] == 132


def test_a_rank_without_rows_has_no_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("0,1\n2,-1\n")
    first, last = replay(capsys, tmp_path / "a.csv")
    assert (first["num_rows"], first["num_comm_sms"] > 0) == (3, True)
    assert (last["num_rows"], last["num_comm_sms"]) == (0, 0)
    assert cli.main(["replay", str(tmp_path / "a.csv"), "--shape", SHAPE]) == 0
    out = capsys.readouterr().out
    assert "SIMULATED" in out
    assert "comm SMs" in out


@pytest.mark.parametrize(
    ("trace", "shape", "reason"),
    [
        ("power-law:x", SHAPE, "power-law:A"),
        ("power-law:-1", SHAPE, "power-law:A"),
        ("powerlaw:1.2", SHAPE, "power-law:A"),
        ("random", "16,17,8,8", "K <= E"),
        ("random", "16,2,8", "E,K,H,I"),
        ("random", "1,1,8,8", "--ranks 2"),
        ("missing.npy", SHAPE, "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_refused(
    trace: str, shape: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", trace, "--shape", shape]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1,2\n3\n", "1,x\n", ""])
def test_a_file_that_holds_no_ids_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(OptionError, match=r"a\.csv"):
        routing_trace.read(tmp_path / "a.csv")
