"""The call into Inductor: its configuration, its cache key, and a missing C++ compiler."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from moe_compiler.errors import ToolchainError
from moe_compiler.options import Options, inductor_patches

log = logging.getLogger(__name__)


def start_probe(options: Options) -> None:
    """Let Inductor find out in the background what C++ this CPU runs, once a process.

    Inductor asks the compiler and a process of its own for each instruction set when it needs the
    first answer: 1.3 s of waiting, cold or warm. It remembers every answer; where it asks before
    one is there, both ask, behind the lock of Inductor's cache.
    """
    # The answers depend on these settings, and Inductor remembers them without the settings.
    if not any(name.startswith("cpp.") for name in inductor_patches(options)):
        _probe()


@functools.cache
def _probe() -> threading.Thread | None:
    # What the thread uses is imported here: two threads that import the same modules may meet
    # half-made ones.
    from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401

    ask = getattr(cpu_vec_isa, "valid_vec_isa_list", None)
    if ask is None:
        return None

    def run() -> None:
        try:
            ask()
        except Exception:
            log.debug("the probe of the CPU failed; Inductor will ask again", exc_info=True)

    thread = threading.Thread(target=run, name="moeflex-probe", daemon=True)
    thread.start()
    return thread


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_probe.cache_clear)


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, holds_op: bool
) -> Callable[..., Any]:
    """Compile a graph with Inductor, forward and backward.

    Args:
        gm: the graph; edited by Inductor.
        example_inputs: its inputs.
        options: mode and configuration for Inductor; what of ours a cached graph depends on.
        holds_op: whether our op is in the graph. Without it, the graph shares Inductor's cache
            entries.

    Raises:
        ToolchainError: Inductor found no C++ compiler. `gm` still computes the same.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    inner: Callable[..., Any] = compile_fx_inner
    with contextlib.ExitStack() as stack:
        tag = cache_tag(options) if holds_op else None
        if tag is not None:
            stack.enter_context(tag())
            # The backward graph may be compiled later, when this frame is gone.
            inner = _under(tag, inner)
        try:
            # A BaseException that asks dynamo to restart its analysis passes through here.
            compiled: Callable[..., Any] = compile_fx(  # type: ignore[assignment]
                gm,
                list(example_inputs),
                inner_compile=inner,
                config_patches=inductor_patches(options) or None,
            )
        except Exception as error:
            if is_missing_compiler(error):
                raise ToolchainError(
                    f"Inductor needs a C++ compiler and found none ({error}). Install one "
                    "(Debian/Ubuntu: apt-get install g++), or set CXX to one."
                ) from error
            raise
    return compiled


def cache_tag(options: Options) -> Callable[[], contextlib.AbstractContextManager[Any]] | None:
    """What puts our sources and options into the keys of torch's compile caches, inside of a block.

    The plan of every op is in the graph, and the op is called by name; the tag covers what a plan
    cannot say: a change of how passes edit a graph, and of the op's schema. None on a torch without
    that setting.
    """
    import torch.compiler

    config: Any = getattr(torch.compiler, "config", None)
    if not hasattr(config, "cache_key_tag"):
        return None
    tag = f"{config.cache_key_tag}moeflex:{source_digest()}:{options.cache_tag}"
    # A patch of its own for every block: torch 2.11 cannot enter one a second time inside itself.
    return lambda: config.patch(cache_key_tag=tag)


def _under(
    context: Callable[[], contextlib.AbstractContextManager[Any]], function: Callable[..., Any]
) -> Callable[..., Any]:
    """`function`, called inside of a new context each time."""

    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return inside


@functools.cache
def source_digest() -> str:
    """SHA-256 of every source file of the package, as 16 hex digits."""
    digest = hashlib.sha256()
    base = os.path.dirname(os.path.abspath(__file__))
    for folder, subfolders, files in os.walk(base, followlinks=True):
        subfolders[:] = sorted(name for name in subfolders if name != "__pycache__")
        for name in sorted(files):
            path = os.path.join(folder, name)
            digest.update(os.path.relpath(path, base).encode())
            with open(path, "rb") as file:
                digest.update(file.read())
    return digest.hexdigest()[:16]


def is_missing_compiler(error: BaseException | None) -> bool:
    """Whether an error of Inductor says that there is no C++ compiler."""
    from torch._inductor import exc

    kind = getattr(exc, "InvalidCxxCompiler", None)
    while kind is not None and error is not None:
        if isinstance(error, kind) or isinstance(getattr(error, "inner_exception", None), kind):
            return True
        error = error.__cause__ or error.__context__
    return False
