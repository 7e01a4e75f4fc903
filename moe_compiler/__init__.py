"""moeflex: a `torch.compile` backend for Mixture-of-Experts models.

`torch.compile(model, backend="moeflex")` is all that is needed; nothing has to be imported for it.
From here come, by
attribute and only then imported: `moeflex` (the backend), `analyse`, `last_report` and `reports`; `load` for what
`moeflex compile` made; for a model over several ranks `load_checkpoint`,
`layout`, `switch` and `refit`.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Importing this package must stay cheap: torch imports it to list its backends and to read
# TORCH_LOGS.
_LAZY = {
    "moeflex": "moe_compiler.backend",
    "analyse": "moe_compiler.pipeline",
    "last_report": "moe_compiler.pipeline",
    "reports": "moe_compiler.pipeline",
    "load": "moe_compiler.runtime.artifact_runner",
    "layout": "moe_compiler.layouts",
    "load_checkpoint": "moe_compiler.loading",
    "refit": "moe_compiler.layouts",
    "switch": "moe_compiler.layouts",
    "LoadReport": "moe_compiler.loading",
    "SwitchReport": "moe_compiler.runtime.switch",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
