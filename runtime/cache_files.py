"""What lies in the cache folder: entries of builds, proofs, measurements, and what interrupted processes left.

A build is `<name>-<key>/` with `sha256.txt` beside its artifact (see `build`), a proof is a file under `proofs/`.
Whatever starts with a dot is a lock or the unfinished folder of a process that may still be running.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import filelock

from moe_compiler.ir import Name

ABANDONED_S = 24 * 3600.0
"""An unfinished folder or a lock that is older belongs to no running process."""

_RECORD = ("sha256.txt", "command.txt", "log.txt")


class Kind(Name):
    """What an entry is."""

    BUILD = "build"  # a compiled kernel or library
    PROOF = "proof"  # of one MoE block
    FAILURE = "failure"  # log and source of a build that failed
    MEASUREMENT = "measurement"  # of this machine
    LEFTOVER = "leftover"  # of a process that was interrupted, or still runs


class State(Name):
    """Whether an entry can be used."""

    WHOLE = "whole"
    DAMAGED = "damaged"  # its content is not what was recorded: it is built again when it is needed
    UNKNOWN = "unknown"  # nothing is recorded of its content


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of the cache folder.

    Attributes:
        name: file or folder, relative to the cache folder.
        kind: what it is.
        num_bytes: of all its files.
        age_s: seconds since it was written.
    """

    name: str
    kind: Kind
    num_bytes: int
    age_s: float


def entries(root: Path) -> list[Entry]:
    """All entries of a cache folder, by kind and name; files that vanish meanwhile are left out."""
    found = [_entry(root, path) for path in _paths(root)]
    return sorted((e for e in found if e is not None), key=lambda e: (e.kind.value, e.name))


def _paths(root: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            if path.name == "proofs" and path.is_dir():
                yield from path.iterdir()
            else:
                yield path


def _entry(root: Path, path: Path) -> Entry | None:
    try:
        files = [f for f in path.rglob("*") if f.is_file()] if path.is_dir() else [path]
        num_bytes = sum(f.stat().st_size for f in files)
        age_s = max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None
    return Entry(
        name=path.relative_to(root).as_posix(),
        kind=_kind(root, path),
        num_bytes=num_bytes,
        age_s=age_s,
    )


def _kind(root: Path, path: Path) -> Kind:
    if path.name.startswith(".") or path.name.startswith("tmp"):
        return Kind.LEFTOVER
    if path.parent != root:
        return Kind.PROOF
    if path.is_dir():
        return Kind.BUILD
    return Kind.FAILURE if path.name.endswith(".failed.txt") else Kind.MEASUREMENT


def check(root: Path, entry: Entry) -> State:
    """Read an entry and compare it with what was recorded when it was written."""
    if entry.kind is not Kind.BUILD:
        return State.UNKNOWN
    folder = root / entry.name
    try:
        recorded = (folder / "sha256.txt").read_text().strip()
        candidates = [f for f in folder.iterdir() if f.is_file() and f.name not in _RECORD]
        digests = {hashlib.sha256(f.read_bytes()).hexdigest() for f in candidates}
    except (OSError, ValueError):
        return State.DAMAGED
    return State.WHOLE if recorded in digests else State.DAMAGED


def outdated(
    root: Path, found: Sequence[Entry], *, older_than_s: float, keep_bytes: int | None
) -> list[Entry]:
    """What `prune` would remove: damaged builds, failures, abandoned leftovers, and what is too old or too much.

    Args:
        root: the cache folder.
        found: its entries.
        older_than_s: builds and proofs that are older go.
        keep_bytes: at most so many bytes stay, the youngest first; None for no limit.
    """
    chosen, rest = [], []
    for entry in found:
        if entry.kind is Kind.LEFTOVER:
            if entry.age_s > ABANDONED_S:
                chosen.append(entry)
        elif (
            entry.kind is Kind.FAILURE
            or entry.age_s > older_than_s
            or check(root, entry) is State.DAMAGED
        ):
            chosen.append(entry)
        else:
            rest.append(entry)
    if keep_bytes is not None:
        kept = 0
        for entry in sorted(rest, key=lambda e: e.age_s):
            kept += entry.num_bytes
            if kept > keep_bytes:
                chosen.append(entry)
    return chosen


def remove(root: Path, chosen: Iterable[Entry]) -> list[Entry]:
    """Remove entries; what was removed. A build is removed under its lock; a process that loaded it keeps its pages."""
    removed = []
    for entry in chosen:
        path = root / entry.name
        lock = (
            filelock.FileLock(str(root / f".{entry.name}.lock"), timeout=0)
            if entry.kind is Kind.BUILD
            else contextlib.nullcontext()
        )
        with contextlib.suppress(OSError, filelock.Timeout), lock:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
            removed.append(entry)
    return removed
