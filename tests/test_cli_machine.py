"""`moeflex doctor` and `moeflex cache`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from moe_compiler import cli
from moe_compiler.cli.cache import parse_bytes
from moe_compiler.errors import OptionError
from moe_compiler.runtime import doctor, toolchain
from moe_compiler.runtime.doctor import Finding, Verdict

ROOT = Path(__file__).parents[1]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with one build that is damaged."""
    folder = tmp_path / "cache"
    (folder / "kernel-0123").mkdir(parents=True)
    (folder / "kernel-0123" / "kernel.so").write_bytes(b"x")
    (folder / "kernel-0123" / "sha256.txt").write_text("0" * 64)
    monkeypatch.setenv("MOEFLEX_CACHE_DIR", str(folder))
    return folder


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    return json.loads(capsys.readouterr().out)


def test_cache_lists_verifies_and_prunes(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache"]) == 0
    assert "kernel-0123" in capsys.readouterr().out
    assert cli.main(["cache", "verify", "--json", "-"]) == 1
    (entry,) = report(capsys)["entries"]
    assert entry["state"] == "damaged" and entry["kind"] == "build"
    assert cli.main(["cache", "prune", "--dry-run"]) == 0
    assert "would be removed" in capsys.readouterr().out
    assert (cache / "kernel-0123").is_dir()
    assert cli.main(["cache", "prune"]) == 0
    assert "1 entries removed" in capsys.readouterr().out
    assert not (cache / "kernel-0123").exists()
    assert cli.main(["cache", "verify"]) == 0


def test_sizes() -> None:
    assert [parse_bytes(t) for t in ("10", "500MB", "1.5 gb", "2k")] == [10, 5e8, 1.5e9, 2000]
    for wrong in ("", "MB", "-1", "5 parsecs"):
        with pytest.raises(OptionError, match="takes a size such as"):
            parse_bytes(wrong)


def test_an_unusable_size_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "prune", "--max-bytes", "much"]) == 2
    assert "500MB" in capsys.readouterr().err


def test_doctor_names_every_area(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor", "--json", "-"])
    found = report(capsys)
    findings = found["findings"]
    assert {f["area"] for f in findings} == {"python", "cpu", "gpu", "ranks", "cache"}
    assert code == (0 if found["works"] else 1)
    assert found["works"] == all(f["verdict"] != "broken" for f in findings)
    folder = next(f for f in findings if f["what"] == "cache folder")
    assert str(cache) in folder["found"]
    assert all(f["advice"] or f["effect"] for f in findings if f["verdict"] != "ok")


def test_doctor_says_what_to_do_without_a_compiler(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    toolchain._find.cache_clear()
    assert cli.main(["doctor"]) == 1
    line = next(x for x in capsys.readouterr().out.splitlines() if "C++ compiler" in x)
    assert line.startswith("broken") and "apt-get install g++" in line


def test_only_what_is_broken_fails() -> None:
    def finding(verdict: Verdict) -> Finding:
        return Finding(area="gpu", what="device", verdict=verdict, found="none")

    assert doctor.works([finding(Verdict.OK), finding(Verdict.ABSENT)])
    assert not doctor.works([finding(Verdict.BROKEN)])


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_an_example_and_a_page(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"moeflex {command} " in text
    assert "--json" in text and "--quiet" in text
    page = (ROOT / "docs" / "commands.md").read_text()
    assert f"## {command}\n" in page
    assert f"`moeflex {command}" in (ROOT / "README.md").read_text()


def commands_of_the_docs() -> list[str]:
    page = (ROOT / "docs" / "commands.md").read_text()
    return [line for line in page.splitlines() if line.startswith("moeflex ")]


@pytest.mark.parametrize("line", commands_of_the_docs())
def test_options_of_the_examples_exist(line: str) -> None:
    """An example is parsed as it stands; a model that is not there is the only thing it may fail for."""
    words = shlex.split(line)[1:]
    assert cli.main([*words, "--help"]) == 0
    if words[0] in ("inspect", "compile", "verify", "diff"):  # the others would run
        assert cli.main(words) == 3
