"""Consoles: colours and boxes on a terminal, plain lines everywhere else."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator

from rich.console import Console

from moe_compiler.cli.options import write_text

PLAIN_WIDTH = 4000
"""Columns where nobody looks at a screen: one row stays one line, for grep and awk."""


def output_console() -> Console:
    """The console of standard output."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, no_color=True, width=PLAIN_WIDTH)
    return console


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """End quietly when the reader of standard output has seen enough (`| head`)."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # what is still buffered would raise once more when the process ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def working(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """`progress_line` around work on a model: what torch and transformers say about their own future is left out."""
    with progress_line(quiet=quiet) as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield progress


def give(
    table: Callable[[Console], None], text: Callable[[], str], *, json_file: str, quiet: bool
) -> None:
    """The result of a command: a table on standard output, and JSON where --json asks for it.

    Args:
        table: prints it; not called with --quiet, or where standard output takes the JSON.
        text: the report as JSON.
        json_file: where to; "" for nowhere, "-" for standard output.
        quiet: no table.

    Raises:
        OptionError: the file cannot be written.
    """
    with reader_may_leave():
        if not quiet and json_file != "-":
            table(output_console())
        if json_file:
            write_text("--json", json_file, text())


@contextlib.contextmanager
def progress_line(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is being done and for how long, where standard error is a terminal."""
    console = Console(stderr=True, highlight=False)
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda sentence: bar.update(task, description=sentence)
