"""How the kernels of Triton are launched, so that Inductor sees them."""

from __future__ import annotations

from typing import Any


def launchable(kernel: Any) -> Any:
    """A kernel to be launched as `launchable(kernel)[grid](...)`: `torch.library.wrap_triton` of it.

    A kernel that Triton interprets (TRITON_INTERPRET=1) stays as it is: torch 2.11 refuses to wrap it,
    and later ones do not.
    """
    from torch.library import wrap_triton
    from triton.runtime.interpreter import InterpretedFunction

    return kernel if isinstance(kernel, InterpretedFunction) else wrap_triton(kernel)
