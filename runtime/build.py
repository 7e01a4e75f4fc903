"""The build cache: source text and a command in, a file out, each distinct pair built once a machine.

An entry is `<cache>/<name>-<sha256[:16]>/` with the source, the artefact, `command.txt`, `log.txt` and `sha256.txt`.
It is written to a temporary folder and renamed; a lock and a second look keep processes from building twice; an
artefact whose content is not what was recorded is built again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import getpass
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import filelock
import platformdirs

from moe_compiler import settings
from moe_compiler.errors import BuildError, CacheError

log = logging.getLogger(__name__)

_LOCK_TIMEOUT_S = 600.0
_NUM_LOG_LINES = 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What is to be built.

    Attributes:
        name: short name of the entry; letters, digits, `-`, `_`, `.`.
        source: text of the source file.
        source_name: its file name, e.g. "kernel.cpp".
        artifact_name: file name of the result, e.g. "kernel.so".
        command: the compiler and its options; `{source}` and `{artifact}` stand for the files.
        inputs: what else the result depends on (header texts, compiler version, instruction set), by name.
    """

    name: str
    source: str
    source_name: str
    artifact_name: str
    command: tuple[str, ...]
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> str:
        """SHA-256 of all that the artefact depends on."""
        digest = hashlib.sha256()
        parts = [self.source, self.source_name, self.artifact_name, *self.command]
        for name in sorted(self.inputs):
            parts += [name, self.inputs[name]]
        for part in parts:
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()

    @property
    def entry_name(self) -> str:
        """Name of the entry's folder."""
        return f"{self.name}-{self.key[:16]}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """What a build did: its name, wall seconds, whether it was found in the cache, and the artefact's path."""

    name: str
    seconds: float
    cached: bool
    path: str


def cache_root() -> Path:
    """The folder of the build cache, created if it is missing.

    `MOEFLEX_CACHE_DIR` where set (a relative path means the folder in which the process started), else the user's
    cache folder; where that cannot be written, a temporary folder, with one warning.

    Raises:
        CacheError: not even a temporary folder can be written.
    """
    wanted = wanted_cache_root()
    problem = _unwritable(wanted) if wanted else "this user has no cache folder"
    if not problem:
        return Path(wanted)
    return _fallback(wanted, problem)


def wanted_cache_root() -> str:
    """The folder that the build cache should have; "" where this user has none."""
    return settings.parse(os.environ).cache_dir or _user_cache()


def _user_cache() -> str:
    try:
        path = platformdirs.user_cache_dir("moeflex", appauthor=False)
    except (OSError, RuntimeError, KeyError):
        return ""
    return path if os.path.isabs(path) else ""


def _unwritable(folder: str) -> str:
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return str(error)


@functools.lru_cache(maxsize=16)
def _fallback(wanted: str, problem: str) -> Path:
    folder = Path(tempfile.gettempdir()) / f"moeflex-{_user_name()}"
    refused = _unwritable(str(folder)) or _not_ours(folder)
    if refused:
        try:
            folder = Path(tempfile.mkdtemp(prefix="moeflex-"))
        except OSError as error:
            raise CacheError(
                f"the build cache {wanted or '(none)'} cannot be written ({problem}), nor can a temporary "
                f"folder ({error}); set MOEFLEX_CACHE_DIR to a folder that can"
            ) from error
    log.warning(
        "the build cache %s cannot be written (%s); using %s. Set MOEFLEX_CACHE_DIR to a folder that "
        "can be written to keep builds.",
        wanted or "(none)",
        problem,
        folder,
    )
    return folder


def _not_ours(folder: Path) -> str:
    """A predictable name under a shared folder may have been made by somebody else."""
    getuid = getattr(os, "getuid", None)
    if getuid is not None and folder.stat().st_uid != getuid():
        return "it belongs to another user"
    folder.chmod(0o700)
    return ""


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return str(getattr(os, "getuid", lambda: "user")())


def build(unit: Unit) -> BuildReport:
    """Build `unit`, or find it in the cache.

    Raises:
        BuildError: the compiler failed; the message ends with its last lines.
        CacheError: no folder can be written.
    """
    start = time.perf_counter()
    root = cache_root()
    artifact = root / unit.entry_name / unit.artifact_name
    cached = _is_whole(artifact)
    if not cached:
        with _locked(root, unit):
            cached = _is_whole(artifact)
            if not cached:
                _make(root, unit)
    report = BuildReport(
        name=unit.name, seconds=time.perf_counter() - start, cached=cached, path=str(artifact)
    )
    log.info("%s: %s in %.2f s", unit.entry_name, "found" if cached else "built", report.seconds)
    return report


def _is_whole(artifact: Path) -> bool:
    try:
        recorded = (artifact.parent / "sha256.txt").read_text().strip()
        return hashlib.sha256(artifact.read_bytes()).hexdigest() == recorded
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _locked(root: Path, unit: Unit) -> Iterator[None]:
    lock = filelock.FileLock(str(root / f".{unit.entry_name}.lock"), timeout=_LOCK_TIMEOUT_S)
    try:
        lock.acquire()
    except FileNotFoundError:  # the folder was deleted meanwhile
        os.makedirs(root, exist_ok=True)
        lock.acquire()
    except filelock.Timeout as error:
        raise BuildError(
            f"another process has been building {unit.entry_name} for {_LOCK_TIMEOUT_S:.0f} s; if none is "
            f"running, delete {lock.lock_file}"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _make(root: Path, unit: Unit) -> None:
    os.makedirs(root, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{unit.name}-", dir=root))
    try:
        source, artifact = work / unit.source_name, work / unit.artifact_name
        source.write_text(unit.source)
        command = [
            part.replace("{source}", str(source)).replace("{artifact}", str(artifact))
            for part in unit.command
        ]
        text = _run(unit, command, work)
        (work / "log.txt").write_text(text)
        final = root / unit.entry_name
        shown = shlex.join(command).replace(str(work), str(final))
        (work / "command.txt").write_text(shown + "\n")
        (work / "sha256.txt").write_text(hashlib.sha256(artifact.read_bytes()).hexdigest() + "\n")
        if final.exists():  # a damaged entry; whoever has it loaded keeps its pages
            damaged = Path(tempfile.mkdtemp(prefix=".damaged-", dir=root))
            os.replace(final, damaged / "entry")
            shutil.rmtree(damaged, ignore_errors=True)
        os.replace(work, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run(unit: Unit, command: Sequence[str], work: Path) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=work,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    except OSError as error:
        raise BuildError(
            f"{unit.name} was not built: {command[0]} does not start ({error})"
        ) from error
    if done.returncode == 0 and (work / unit.artifact_name).is_file():
        return done.stdout
    kept = work.parent / f"{unit.entry_name}.failed.txt"
    with contextlib.suppress(OSError):
        kept.write_text(f"{shlex.join(command)}\n\n{done.stdout}\n\n{unit.source}")
    lines = done.stdout.strip().splitlines()[-_NUM_LOG_LINES:]
    raise BuildError(
        f"{unit.name} was not built: the compiler ended with {done.returncode}.\n"
        f"command: {shlex.join(command)}\nlog and source: {kept}\n" + "\n".join(lines)
    )
