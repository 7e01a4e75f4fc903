"""Kind: finding the backend, and machines that lack something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.cases.blocks import BACKEND, Block, compare, rand
from tests.cases.processes import finish, start
from tests.tolerances import assert_close_to_eager


def test_backend_is_known_without_an_import() -> None:
    code = (
        "import sys, torch\n"
        "assert 'moeflex' in torch._dynamo.list_backends()\n"
        "assert 'moe_compiler.backend' not in sys.modules\n"
        "layer = torch.compile(torch.nn.Linear(4, 4), backend='moeflex')\n"
        "print(tuple(layer(torch.ones(2, 4)).shape))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "(2, 4)"


@pytest.mark.parametrize("form", ["gather", "loop"])
def test_backward_reaches_the_backend(form: str) -> None:
    compare(Block(form=form), rand(9, 16), grad=True, replaced=True)


def test_unknown_options_are_named_with_near_misses() -> None:
    compiled = torch.compile(Block(form="gather"), backend="moeflex", options={"strickt": True})
    with pytest.raises(Exception, match=r"strickt.*strict"):
        compiled(rand(9, 16))


def test_mode_and_inductor_options_are_passed_on() -> None:
    compare(Block(form="gather"), rand(9, 16), mode="reduce-overhead")
    compare(Block(form="gather"), rand(9, 16), options={"max_autotune": False})


@pytest.mark.parametrize("cuda_home", ["", "empty"])
def test_without_the_cuda_toolkit(cuda_home: str, tmp_path: Path) -> None:
    home = str(tmp_path / cuda_home) if cuda_home else ""
    folders = [p for p in os.environ["PATH"].split(":") if not os.path.exists(f"{p}/nvcc")]
    env = {"PATH": ":".join(folders), "CUDA_HOME": home, "CUDA_PATH": home}
    finish(start(tmp_path / "y.pt", env, tmp_path), tmp_path / "y.pt")


@pytest.mark.parametrize("capability", [(7, 5), (8, 9), (9, 0), (10, 0), (12, 1)])
def test_capability_of_a_gpu_that_is_not_used(capability: tuple[int, int]) -> None:
    model, x = Block(form="gather"), rand(9, 16)
    with mock.patch("torch.cuda.get_device_capability", return_value=capability), torch.no_grad():
        got = torch.compile(model, backend=BACKEND)(x)
    assert_close_to_eager(got, model(x))
