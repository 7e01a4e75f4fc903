"""Run a library of AOTInductor without its Python side: no zip package, no pickle, no tree specification."""

from __future__ import annotations

from typing import Any

import torch

from moe_compiler.errors import ArtifactError


def open_library(path: str, num_runners: int = 1) -> Any:
    """A runner of a library; `<path without .so>.json` beside it lists the operators that it calls, if any.

    Args:
        path: the library.
        num_runners: calls that may run at the same time.

    Raises:
        ArtifactError: it cannot be loaded.
    """
    binding = getattr(torch._C, "_aoti", None)
    if binding is None or not hasattr(binding, "AOTIModelContainerRunnerCpu"):
        raise ArtifactError(
            f"torch {torch.__version__} was built without AOTInductor's runtime; artifacts need it. Install an "
            "official build of torch."
        )
    try:
        return binding.AOTIModelContainerRunnerCpu(path, num_runners)
    except RuntimeError as error:
        raise ArtifactError(f"{path} cannot be loaded: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
