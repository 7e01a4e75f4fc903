"""The environment switches, parsed once into a frozen `Settings`.

`SWITCHES` is the one table of their names; the README's table is generated from it. An option given
to `torch.compile` wins over the switch of the same meaning.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping

from moe_compiler.errors import OptionError

CPU_ISAS: tuple[str, ...] = ("auto", "scalar", "avx2", "avx512", "avx512_bf16", "amx_bf16")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One environment variable: its name, the text of its default, and what it does."""

    name: str
    default: str
    effect: str


SWITCHES: tuple[Switch, ...] = (
    Switch(
        name="MOEFLEX_CACHE_DIR",
        default="the user's cache folder",
        effect="Where compiled targets are kept. A relative path is resolved once, at start.",
    ),
    Switch(
        name="MOEFLEX_DUMP_DIR",
        default="unset",
        effect="One folder per compiled graph: before.py, after.py, report.json.",
    ),
    Switch(
        name="MOEFLEX_DISABLE",
        default="unset",
        effect="Comma-separated stages to skip, or `all`: then Inductor compiles everything.",
    ),
    Switch(
        name="MOEFLEX_STRICT",
        default="0",
        effect="1: raise where a block would be left to Inductor, or a build fails.",
    ),
    Switch(
        name="MOEFLEX_CPU_ISA",
        default="auto",
        effect="Instruction set of the CPU target: " + ", ".join(CPU_ISAS) + ".",
    ),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment asks for.

    Attributes:
        cache_dir: absolute path of the build cache, "" for the user's cache folder.
        dump_dir: absolute path of the dump folder, "" for no dumps.
        disable: names of stages that are skipped; `options.resolve` checks them.
        strict: refusals and failed builds raise.
        cpu_isa: one of `CPU_ISAS`.
    """

    cache_dir: str = ""
    dump_dir: str = ""
    disable: tuple[str, ...] = ()
    strict: bool = False
    cpu_isa: str = "auto"


# Relative paths mean the folder in which the process started, whatever os.chdir did since.
_START_DIR = os.path.abspath(os.curdir)


def parse(environ: Mapping[str, str]) -> Settings:
    """Read the switches from `environ`.

    Raises:
        OptionError: a value cannot be used; the message names the choices.
    """
    return Settings(
        cache_dir=_path(environ, "MOEFLEX_CACHE_DIR"),
        dump_dir=_path(environ, "MOEFLEX_DUMP_DIR"),
        disable=parse_names(environ.get("MOEFLEX_DISABLE", "")),
        strict=_flag(environ, "MOEFLEX_STRICT"),
        cpu_isa=_choice(environ, "MOEFLEX_CPU_ISA", CPU_ISAS),
    )


@functools.cache
def get() -> Settings:
    """The settings of this process, read at the first call.

    Raises:
        OptionError: a switch has a value that cannot be used.
    """
    return parse(os.environ)


def _path(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "").strip()
    return os.path.normpath(os.path.join(_START_DIR, os.path.expanduser(value))) if value else ""


def parse_names(text: str) -> tuple[str, ...]:
    """`single, ep` to names."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _flag(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "").strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise OptionError(f"{name} takes 0 or 1; got {environ[name]!r}")


def _choice(environ: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = environ.get(name, "").strip().lower() or choices[0]
    if value not in choices:
        raise OptionError(f"{name} takes one of {', '.join(choices)}; got {environ[name]!r}")
    return value
