"""A block that is compiled in a process of its own, with an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from tests.cases.blocks import Block, rand
from tests.tolerances import assert_close_to_eager

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import os, sys, torch
sys.path.insert(0, {root!r})
from tests.cases.blocks import BACKEND, Block, rand
{before}
model = Block(form="gather")
compiled = torch.compile(model, backend=BACKEND)
with torch.no_grad():
    y = compiled(rand(9, 16))
    {between}
    compiled(rand(5, 16))
torch.save(y, os.environ["RESULT"])
"""


def start(
    result: Path, env: Mapping[str, str], cwd: Path, before: str = "", between: str = ""
) -> subprocess.Popen[str]:
    """A fresh process that compiles the block and saves its result."""
    code = CODE.format(root=str(ROOT), before=before, between=between)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1", "RESULT": str(result), **env},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], result: Path) -> str:
    """Wait, compare with eager, give the output."""
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output[-3000:]
    with torch.no_grad():
        assert_close_to_eager(torch.load(result), Block(form="gather")(rand(9, 16)))
    return output
