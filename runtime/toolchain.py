"""The C++ compiler of this machine, and which instruction sets it and the CPU can serve."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping

from moe_compiler.errors import ToolchainError

CANDIDATES = ("g++", "clang++", "c++")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: how to call it, e.g. `("ccache", "g++")`.
        version: first line of what `--version` prints.
    """

    command: tuple[str, ...]
    version: str

    @property
    def is_clang(self) -> bool:
        """Whether it takes clang's options where they differ from GCC's."""
        return "clang" in self.version.lower()


def find_compiler(environ: Mapping[str, str] | None = None) -> Compiler:
    """The compiler that `CXX` names, else the first of g++, clang++ and c++ that runs.

    Raises:
        ToolchainError: there is none; the message says what to install.
    """
    environ = os.environ if environ is None else environ
    return _find(environ.get("CXX", "").strip(), environ.get("PATH", os.defpath))


@functools.lru_cache(maxsize=64)
def _find(wanted: str, path: str) -> Compiler:
    tried = []
    for candidate in (wanted,) if wanted else CANDIDATES:
        command = shlex.split(candidate)
        program = shutil.which(command[0], path=path) if command else None
        if program is None:
            tried.append(f"{candidate}: not on PATH")
            continue
        compiler, problem = _ask_version((program, *command[1:]))
        if compiler is not None:
            return compiler
        tried.append(f"{candidate}: {problem}")
    raise ToolchainError(
        "moeflex needs a C++17 compiler to build its CPU kernels and found none "
        f"({'; '.join(tried)}). Install one (Debian/Ubuntu: apt-get install g++; Fedora: dnf install "
        "gcc-c++; conda: conda install gxx), or set CXX to one."
    )


def _ask_version(command: tuple[str, ...]) -> tuple[Compiler | None, str]:
    try:
        answer = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    lines = answer.stdout.strip().splitlines()
    if answer.returncode != 0 or not lines:
        return None, f"`--version` ended with {answer.returncode}"
    return Compiler(command=command, version=lines[0]), ""


@functools.lru_cache(maxsize=64)
def accepts(compiler: Compiler, flags: tuple[str, ...]) -> bool:
    """Whether the compiler knows these options."""
    answer = subprocess.run(
        [*compiler.command, *flags, "-Werror", "-x", "c++", "-E", os.devnull, "-o", os.devnull],
        capture_output=True,
        check=False,
    )
    return answer.returncode == 0


@functools.cache
def tiles_permitted() -> bool:
    """Whether Linux hands the AMX tile registers to this process; asks for them.

    Source: Linux, Documentation/arch/x86/xstate.rst (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
    """
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    try:
        return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)
    except (OSError, AttributeError):
        return False


@functools.cache
def cpu_features() -> frozenset[str]:
    """The CPU's feature names as Linux spells them; empty where they cannot be read.

    The AMX names are left out where the system does not permit their registers.
    """
    found = _listed_features()
    if "amx_tile" in found and not tiles_permitted():
        return frozenset(name for name in found if not name.startswith("amx"))
    return found


def _listed_features() -> frozenset[str]:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return frozenset()
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith("flags"):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


# Features that a compiler may use by itself under -march=native, as Linux names them.
_CODE_FEATURES = re.compile(
    r"(sse|ssse|avx|amx_|fma|bmi|f16c|movbe|abm|adx|aes|vaes|pclmul|vpclmul|gfni|sha|popcnt|xsave|"
    r"lzcnt|tbm|xop|rdrnd|rdseed|fsgsbase|movdir|serialize|cldemote|clwb|clflushopt|pku|cx16|lahf)"
)


@functools.cache
def code_features() -> frozenset[str]:
    """The features of this CPU that code built for it may use."""
    return frozenset(name for name in cpu_features() if _CODE_FEATURES.match(name))
