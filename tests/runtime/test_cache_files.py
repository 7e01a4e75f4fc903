"""Entries of the cache folder: what they are, whether they are whole, what goes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import filelock
import pytest

from moe_compiler.runtime import build, cache_files
from moe_compiler.runtime.cache_files import Kind, State
from moe_compiler.runtime.proof_cache import ProofFiles


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with a build, a failed build, a proof, and what an interrupted process left."""
    monkeypatch.setenv("MOEFLEX_CACHE_DIR", str(tmp_path))
    build.build(unit("kernel"))
    with pytest.raises(Exception, match="was not built"):
        build.build(unit("wrong", "raise SystemExit(1)"))
    ProofFiles("salt").save("key", "proven")
    (tmp_path / ".kernel-abc").mkdir()
    (tmp_path / ".kernel-abc" / "half.so").write_bytes(b"x")
    (tmp_path / "machine-cpu.json").write_text("{}")
    return tmp_path


def unit(name: str, source: str = "") -> build.Unit:
    """A build that copies its source."""
    program = source or "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[2])"
    return build.Unit(
        name=name,
        source="content",
        source_name="kernel.cpp",
        artifact_name="kernel.so",
        command=(sys.executable, "-c", program, "{source}", "{artifact}"),
    )


def of_kind(root: Path, kind: Kind) -> list[cache_files.Entry]:
    return [entry for entry in cache_files.entries(root) if entry.kind is kind]


def grow_old(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_every_kind_is_recognised(root: Path) -> None:
    names = {kind: [e.name for e in of_kind(root, kind)] for kind in Kind}
    assert names[Kind.BUILD] == [unit("kernel").entry_name]
    assert [name.endswith(".failed.txt") for name in names[Kind.FAILURE]] == [True]
    assert [name.startswith("proofs/") for name in names[Kind.PROOF]] == [True]
    assert names[Kind.MEASUREMENT] == ["machine-cpu.json"]
    assert ".kernel-abc" in names[Kind.LEFTOVER]
    (entry,) = of_kind(root, Kind.BUILD)
    files = [f for f in (root / entry.name).iterdir() if f.is_file()]
    assert entry.num_bytes == sum(f.stat().st_size for f in files) > 0


def test_a_damaged_build_is_found_and_goes(root: Path) -> None:
    (entry,) = of_kind(root, Kind.BUILD)
    assert cache_files.check(root, entry) is State.WHOLE
    with (root / entry.name / "kernel.so").open("ab") as file:
        file.write(b"\0")
    # the source has the artifact's first content; it must not vouch for it
    (root / entry.name / "kernel.cpp").unlink()
    assert cache_files.check(root, entry) is State.DAMAGED
    chosen = cache_files.outdated(
        root, cache_files.entries(root), older_than_s=1e9, keep_bytes=None
    )
    assert {e.kind for e in chosen} == {Kind.BUILD, Kind.FAILURE}
    assert len(cache_files.remove(root, chosen)) == 2
    assert not of_kind(root, Kind.BUILD) and of_kind(root, Kind.PROOF)


def test_a_build_without_a_record_is_damaged(root: Path) -> None:
    (entry,) = of_kind(root, Kind.BUILD)
    (root / entry.name / "sha256.txt").unlink()
    assert cache_files.check(root, entry) is State.DAMAGED


def test_old_entries_go_and_unfinished_ones_only_when_abandoned(root: Path) -> None:
    (entry,) = of_kind(root, Kind.BUILD)
    grow_old(root / entry.name, 50 * 86400)
    found = cache_files.entries(root)
    chosen = cache_files.outdated(root, found, older_than_s=40 * 86400, keep_bytes=None)
    assert {e.kind for e in chosen} == {Kind.BUILD, Kind.FAILURE}
    grow_old(root / ".kernel-abc", 2 * cache_files.ABANDONED_S)
    found = cache_files.entries(root)
    chosen = cache_files.outdated(root, found, older_than_s=1e9, keep_bytes=None)
    assert ".kernel-abc" in {e.name for e in chosen}


def test_the_youngest_stay_when_there_is_too_much(root: Path) -> None:
    (entry,) = of_kind(root, Kind.BUILD)
    grow_old(root / entry.name, 1000)
    sizes = sum(e.num_bytes for e in cache_files.entries(root) if e.kind is Kind.PROOF) + 2
    found = cache_files.entries(root)
    chosen = cache_files.outdated(root, found, older_than_s=1e9, keep_bytes=sizes)
    assert {e.kind for e in chosen} == {Kind.BUILD, Kind.FAILURE}
    chosen = cache_files.outdated(root, found, older_than_s=1e9, keep_bytes=0)
    assert Kind.PROOF in {e.kind for e in chosen}


def test_a_build_in_the_making_stays(root: Path) -> None:
    (entry,) = of_kind(root, Kind.BUILD)
    with filelock.FileLock(str(root / f".{entry.name}.lock")):
        assert cache_files.remove(root, [entry]) == []
    assert (root / entry.name).is_dir()


def test_a_missing_folder_is_empty(tmp_path: Path) -> None:
    assert cache_files.entries(tmp_path / "nowhere") == []
