"""The house: what is packaged, what an import pulls in, and that the rooms cannot be entered by the
wrong door."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("passes", "codegen", "runtime", "templates")
TEMPLATE_SUFFIXES = {".h", ".cuh", ".cpp", ".cu", ".in", ".tmpl", ".html"}
HEAVY = ("networkx", "rich", "typer", "transformers", "triton", "sympy.printing")


def run_python(code: str, *, python: str = sys.executable, cwd: Path | None = None) -> str:
    """Output of `code` in a fresh interpreter outside of the checkout."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", code],
        env=env,
        cwd=cwd or Path("/"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def source_files() -> set[str]:
    """Files that must be in the wheel, as paths inside it."""
    found = set()
    for folder, _, names in os.walk(ROOT / "moe_compiler", followlinks=True):
        for path in (Path(folder) / name for name in names):
            if path.suffix in TEMPLATE_SUFFIXES | {".py", ".typed"}:
                found.add(path.relative_to(ROOT).as_posix())
    return found


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist built from a copy of the checkout, and a wheel built from that sdist."""
    work = tmp_path_factory.mktemp("dist")
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    copy = work / "copy"
    for name in filter(None, tracked):
        source, target = ROOT / name, copy / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    backend = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"

    def build(kind: str, tree: Path) -> Path:
        done = subprocess.run(
            [sys.executable, "-c", backend, f"build_{kind}", str(work)],
            cwd=tree,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return work / done.stdout.strip().splitlines()[-1]

    sdist = build("sdist", copy)
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(work / "unpacked", filter="data")
        else:
            archive.extractall(work / "unpacked")
    (tree,) = (work / "unpacked").iterdir()
    return sdist, build("wheel", tree)


def test_wheel_holds_every_source_and_nothing_else(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[1]) as wheel:
        names = set(wheel.namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"moe_compiler"}
    in_package = {name for name in names if name.startswith("moe_compiler/")}
    assert in_package == source_files()
    for room in ROOMS:
        assert f"moe_compiler/{room}/__init__.py" in in_package


def test_wheel_names_its_entry_points_and_licence(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[1]) as wheel:
        by_name = {name.split(".dist-info/")[-1]: name for name in wheel.namelist()}
        entry_points = wheel.read(by_name["entry_points.txt"]).decode()
        described = wheel.read(by_name["METADATA"]).decode()
    assert "moeflex = moe_compiler.backend:moeflex" in entry_points
    assert "moeflex = moe_compiler.cli:main" in entry_points
    assert "License-Expression: Apache-2.0" in described
    assert "licenses/LICENSE" in by_name


def test_installed_wheel_adds_one_name_and_finds_its_templates(
    distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, system_site_packages=False)
    python = str(home / "bin" / "python")
    site = Path(run_python("import sysconfig; print(sysconfig.get_path('purelib'))", python=python))
    with zipfile.ZipFile(distributions[1]) as wheel:
        wheel.extractall(site)
    added = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")}
    assert added == {"moe_compiler"}
    code = (
        "import importlib.resources as r, moe_compiler, moe_compiler.templates as t;"
        "print(moe_compiler.__file__); print(*sorted(p.name for p in r.files(t).iterdir()))"
    )
    where, templates = run_python(code, python=python).splitlines()
    assert Path(where).is_relative_to(home)
    in_checkout = {p.name for p in (ROOT / "templates").iterdir() if p.suffix in TEMPLATE_SUFFIXES}
    assert in_checkout <= set(templates.split())


def test_entry_points_are_installed() -> None:
    (backend,) = metadata.entry_points(group="torch_dynamo_backends", name="moeflex")
    assert backend.value == "moe_compiler.backend:moeflex"
    assert callable(backend.load())


def imported_by(statement: str) -> set[str]:
    return set(run_python(f"{statement}\nimport sys; print(*sys.modules)").split())


def test_package_import_is_light() -> None:
    modules = imported_by("import moe_compiler")
    assert "torch" not in modules
    assert not modules.intersection(HEAVY)


def test_backend_import_is_light() -> None:
    modules = imported_by("import torch, torch._dynamo\nimport moe_compiler.backend")
    before = imported_by("import torch, torch._dynamo")
    assert not (modules - before).intersection(HEAVY)


def test_data_modules_do_not_import_torch() -> None:
    assert "torch" not in imported_by("import moe_compiler.ir, moe_compiler.errors")


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_refuse_their_bare_name(room: str) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        f"try:\n    import {room}\nexcept ImportError as error:\n    print(error)\n"
        "else:\n    raise SystemExit('imported')"
    )
    message = run_python(code)
    assert f"moe_compiler.{room}" in message
    assert "pip install" in message


@pytest.mark.parametrize("room", ROOMS)
def test_links_are_relative(room: str) -> None:
    link = ROOT / "moe_compiler" / room
    assert link.is_symlink()
    assert os.readlink(link) == f"../{room}"


def test_every_test_folder_mirrors_a_room() -> None:
    known = {*ROOMS, "cases", "data", "goldens", "models"}
    folders = {p.name for p in (ROOT / "tests").iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders <= known
