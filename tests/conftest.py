"""Options, environment and fixtures that every test shares."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

GOLDEN_DIR = Path(__file__).parent / "goldens"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden files anew instead of comparing with them",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Before any test imports the project: nothing may be written to the user's own cache.
    # Workers of xdist inherit the variable, so that they share what one of them has built.
    if "MOEFLEX_CACHE_DIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="moeflex-tests-")
        os.environ["MOEFLEX_CACHE_DIR"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # Where it is installed, an einsum of three operands looks for the best order at trace time, which
    # makes every symbolic size static: then models here would not be dynamic in T.
    if torch.backends.opt_einsum.is_available():
        torch.backends.opt_einsum.enabled = False
    # Triton decides at its import whether kernels are interpreted.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("gpu") and num_gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("multigpu") and num_gpus < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    """No compiled code, and no random state, of an earlier test."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with `tests/goldens/<name>`; `--update-golden` writes it."""

    def check(name: str, text: str) -> None:
        path = GOLDEN_DIR / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        assert path.exists(), f"no golden file {path}; write it with: pytest --update-golden"
        assert text == path.read_text(), f"{path} differs; read `pytest --update-golden` as a diff"

    return check
