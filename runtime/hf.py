"""Tracing Hugging Face experts whose own loop does not trace.

With `experts_implementation="eager"` a transformers model loops over the experts that have tokens,
a tensor of data-dependent length, so dynamo cuts every MoE block into fragments. The same class
also runs through the `grouped_mm` function of transformers, which computes the same and traces to
one graph. `install` lets the lookup `ExpertsInterface.get_interface` answer with that function, and
only where the caller's `wanted()` is true: eager calls and traces for other backends get the answer
that transformers gives.

transformers is never imported from here.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

REPLACEMENTS = ("grouped_mm", "batched_mm")

_lock = threading.Lock()


def loaded_interface() -> type | None:
    """The `ExpertsInterface` of transformers, or None where it is not loaded or has none."""
    module = sys.modules.get("transformers.integrations.moe")
    interface = getattr(module, "ExpertsInterface", None)
    return interface if callable(getattr(interface, "get_interface", None)) else None


def install(wanted: Callable[[str], bool]) -> bool:
    """Route the lookup of experts through `wanted`; the second call and all later ones do nothing.

    Args:
        wanted: called with the name of the replacement where the experts' own loop would run. It
            must be marked with `torch.compiler.assume_constant_result` and answer False outside of
            a trace that may be changed.

    Returns:
        Whether the lookup is routed; False where transformers is not loaded (call again later).
    """
    interface: Any = loaded_interface()
    if interface is None:
        return False
    with _lock:
        lookup = interface.get_interface
        if getattr(lookup, "moeflex_original", None) is None:
            mapping = getattr(interface, "_global_mapping", {})
            name = next((name for name in REPLACEMENTS if name in mapping), "")
            if not name:
                return False
            interface.get_interface = _routed(lookup, name, wanted)
    return True


def _routed(lookup: Callable[..., Any], name: str, wanted: Callable[[str], bool]) -> Any:
    @functools.wraps(lookup)
    def get_interface(self: Any, experts_implementation: Any, default: Any) -> Any:
        found = lookup(self, experts_implementation, default)
        if found is default and wanted(name):
            return lookup(self, name, default)
        return found

    get_interface.moeflex_original = lookup  # type: ignore[attr-defined]
    return get_interface


def uninstall() -> None:
    """Give transformers its own lookup back (tests)."""
    interface = loaded_interface()
    with _lock:
        original = getattr(getattr(interface, "get_interface", None), "moeflex_original", None)
        if original is not None:
            interface.get_interface = original  # type: ignore[union-attr]
