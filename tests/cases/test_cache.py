"""Kind: what is kept between compilations, processes and folders."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.cases.blocks import BACKEND, Block, rand
from tests.cases.processes import finish, start
from tests.cases.test_numerics import scaled
from tests.tolerances import assert_close_to_eager


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def models() -> dict[str, Block]:
    """Same shapes, other constants."""
    found = {}
    for route in itertools.product(("sigmoid", "softmax"), (True, False), (1.0, 2.5)):
        found[str(route)] = Block(scaled(*route), "gather")
    route = scaled("softmax", True, 1.0)
    for top_k in (1, 3):
        found[f"k{top_k}"] = Block(route, "gather", top_k=top_k)
    found["gelu"] = Block(route, "gather", act=F.gelu)
    found["tanh"] = Block(route, "gather", act=lambda z: F.gelu(z, approximate="tanh"))
    return found


@pytest.mark.slow
def test_same_shapes_other_constants() -> None:
    """A cache key left out what the code depends on: another model's kernel was served."""
    x = 4 * rand(9, 16)
    for round_ in range(2):
        torch._dynamo.reset()
        shuffled = list(models().items())
        random.Random(round_).shuffle(shuffled)
        for _, model in shuffled:
            with torch.no_grad():
                assert_close_to_eager(torch.compile(model, backend=BACKEND)(x), model(x))
    with torch.no_grad():
        results = [model(x) for model in models().values()]
    for one, other in itertools.combinations(results, 2):
        assert not torch.allclose(one, other, rtol=1e-3, atol=1e-4)


def test_relative_cache_folder_and_chdir(tmp_path: Path) -> None:
    """A relative folder means the folder in which the process started."""
    # Inductor of torch 2.11 compiles in a folder of its own, where a relative one is not found.
    takes_relative = torch.__version__ >= "2.12"
    names = ("TORCHINDUCTOR_CACHE_DIR",) * takes_relative + ("MOEFLEX_CACHE_DIR",)
    relative = {name: f"./c_{name.lower()}" for name in names}
    (tmp_path / "elsewhere").mkdir()
    process = start(tmp_path / "1.pt", relative, tmp_path, between="os.chdir('elsewhere')")
    finish(process, tmp_path / "1.pt")
    assert not list((tmp_path / "elsewhere").iterdir())
    if BACKEND == "moeflex":
        assert files_below(tmp_path / "c_moeflex_cache_dir")
    absolute = {name: str(tmp_path / value) for name, value in relative.items()}
    finish(start(tmp_path / "2.pt", absolute, Path("/")), tmp_path / "2.pt")


@pytest.mark.slow
def test_processes_that_share_a_cache_and_damaged_entries(tmp_path: Path) -> None:
    """Half-written files were read; an entry that is damaged or gone is made again."""
    ours = tmp_path / "ours"
    env = {"MOEFLEX_CACHE_DIR": str(ours), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    results = [tmp_path / f"{i}.pt" for i in range(3)]
    for process, result in [(start(r, env, tmp_path), r) for r in results]:
        finish(process, result)
    for path in files_below(ours):
        os.truncate(path, path.stat().st_size // 2)
    finish(start(results[0], env, tmp_path), results[0])
    remove = f"import shutil; shutil.rmtree({str(ours)!r}, ignore_errors=True)"
    finish(start(results[1], env, tmp_path, before=remove), results[1])
    shutil.rmtree(ours, ignore_errors=True)
    finish(start(results[2], env, tmp_path), results[2])


def test_second_process_finds_what_the_first_has_built(tmp_path: Path) -> None:
    if BACKEND != "moeflex":
        pytest.skip("about the cache of moeflex")
    env = {
        "MOEFLEX_CACHE_DIR": str(tmp_path / "ours"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    finish(start(tmp_path / "1.pt", env, tmp_path), tmp_path / "1.pt")
    built = {path: path.stat().st_mtime_ns for path in files_below(tmp_path / "ours")}
    libraries = {path for path in built if path.suffix == ".so"}
    assert libraries
    finish(start(tmp_path / "2.pt", env, tmp_path), tmp_path / "2.pt")
    after = files_below(tmp_path / "ours")
    assert {path for path in after if path.suffix == ".so"} == libraries
    assert all(path.stat().st_mtime_ns == built[path] for path in libraries)
