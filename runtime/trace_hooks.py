"""What dynamo is asked and told about the trace in progress; all of it is private to torch.

Each function looks for what it needs and does nothing where this torch lacks it; then a static loop
over all experts is captured only with `fullgraph=True`.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo

FLAG = "capture_dynamic_output_shape_ops"

_MARK = "_moeflex_captures_blocks"
_MAX_WRAPPERS = 8


class _Thread(threading.local):
    flag_patch: Any = None  # the config patch of the compilation in progress on this thread


_thread = _Thread()
_lock = threading.Lock()
_before_compile: list[Callable[[], Any]] = []


def mark(backend: Callable[..., Any]) -> None:
    """Note that traces for `backend` may be changed."""
    setattr(backend, _MARK, True)


def is_marked(compiler: Any) -> bool:
    """Whether `compiler`, or what it wraps, was given to `mark`."""
    for _ in range(_MAX_WRAPPERS):
        if compiler is None:
            return False
        if getattr(compiler, _MARK, False):
            return True
        wrapped = getattr(compiler, "_torchdynamo_orig_backend", None)
        wrapped = wrapped or getattr(compiler, "compiler_fn", None)
        compiler = wrapped or getattr(compiler, "__wrapped__", None)
    return False


def tracing_for_marked() -> bool:
    """Whether dynamo is tracing on this thread for a marked backend."""
    module = sys.modules.get("torch._dynamo.symbolic_convert")
    translator = getattr(getattr(module, "tls", None), "current_tx", None)
    return is_marked(getattr(getattr(translator, "output", None), "compiler_fn", None))


def current_trace() -> Any:
    """An object that lives as long as the trace in progress on this thread, or None."""
    return torch._guards.TracingContext.try_get()


def flag_is_ours() -> bool:
    """Whether dynamic output shapes are captured in the compilation in progress because of us."""
    return _thread.flag_patch is not None


def break_inside(gm: Any) -> Any:
    """The graph break that cuts the function in which `gm` was traced, or None.

    Either `gm` itself ended in it, or a function that is now calling did: dynamo runs such a
    function eagerly and compiles what it calls. An object with `reason` (text) and `user_stack`
    (innermost frame last).
    """
    ended = getattr(gm, "compile_subgraph_reason", None)
    if getattr(ended, "graph_break", False):
        inside = {_place(ended)}
    else:
        ended, inside, frame = None, set(), sys._getframe(1)
        while frame is not None:
            inside.add((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back  # type: ignore[assignment]
    known = getattr(sys.modules.get("torch._dynamo.output_graph"), "graph_break_reasons", ())
    # dynamo notes the cause first and "step_unsupported" when it gives the frame up
    same = [note for note in known if _place(note) in inside and note.reason != "step_unsupported"]
    return same[0] if same else ended


def _place(note: Any) -> tuple[str, str]:
    stack = list(getattr(note, "user_stack", ()))
    return (stack[-1].filename, stack[-1].name) if stack else ("", "")


def watch_compilations(before: Callable[[], Any]) -> None:
    """Call `before` when dynamo starts to compile a frame; switch `FLAG` on for marked backends.

    Idempotent, thread-safe.
    """
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    with _lock:
        if before not in _before_compile:
            _before_compile.append(before)
        for name, callback in (("start_callbacks", _on_start), ("end_callbacks", _on_end)):
            callbacks = getattr(handler, name, None)
            if isinstance(callbacks, list) and callback not in callbacks:
                setattr(handler, name, _KeptOnClear(callbacks, callback))
        _guard_tolist()


class _KeptOnClear(list):  # type: ignore[type-arg]
    """Callbacks that survive `torch._dynamo.reset()`, which clears after it reset the backends."""

    def __init__(self, items: list[Any], kept: Callable[..., None]) -> None:
        super().__init__(items)
        self._kept = kept
        self.append(kept)

    def clear(self) -> None:
        super().clear()
        self.append(self._kept)


# A callback may run while dynamo looks at every frame (a backward pass inside of a compiled function):
# dynamo must not start to compile it, because it holds the lock of its callbacks.
@torch._dynamo.disable
def _on_start(_args: Any) -> None:
    for before in _before_compile:
        before()
    compiling = _starting_compilation()
    if _thread.flag_patch is not None or not is_marked(compiling.get("compiler_fn")):
        return
    if _resumes_with_counts(compiling):
        return
    # Without the guard on tolist() the flag would turn a graph break into an error.
    if _tolist_is_guarded() and not getattr(torch._dynamo.config, FLAG, True):
        _thread.flag_patch = torch._dynamo.config.patch({FLAG: True})
        _thread.flag_patch.__enter__()


@torch._dynamo.disable
def _on_end(_args: Any) -> None:
    patch, _thread.flag_patch = _thread.flag_patch, None
    if patch is not None:
        patch.__exit__(None, None, None)


def _starting_compilation() -> dict[str, Any]:
    """What dynamo knows of the compilation that is about to start; its callbacks get only an id."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_compile" and "compiler_fn" in frame.f_locals:
            found: dict[str, Any] = frame.f_locals
            return found
        frame = frame.f_back
    return {}


def _resumes_with_counts(compiling: dict[str, Any]) -> bool:
    """Whether this is the rest of a frame that broke at `tolist()`.

    Its list holds the counts of one routing. A loop captured whole would be specialised to them and
    compiled again for the next routing; in fragments it is not.
    """
    name = getattr(compiling.get("code"), "co_name", "")
    values = compiling.get("locals")
    if not name.startswith("torch_dynamo_resume_in") or not isinstance(values, dict):
        return False
    return any(
        isinstance(value, list) and len(value) > 1 and all(type(entry) is int for entry in value)
        for value in values.values()
    )


def _tensor_variable() -> Any:
    module = sys.modules.get("torch._dynamo.variables.tensor")
    return getattr(module, "TensorVariable", None)


def _tolist_is_guarded() -> bool:
    return hasattr(getattr(_tensor_variable(), "method_tolist", None), "moeflex_original")


def _guard_tolist() -> None:
    """Make `tolist()` on a tensor of data-dependent length a graph break while the flag is ours.

    Dynamo lets a GuardOnDataDependentSymNode out of `TensorVariable.method_tolist`, an error
    instead of a break.
    """
    variable = _tensor_variable()
    tolist = getattr(variable, "method_tolist", None)
    unimplemented = getattr(torch._dynamo.exc, "unimplemented_v2", None)
    unimplemented = unimplemented or getattr(torch._dynamo.exc, "unimplemented", None)
    if tolist is None or unimplemented is None or _tolist_is_guarded():
        return

    @functools.wraps(tolist)
    def method_tolist(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        try:
            return tolist(self, tx, *args, **kwargs)
        except GuardOnDataDependentSymNode as error:
            if not flag_is_ours():
                raise
            reason = str(error).splitlines()[0]
        return unimplemented(
            gb_type="Tensor.tolist() with data-dependent length",
            context=f"call_method {self} tolist",
            explanation=f"The length of this list depends on the data: {reason}",
            hints=["Use a tensor whose length is known, such as the counts of all experts."],
        )

    method_tolist.moeflex_original = tolist  # type: ignore[attr-defined]
    variable.method_tolist = method_tolist
