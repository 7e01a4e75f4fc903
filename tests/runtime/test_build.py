"""The build cache and the search for a compiler."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_compiler.errors import BuildError, ToolchainError
from moe_compiler.runtime import build, toolchain

SOURCE = 'extern "C" int answer() { return 42; }\n'


def make_unit(source: str = SOURCE, **inputs: str) -> build.Unit:
    compiler = toolchain.find_compiler()
    return build.Unit(
        name="answer",
        source=source,
        source_name="kernel.cpp",
        artifact_name="kernel.so",
        command=(*compiler.command, "-shared", "-fPIC", "{source}", "-o", "{artifact}"),
        inputs=inputs,
    )


def answer_of(report: build.BuildReport) -> int:
    return int(ctypes.CDLL(report.path).answer())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh cache whose path holds a space."""
    folder = tmp_path / "build cache"
    monkeypatch.setenv("MOEFLEX_CACHE_DIR", str(folder))
    return folder


def test_builds_once_and_keeps_what_it_did(cache: Path) -> None:
    first, second = build.build(make_unit()), build.build(make_unit())
    assert (first.cached, second.cached) == (False, True)
    assert first.path == second.path and answer_of(first) == 42
    entry = Path(first.path).parent
    assert entry.parent == cache
    assert {p.name for p in entry.iterdir()} == {
        "kernel.cpp", "kernel.so", "command.txt", "log.txt", "sha256.txt",
    }  # fmt: skip
    assert str(entry / "kernel.cpp") in (entry / "command.txt").read_text()


def test_the_key_covers_source_command_and_inputs(cache: Path) -> None:
    units = [make_unit(), make_unit(SOURCE + "\n"), make_unit(isa="a"), make_unit(isa="b")]
    assert len({unit.key for unit in units}) == len(units)
    assert make_unit(isa="a").key == make_unit(isa="a").key


def test_damaged_entries_are_built_again(cache: Path) -> None:
    report = build.build(make_unit())
    for path in Path(report.path).parent.iterdir():
        os.truncate(path, path.stat().st_size // 2)
    again = build.build(make_unit())
    assert not again.cached and answer_of(again) == 42
    assert build.build(make_unit()).cached


def test_a_deleted_cache_is_made_anew(cache: Path) -> None:
    report = build.build(make_unit())
    subprocess.run(["rm", "-rf", str(cache)], check=True)
    again = build.build(make_unit())
    assert not again.cached and Path(again.path) == Path(report.path) and answer_of(again) == 42


def test_two_processes_build_one_entry(cache: Path) -> None:
    code = (
        "import tests.runtime.test_build as t; from moe_compiler.runtime import build; "
        "r = build.build(t.make_unit()); assert t.answer_of(r) == 42; print(r.cached)"
    )
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=root, env=env, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    outputs = [job.communicate()[0].strip() for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0]
    assert sorted(outputs) == ["False", "True", "True"]
    assert not [p for p in cache.iterdir() if p.name.startswith(".answer-") and p.is_dir()]


def test_a_failed_compile_shows_command_and_last_lines(cache: Path) -> None:
    with pytest.raises(BuildError) as failure:
        build.build(make_unit("int broken( { return unknown_name; }"))
    text = str(failure.value)
    assert "command: " in text and "error" in text and "-shared" in text
    assert not [p for p in cache.iterdir() if p.is_dir()]


def test_a_relative_folder_means_the_start_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEFLEX_CACHE_DIR", "./relative-cache")
    monkeypatch.setattr(build, "_user_cache", lambda: pytest.fail("the variable was ignored"))
    monkeypatch.setattr("moe_compiler.settings._START_DIR", str(tmp_path))
    monkeypatch.chdir("/")
    assert build.cache_root() == tmp_path / "relative-cache"


def test_an_unwritable_cache_falls_back_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    monkeypatch.setenv("MOEFLEX_CACHE_DIR", str(blocker / "cache"))
    with caplog.at_level(logging.WARNING, logger="moe_compiler.runtime.build"):
        roots = {build.cache_root(), build.cache_root()}
        report = build.build(make_unit())
    assert len(roots) == 1 and answer_of(report) == 42
    warnings = [r for r in caplog.records if "cannot be written" in r.getMessage()]
    assert len(warnings) == 1
    assert "MOEFLEX_CACHE_DIR" in warnings[0].getMessage()


def test_no_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOEFLEX_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "missing" / "cache"))
    monkeypatch.setenv("HOME", "/nonexistent")
    assert build.cache_root() == tmp_path / "missing" / "cache" / "moeflex"


def test_no_compiler_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError) as failure:
        toolchain.find_compiler({"PATH": str(tmp_path)})
    for text in ("apt-get install g++", "CXX", "g++: not on PATH"):
        assert text in str(failure.value)


def test_cxx_wins_and_may_hold_arguments(tmp_path: Path) -> None:
    real = toolchain.find_compiler()
    wrapper = tmp_path / "my c++"
    wrapper.write_text(f'#!/bin/sh\nexec "{real.command[0]}" "$@"\n')
    wrapper.chmod(0o755)
    found = toolchain.find_compiler({"CXX": f"'{wrapper}' -O1", "PATH": os.environ["PATH"]})
    assert found.command == (str(wrapper), "-O1")
    with pytest.raises(ToolchainError, match="missing-compiler"):
        toolchain.find_compiler({"CXX": "missing-compiler", "PATH": os.environ["PATH"]})


def test_unknown_options_are_noticed() -> None:
    compiler = toolchain.find_compiler()
    assert toolchain.accepts(compiler, ("-O2",))
    assert not toolchain.accepts(compiler, ("-mno-such-instruction-set",))
