"""Compiles the C++ programs of these tests once a session."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_compiler.errors import ToolchainError
from moe_compiler.runtime import toolchain

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "templates"

Compile = Callable[..., Path]


@pytest.fixture(scope="session")
def compile_cpp(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """`compile_cpp(source, *flags) -> path`; skips where there is no compiler."""
    try:
        compiler = toolchain.find_compiler()
    except ToolchainError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("cpp")

    def compile_cpp(source: Path, *flags: str) -> Path:
        target = folder / f"{source.stem}-{abs(hash(flags)):x}"
        done = subprocess.run(
            [
                *compiler.command,
                "-std=c++17",
                *flags,
                f"-I{TEMPLATES}",
                str(source),
                "-o",
                str(target),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode and "-fsanitize=thread" in flags and "tsan" in done.stderr:
            pytest.skip("this compiler has no ThreadSanitizer")
        assert done.returncode == 0, done.stderr
        return target

    return compile_cpp
