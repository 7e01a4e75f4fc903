"""Progress of a load."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from types import TracebackType

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from moe_compiler.runtime.checkpoint import ParameterSource


class Reading:
    """A progress bar over bytes, on the terminal of the first rank alone; closed by `with`.

    Args:
        sources: what will be read.
        visible: False shows nothing anywhere.
    """

    def __init__(self, sources: Iterable[ParameterSource], visible: bool = True) -> None:
        total = sum(source.num_bytes for source in sources)
        first = not dist.is_initialized() or dist.get_rank() == 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not (visible and first and total and sys.stderr.isatty()),
        )
        self._task = self._progress.add_task("loading", total=total)

    def __enter__(self) -> Reading:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    @contextlib.contextmanager
    def of(self, name: str, num_bytes: int) -> Iterator[None]:
        """What is read in here has this name and size."""
        self._progress.update(self._task, description=name[-40:])
        yield
        self._progress.advance(self._task, num_bytes)
