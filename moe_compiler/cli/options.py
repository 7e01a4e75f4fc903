"""What commands share: the spelling of common options, and how values are read from text."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer

from moe_compiler.errors import OptionError


class Dtype(str, enum.Enum):
    """The dtype of a model."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"
    fp64 = "fp64"


MODEL_HELP = (
    "MODULE:FACTORY or FILE.py:FACTORY (gives a module, or a pair (module, example_inputs)), or a Hugging Face "
    "config.json or its folder"
)

Json = Annotated[
    str,
    typer.Option("--json", metavar="FILE", help="Write the report as JSON; - for standard output."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No table and no progress.")]
Experts = Annotated[
    str, typer.Option(metavar="NAME", help="Of transformers: grouped_mm, batched_mm, eager.")
]
Axis = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Axis of the first input that is the token count, where the factory gives the inputs.",
    ),
]


def parse_tokens(text: str) -> tuple[int, ...]:
    """`1,16,64` to numbers.

    Raises:
        OptionError: one is not a positive integer.
    """
    try:
        counts = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise OptionError(f"--tokens takes positive counts such as 1,64,2048; got {text!r}")
    return tuple(dict.fromkeys(counts))


def parse_range(text: str) -> tuple[int, int]:
    """`1:8192`, or `64` for one count, to the smallest and the largest.

    Raises:
        OptionError: it is neither.
    """
    first, _, last = text.partition(":")
    try:
        found = int(first), int(last or first)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise OptionError(f"--tokens takes one count or a range such as 1:8192; got {text!r}")
    return found


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """`E,K,H,I` to numbers.

    Raises:
        OptionError: it is not four positive integers, or K is more than E.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 4 or min(numbers) < 1 or max(numbers) > 1 << 20 or numbers[1] > numbers[0]:
        raise OptionError(
            "--shape takes E,K,H,I: four positive integers with K <= E, such as 128,8,2048,768; "
            f"got {text!r}"
        )
    experts, top_k, hidden, intermediate = numbers
    return experts, top_k, hidden, intermediate


def write_text(option: str, file: str, text: str) -> None:
    """Write what an option asks for to a file, or to standard output for "-".

    Raises:
        OptionError: the file cannot be written.
    """
    if file == "-":
        sys.stdout.write(text)
        return
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{option}: {file} cannot be written: {error.strerror}") from error
