"""The examples and the benchmarks run as they stand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import render_tables

ROOT = Path(__file__).resolve().parents[1]


def run_script(path: str, *arguments: str) -> str:
    """Standard output of a script of the repository."""
    done = subprocess.run(
        [sys.executable, str(ROOT / path), *arguments],
        env={**os.environ, "CI": "true", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_quickstart() -> None:
    pytest.importorskip("transformers")
    output = run_script("examples/quickstart.py", "--rounds", "1")
    assert "model.layers.0.mlp and" in output
    assert "softmax>top8>sum" in output
    assert "left to Inductor" not in output
    assert "100.0% of 256 predicted tokens equal" in output
    for name in ("eager", "Inductor", "moeflex"):
        assert any(line.strip(" │|").startswith(name) for line in output.splitlines())


@pytest.mark.slow
def test_switch_tp_ep() -> None:
    pytest.importorskip("transformers")
    launcher = Path(torch.distributed.__file__).parent / "run.py"
    output = run_script(str(launcher), "--nproc-per-node", "2", "examples/switch_tp_ep.py")
    assert output.count("True") == 5
    assert "False" not in output


@pytest.mark.parametrize("page", render_tables.PAGES, ids=lambda page: page.name)
def test_tables_of_the_pages_are_current(page: Path) -> None:
    text = page.read_text()
    assert "<!-- table " in text
    assert render_tables.rendered(text) == text


def result(**changes: object) -> dict[str, object]:
    rows = [
        {
            "model": "a",
            "tokens": tokens,
            "ours_us": 10.0,
            "fast_us": 20.0,
            "slow_us": 40.0,
            "eager_us": 5.0,
            "floor_us": 1.0,
            "spread": [9.0, 12.0],
        }
        for tokens in (1, 16)
    ]
    return {
        "benchmark": "example",
        "date": "2026-01-02T03:04:05",
        "commit": "0123456789abcdef",
        "device": "a machine",
        "num_devices": 1,
        "command": "python example.py",
        "versions": {"torch": "2.13", "cuda": None},
        "rows": rows,
        **changes,
    }


def test_a_table_shows_rivals_bounds_and_circumstances() -> None:
    text = render_tables.render(result())
    lines = text.splitlines()
    times = "moeflex, us | fast, us | slow, us | eager, us | floor, us"
    assert lines[0] == f"| tokens | {times} | best rival / moeflex |"
    assert lines[2] == "| 1 | 10.0 | 20.0 | 40.0 | 5.00 | 1.00 | 2.00x |"
    assert "**2.00x**" in text
    assert "a machine; torch 2.13; commit 012345678, 2026-01-02; `python example.py`" in text


def test_compile_times_are_shown_in_seconds_and_as_overhead() -> None:
    rows = [
        {"model": "m", "cache": "cold", "ours_us": 12e6, "inductor_us": 10e6, "stage_match_us": 1}
    ]
    text = render_tables.render(result(benchmark="compile_time", rows=rows))
    assert "| 12.0 | 10.0 | 1.20x |" in text
    assert "stage" not in text


def test_check_finds_a_stale_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- table example.cpu -->\nold\n<!-- end of table -->\nb\n")
    (tmp_path / "example.cpu.json").write_text(json.dumps(result()))
    monkeypatch.setattr(render_tables, "PAGES", (readme,))
    monkeypatch.setattr(render_tables, "RESULTS", tmp_path)
    assert render_tables.main(["--check"]) == 1
    assert "old" in readme.read_text()
    assert render_tables.main([]) == 0
    assert "old" not in readme.read_text()
    assert "moeflex, us" in readme.read_text()
    assert readme.read_text().startswith("a\n")
    assert readme.read_text().endswith("b\n")
    assert render_tables.main(["--check"]) == 0


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=str)
def test_result_files_follow_the_schema(path: Path) -> None:
    found = json.loads(path.read_text())
    wanted = {"benchmark", "date", "commit", "device", "num_devices", "command", "versions", "rows"}
    assert wanted <= set(found)
    assert path.name.startswith(found["benchmark"] + ".")
    assert found["rows"]
    assert all("torch" in found["versions"] and "ours_us" in row for row in found["rows"])
