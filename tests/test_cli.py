"""The command line: exit codes, what goes to which stream, and files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_compiler import __version__, cli
from moe_compiler.cli.options import parse_tokens
from moe_compiler.cli.units import bytes_text, count_text, time_text
from moe_compiler.errors import OptionError
from moe_compiler.model_report import ModelReport

TARGETS = str(Path(__file__).with_name("test_inspection.py"))
ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> int:
    return cli.main(["inspect", *arguments])


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"moeflex {__version__}\n"


def test_help_names_every_command_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in cli.COMMANDS)
    assert cli.main(["inspect", "--help"]) == 0
    text = capsys.readouterr().out
    assert "moeflex inspect ./Qwen3-235B-A22B/config.json" in text
    assert all(
        option in text
        for option in ("--tokens", "--strict", "--json", "--dot", "--html", "--device")
    )


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys\nfrom moe_compiler.cli import main\nmain(['inspect', '--help'])\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "False"


def test_a_table_on_a_pipe_is_one_line_per_block(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{TARGETS}:mixed", "--tokens", "1,64") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    lines = out.splitlines()
    (row,) = [
        line for line in lines if line.startswith("layers.0-1,3 x3") and "gathered weights" in line
    ]
    for text in (
        "softmax>top2>sum",
        "E8 K2 H64 I32 fp32 silu",
        "gate and up separate",
        "197 kB",
        "49.2 kB",
    ):
        assert text in row
    assert any(
        line.startswith("layers.2") and "refused" in line and "not summed" in line for line in lines
    )
    assert any(line.startswith("all matched blocks") for line in lines)
    assert "5 MoE blocks: 4 matched, 1 refused" in out


def test_all_lists_each_block(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{TARGETS}:mixed", "--tokens", "1", "--all") == 0
    out = capsys.readouterr().out
    assert all(f"\nlayers.{i} " in out for i in range(5))


def test_json_on_standard_output_is_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{TARGETS}:whole", "--tokens", "1,16", "--json", "-") == 0
    report = ModelReport.from_json(capsys.readouterr().out)
    assert report.tokens == (1, 16)
    assert len(report.blocks) == 1


def test_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, dot, data = (tmp_path / name for name in ("r.html", "r.dot", "r.json"))
    assert (
        run(f"{TARGETS}:whole", "-q", "--html", str(page), "--dot", str(dot), "--json", str(data))
        == 0
    )
    assert capsys.readouterr().out == ""
    assert page.read_text().startswith("<!doctype html>")
    assert dot.read_text().startswith("digraph model {")
    assert json.loads(data.read_text())["model_class"] == "Stack"


def test_strict_fails_on_a_refused_block(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{TARGETS}:whole", "--strict", "-q") == 0
    assert run(f"{TARGETS}:mixed", "--strict", "-q") == 1
    assert "1 of 5 blocks not matched" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "Missing argument"),
        (["x", "--level", "fx"], 2, "--level"),
        (["x", "--no-such"], 2, "--no-such"),
        (
            ["x", "--tokens", "1,two"],
            2,
            "--tokens takes positive counts such as 1,64,2048; got '1,two'",
        ),
        (["x", "--json", "-", "--dot", "-"], 2, "only one of"),
        (["nothing"], 3, "the target is MODULE:FACTORY"),
        (
            [f"{TARGETS}:whole", "-q", "--tokens", "1", "--json", "/no/such/folder/r.json"],
            2,
            "cannot be written",
        ),
    ],
)
def test_exit_codes(
    arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == code
    out, err = capsys.readouterr()
    assert text in err
    assert out == ""
    assert "Traceback" not in err


def test_a_reader_that_leaves_is_no_error() -> None:
    code = (
        "import sys\nfrom moe_compiler.cli import main\n"
        f"sys.exit(main(['inspect', '{TARGETS}:whole', '--json', '-']))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    text = process.stderr.read()
    assert process.wait(timeout=300) == 0, text
    assert "Traceback" not in text


def test_token_counts() -> None:
    assert parse_tokens("1, 64,1") == (1, 64)
    for text in ("", "0", "-1", "1.5"):
        with pytest.raises(OptionError):
            parse_tokens(text)


def test_units() -> None:
    assert [bytes_text(n) for n in (0, 999, 1000, 999_900, 1.31e12)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "1.00 MB",
        "1.31 TB",
    ]
    assert [count_text(n) for n in (20, 235.09e9)] == ["20", "235 B"]
    assert [time_text(t) for t in (0.0131, 17.58, 1220, 3.4e6)] == [
        "13.1 ns",
        "17.6 us",
        "1.22 ms",
        "3.40 s",
    ]
