"""The Hopper target: builds a plan's kernels in the background, loads the op library, registers kernels with it.

```
prepare(program)    # starts the builds; returns at once
wait()              # joins the builds
load_op_library()   # registers moeflex::moe_layer for CUDA tensors
```
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moe_compiler.errors import BuildError, ToolchainError
from moe_compiler.ir import CudaKernel, CudaProgram
from moe_compiler.runtime import cuda_build, toolchain
from moe_compiler.runtime.build import Unit, build

log = logging.getLogger(__name__)

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"

# The oldest torch whose stable ABI the op library may use: 2.11.
_TARGET_VERSION = "0x020b000000000000"
# Calls into torch and the driver: there is nothing to optimise that would pay for the time of -O2.
_FLAGS = ("-O1", "-std=gnu++17", "-fPIC", "-shared", "-fvisibility=hidden")
_SAY_AFTER_S = 1.0


class _LayerSpec(ctypes.Structure):
    """`MoeflexCudaLayerSpec` of templates/cuda/op_table.h."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            "abi", "num_experts", "hidden", "intermediate", "top_k", "gate_layout", "w13_out_in",
            "w2_out_in", "has_b13", "has_b2", "dtype", "out_dtype", "combine_dtype", "index_bytes",
        )
    ]  # fmt: skip


class _Kernel(ctypes.Structure):
    """`MoeflexCudaKernel` of templates/cuda/op_table.h."""

    _fields_ = (
        ("first_tokens", ctypes.c_int32),
        ("last_tokens", ctypes.c_int32),
        ("cooperative", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
        ("slab_rows", ctypes.c_int32),
        ("pair_rows", ctypes.c_int32),
        ("whole_rows", ctypes.c_int32),
        ("down_rows", ctypes.c_int32),
        ("box_k", ctypes.c_int32),
        ("num_row_maps", ctypes.c_int32),
        ("row_map_of", ctypes.c_int32 * 3),
        ("row_map_rows", ctypes.c_int32 * 3),
        ("tile_rows", ctypes.c_int32),
        ("rows_per_tile", ctypes.c_int32),
        ("rows_per_route", ctypes.c_int32),
        ("control", ctypes.c_int32),
        ("control_per_expert", ctypes.c_int32),
        ("control_per_tile", ctypes.c_int32),
        ("routes", ctypes.c_int32),
        ("routes_per_route", ctypes.c_int32),
        ("routes_per_expert", ctypes.c_int32),
        ("routes_per_tile", ctypes.c_int32),
        ("routes_per_row", ctypes.c_int32),
        ("cubin_bytes", ctypes.c_uint64),
        ("cubin", ctypes.c_char_p),
        ("entry", ctypes.c_char_p),
    )


_Job = concurrent.futures.Future[cuda_build.CudaBinary]
_AnyJob = concurrent.futures.Future[Any]


class _State:
    """Builds of this process, and what the op library knows of them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pool: concurrent.futures.ThreadPoolExecutor | None = None
        self.library: concurrent.futures.Future[str] | None = None
        self.kernels: dict[str, _Job] = {}  # by source text
        self.wanted: dict[CudaProgram, None] = {}
        self.registered: set[tuple[object, ...]] = set()
        self.op_library: ctypes.CDLL | None = None


_state = _State()


def _forget_threads_after_fork() -> None:
    """A forked child has no builder threads: finished builds stay, running ones are asked for again."""
    _state.lock = threading.RLock()
    _state.pool = None
    _state.kernels = {source: job for source, job in _state.kernels.items() if job.done()}
    if _state.library is not None and not _state.library.done():
        _state.library = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads_after_fork)


def unavailable() -> str:
    """Why this machine cannot build the Hopper target, or ""."""
    try:
        toolchain.find_compiler()
    except ToolchainError as error:
        return f"the launcher of the sm_90a kernels needs a C++ compiler: {error}"
    if cuda_build.find_nvrtc() is None and cuda_build.find_nvcc() is None:
        return (
            "the sm_90a kernels need NVRTC (it comes with CUDA builds of torch; or pip install "
            "nvidia-cuda-nvrtc) or nvcc on the PATH or under $CUDA_HOME to be built; neither was found"
        )
    return ""


def prepare(program: CudaProgram) -> None:
    """Start to build the kernels of a program; quick when they are built or being built.

    Raises:
        ToolchainError: there is no compiler.
    """
    with _state.lock:
        _state.wanted[program] = None
        _ask_for_library()
        for kernel in program.kernels:
            job = _state.kernels.get(kernel.source)
            if job is None or _failed(job):
                _state.kernels[kernel.source] = _pool().submit(_build_kernel, kernel)


def wait() -> None:
    """Join the builds that were asked for; says on a terminal what takes more than a second.

    Raises:
        BuildError: a build failed. The next `prepare` of the same program tries again.
    """
    with _state.lock:
        jobs: list[_AnyJob] = [] if _state.library is None else [_state.library]
        jobs += [job for program in _state.wanted for job in _jobs_of(program)]
    _join(jobs)
    try:
        for job in jobs:
            job.result()
    finally:
        with _state.lock:
            for program in [p for p in _state.wanted if any(map(_failed, _jobs_of(p)))]:
                del _state.wanted[program]
    if _state.op_library is not None:
        _register()


def _jobs_of(program: CudaProgram) -> list[_Job]:
    return [_state.kernels[k.source] for k in program.kernels if k.source in _state.kernels]


def load_op_library() -> None:
    """Register `moeflex::moe_layer` for CUDA tensors, and every program built so far.

    Raises:
        BuildError: a build failed, or what was built cannot be loaded.
        ToolchainError: there is no compiler.
    """
    with _state.lock:
        _ask_for_library()
    wait()
    with _state.lock:
        if _state.op_library is None:
            assert _state.library is not None
            path = _state.library.result()
            try:
                library = ctypes.CDLL(path)
            except OSError as error:
                raise BuildError(
                    f"{path} was built and cannot be loaded ({error}); delete its folder and try "
                    "again"
                ) from error
            library.moeflex_cuda_register.restype = ctypes.c_int
            _state.op_library = library
    _register()


def _register() -> None:
    with _state.lock:
        assert _state.op_library is not None
        for program in _state.wanted:
            todo = [k for k in program.kernels if _is_new(program, k)]
            if not todo:
                continue
            kernels = (_Kernel * len(todo))(*map(_describe, todo))
            error = _state.op_library.moeflex_cuda_register(
                program.plan_key.encode(),
                ctypes.byref(_LayerSpec(**dict(program.layer))),
                kernels,
                len(todo),
            )
            if error:
                raise BuildError(
                    "the op library refused a layer: it was built by another version of moeflex; "
                    "delete the build cache"
                )
            _state.registered.update(_identity(program, kernel) for kernel in todo)
        _state.wanted.clear()


def _identity(program: CudaProgram, kernel: CudaKernel) -> tuple[object, ...]:
    span = (kernel.first_tokens, kernel.last_tokens)
    return program.plan_key, program.layer, span, kernel.source


def _is_new(program: CudaProgram, kernel: CudaKernel) -> bool:
    job = _state.kernels.get(kernel.source)
    built = job is not None and job.done() and not _failed(job)
    return built and _identity(program, kernel) not in _state.registered


def _describe(kernel: CudaKernel) -> _Kernel:
    binary = _state.kernels[kernel.source].result()
    found = launch_fields(kernel)
    found.shared_bytes = binary.resources.shared_bytes
    found.cubin_bytes, found.cubin = len(binary.cubin), binary.cubin
    found.entry = kernel.entry.encode()
    return found


def launch_fields(kernel: CudaKernel) -> _Kernel:
    """What the launcher must know of a kernel, but for its binary."""
    found = _Kernel(first_tokens=kernel.first_tokens, last_tokens=kernel.last_tokens)
    for name, value in kernel.launch:
        setattr(found, name, (ctypes.c_int32 * 3)(*value) if isinstance(value, tuple) else value)
    return found


def _build_kernel(kernel: CudaKernel) -> cuda_build.CudaBinary:
    return cuda_build.build(kernel.name, kernel.source, entry=kernel.entry)


def _ask_for_library() -> None:
    if _state.library is None or _failed(_state.library):
        unit = library_unit()
        _state.library = _pool().submit(lambda: build(unit).path)


def library_unit() -> Unit:
    """The build of the op library.

    Raises:
        ToolchainError: there is no compiler.
    """
    compiler = toolchain.find_compiler()
    root = Path(torch.__file__).parent
    folder = TEMPLATES / "cuda"
    includes = (f"-I{root / 'include'}", f"-I{folder}", f"-I{TEMPLATES}")
    headers = [TEMPLATES / "stable_tensors.h", *sorted(folder.glob("*.h"))]
    inputs = {path.name: path.read_text() for path in headers}
    return Unit(
        name="cuda-op",
        source=(folder / "op.cpp").read_text(),
        source_name="op.cpp",
        artifact_name="op.so",
        command=(
            *(*compiler.command, *_FLAGS, f"-DTORCH_TARGET_VERSION={_TARGET_VERSION}", *includes),
            *("{source}", f"-L{root / 'lib'}", "-ltorch_cpu", "-ldl", "-o", "{artifact}"),
        ),
        inputs={**inputs, "compiler": compiler.version, "torch": str(torch.__version__)},
    )


def _pool() -> concurrent.futures.ThreadPoolExecutor:
    if _state.pool is None:
        _state.pool = concurrent.futures.ThreadPoolExecutor(
            max_workers=max(2, min(16, os.cpu_count() or 1)), thread_name_prefix="moeflex-cuda"
        )
    return _state.pool


def _failed(job: _AnyJob) -> bool:
    return job.done() and job.exception() is not None


def _join(jobs: Sequence[_AnyJob]) -> None:
    """Wait for the jobs, with a line on a terminal while it takes long."""
    start = time.perf_counter()
    waiting = set(jobs)
    said = False
    while waiting:
        _, waiting = concurrent.futures.wait(waiting, timeout=_SAY_AFTER_S)
        if waiting:
            said = True
            _say(f"building CUDA kernels: {len(jobs) - len(waiting)} of {len(jobs)} done")
    if said:
        _say(f"built {len(jobs)} CUDA kernels in {time.perf_counter() - start:.1f} s", last=True)


def _say(text: str, *, last: bool = False) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"\r\033[Kmoeflex: {text}" + ("\n" if last else ""))
        sys.stderr.flush()
    else:
        log.info("%s", text)
