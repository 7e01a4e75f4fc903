"""The CPU target: builds a plan's kernel in the background, loads the op library, registers kernels with it.

```
prepare(kernel)     # starts a build; returns at once
wait()              # joins the builds
load_op_library()   # registers moeflex::moe_layer for CPU tensors
```
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from moe_compiler import settings
from moe_compiler.errors import BuildError, OptionError, ToolchainError
from moe_compiler.ir import CpuKernel, Isa
from moe_compiler.runtime import toolchain
from moe_compiler.runtime.build import BuildReport, Unit, build

log = logging.getLogger(__name__)

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"

_COMMON_FLAGS = ("-O2", "-std=gnu++17", "-fPIC", "-shared", "-fvisibility=hidden")
_MATH_FLAGS = ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX512_FLAGS = (*_AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_ISA_FLAGS = {
    Isa.SCALAR: (),
    Isa.AVX2: _AVX2_FLAGS,
    Isa.AVX512: _AVX512_FLAGS,
    Isa.AVX512_BF16: (*_AVX512_FLAGS, "-mavx512bf16"),
    Isa.AMX_BF16: (*_AVX512_FLAGS, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}
_AVX2_FEATURES = frozenset({"avx2", "fma", "f16c"})
_AVX512_FEATURES = _AVX2_FEATURES | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_ISA_FEATURES = {
    Isa.SCALAR: frozenset[str](),
    Isa.AVX2: _AVX2_FEATURES,
    Isa.AVX512: _AVX512_FEATURES,
    Isa.AVX512_BF16: _AVX512_FEATURES | {"avx512_bf16"},
    Isa.AMX_BF16: _AVX512_FEATURES | {"avx512_bf16", "amx_tile", "amx_bf16"},
}
# The oldest torch whose stable ABI the op library may use: 2.11.
_TARGET_VERSION = "0x020b000000000000"
_MAX_ROLES = 8


class _LayerSpec(ctypes.Structure):
    """`MoeflexLayerSpec` of templates/cpu/op_table.h."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            "abi", "num_experts", "hidden", "intermediate", "top_k", "gate_layout", "w13_out_in",
            "w2_out_in", "stacked", "has_b13", "has_b2", "x_dtype", "out_dtype", "direct_rows",
            "isa", "num_roles",
        )
    ] + [("role_dtypes", ctypes.c_int32 * _MAX_ROLES)]  # fmt: skip


class _State:
    """Builds of this process: running, finished and waiting for registration, and the loaded libraries."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pool: concurrent.futures.ThreadPoolExecutor | None = None
        self.library: concurrent.futures.Future[BuildReport] | None = None
        self.kernels: dict[Unit, concurrent.futures.Future[BuildReport]] = {}
        self.wanted: dict[tuple[str, _SpecKey], Unit] = {}
        self.reported: set[int] = set()
        self.registered: set[tuple[str, _SpecKey]] = set()
        self.op_library: ctypes.CDLL | None = None
        self.loaded: dict[str, ctypes.CDLL] = {}


_SpecKey = bytes
_state = _State()


def _forget_threads_after_fork() -> None:
    """A forked child has no builder threads: finished builds stay, running ones are asked for again."""
    _state.lock = threading.RLock()
    _state.pool = None
    _state.kernels = {unit: job for unit, job in _state.kernels.items() if job.done()}
    if _state.library is not None and not _state.library.done():
        _state.library = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _forget_threads_after_fork())


def runnable_isas() -> tuple[Isa, ...]:
    """The instruction sets that this CPU runs and its compiler writes, narrow to wide.

    Raises:
        ToolchainError: there is no compiler.
    """
    return tuple(isa for isa in Isa if _runs(isa))


def _runs(isa: Isa) -> bool:
    return toolchain.cpu_features() >= _ISA_FEATURES[isa] and toolchain.accepts(
        toolchain.find_compiler(), _ISA_FLAGS[isa]
    )


def isa() -> str:
    """The instruction set that kernels are built for: `MOEFLEX_CPU_ISA`, or the widest that runs here.

    Raises:
        ToolchainError: there is no compiler.
        OptionError: `MOEFLEX_CPU_ISA` names one that cannot run here.
    """
    wanted = settings.parse(os.environ).cpu_isa
    if wanted == "auto":
        # From the widest on: every question is a process of the compiler.
        return next(isa.value for isa in reversed(Isa) if _runs(isa))
    runnable = runnable_isas()
    if wanted not in [one.value for one in runnable]:
        raise OptionError(
            f"MOEFLEX_CPU_ISA={wanted} cannot run on this CPU with this compiler; it runs "
            f"{', '.join(runnable)}. Unset it, or take one of these."
        )
    return wanted


def features_of(isa: str) -> frozenset[str]:
    """What an instruction set asks of a CPU, as Linux names it."""
    return _ISA_FEATURES[Isa(isa)]


def unavailable() -> str | None:
    """Why this machine cannot build CPU kernels; None when it can."""
    try:
        toolchain.find_compiler()
    except ToolchainError as error:
        return str(error)
    return None


def description() -> str:
    """One line for reports: instruction set, compiler."""
    reason = unavailable()
    if reason is not None:
        return f"cpu: not available ({reason})"
    return f"cpu: {isa()}, {toolchain.find_compiler().version}"


def kernel_template() -> str:
    """The text that a kernel is rendered into."""
    return (TEMPLATES / "cpu" / "kernel.cpp.in").read_text()


def prepare(kernel: CpuKernel) -> None:
    """Start to build a kernel; quick when it is built or being built.

    Raises:
        ToolchainError: there is no compiler.
    """
    unit = _kernel_unit(kernel)
    spec = bytes(_layer_spec(kernel))
    with _state.lock:
        _state.wanted[kernel.plan_key, spec] = unit
        # the kernel prepared last serves
        _state.registered.discard((kernel.plan_key, spec))
        if unit not in _state.kernels or _failed(_state.kernels[unit]):
            _state.kernels[unit] = _submit(unit)
        if _state.library is None or _failed(_state.library):
            _state.library = _submit(_library_unit())


def wait() -> list[BuildReport]:
    """Join all builds; the reports of those that `wait` has not reported yet.

    Raises:
        BuildError: a build failed. The next `prepare` of the same plan tries again.
    """
    with _state.lock:
        jobs = [job for job in (_state.library, *_state.kernels.values()) if job is not None]
    reports = []
    for job in jobs:
        report = job.result()
        if id(job) not in _state.reported:
            _state.reported.add(id(job))
            reports.append(report)
    if _state.op_library is not None:
        _register_kernels()
    return reports


def load_op_library() -> None:
    """Register `moeflex::moe_layer` for CPU tensors, and every kernel built so far. Joins running builds.

    Raises:
        BuildError: a build failed, or what was built cannot be loaded.
        ToolchainError: there is no compiler.
    """
    with _state.lock:
        if _state.library is None or _failed(_state.library):
            _state.library = _submit(_library_unit())
    wait()
    with _state.lock:
        if _state.op_library is None:
            assert _state.library is not None
            _state.op_library = _load_op_library(_state.library.result().path)
    _register_kernels()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuiltKernel:
    """A kernel as the op library registers it.

    Attributes:
        plan_key: the plan that it computes.
        spec: bytes of its `MoeflexLayerSpec`.
        path: its library.
    """

    plan_key: str
    spec: bytes
    path: str


def built(kernel: CpuKernel) -> BuiltKernel:
    """A kernel that was prepared, once it is built.

    Raises:
        BuildError: its build failed.
        KeyError: it was never prepared.
    """
    path = _state.kernels[_kernel_unit(kernel)].result().path
    return BuiltKernel(plan_key=kernel.plan_key, spec=bytes(_layer_spec(kernel)), path=path)


def library_path() -> str:
    """The built op library. A kernel was prepared before.

    Raises:
        BuildError: its build failed.
    """
    assert _state.library is not None
    return _state.library.result().path


def spec_bytes() -> int:
    """Size of a `BuiltKernel.spec`."""
    return ctypes.sizeof(_LayerSpec)


def use_library(path: str) -> None:
    """Register `moeflex::moe_layer` for CPU tensors with an op library that was built elsewhere.

    Raises:
        BuildError: it cannot be loaded.
    """
    with _state.lock:
        if _state.op_library is None:
            _state.op_library = _load_op_library(path)


def register(kernels: Sequence[BuiltKernel]) -> None:
    """Let kernels that were built elsewhere serve their plans. An op library was loaded before.

    Raises:
        BuildError: one cannot be loaded, or the op library that this process has loaded is of another version.
    """
    with _state.lock:
        assert _state.op_library is not None
        for kernel in kernels:
            _register_kernel(kernel)


def _load_op_library(path: str) -> ctypes.CDLL:
    library = _load(path)
    library.moeflex_register.restype = ctypes.c_int
    return library


def _register_kernel(kernel: BuiltKernel) -> None:
    assert _state.op_library is not None
    if len(kernel.spec) != ctypes.sizeof(_LayerSpec):
        raise BuildError(
            f"a layer's table entry has {ctypes.sizeof(_LayerSpec)} bytes; got {len(kernel.spec)}"
        )
    error = _state.op_library.moeflex_register(
        ctypes.c_char_p(kernel.plan_key.encode()),
        ctypes.c_char_p(kernel.spec),
        _load(kernel.path).moeflex_layer,
    )
    if error:
        raise BuildError(
            f"the op library refused the kernel {kernel.path}: it was built by another version of "
            "moeflex; build it again"
        )


def _register_kernels() -> None:
    with _state.lock:
        assert _state.op_library is not None
        for (key, spec), unit in _state.wanted.items():
            job = _state.kernels.get(unit)
            if (key, spec) in _state.registered or job is None or not job.done() or _failed(job):
                continue
            _register_kernel(BuiltKernel(plan_key=key, spec=spec, path=job.result().path))
            _state.registered.add((key, spec))


def _load(path: str) -> ctypes.CDLL:
    if path not in _state.loaded:
        try:
            _state.loaded[path] = ctypes.CDLL(path)
        except OSError as error:
            raise BuildError(
                f"{path} was built and cannot be loaded ({error}); delete its folder and try again"
            ) from error
    return _state.loaded[path]


def _failed(job: concurrent.futures.Future[BuildReport]) -> bool:
    return job.done() and job.exception() is not None


def _submit(unit: Unit) -> concurrent.futures.Future[BuildReport]:
    if _state.pool is None:
        _state.pool = concurrent.futures.ThreadPoolExecutor(
            max_workers=max(2, min(8, os.cpu_count() or 1)), thread_name_prefix="moeflex-build"
        )
    return _state.pool.submit(build, unit)


def _layer_spec(kernel: CpuKernel) -> _LayerSpec:
    return _LayerSpec(
        **dict(kernel.layer), role_dtypes=(ctypes.c_int32 * _MAX_ROLES)(*kernel.role_dtypes)
    )


@functools.cache
def _headers() -> dict[str, str]:
    files = [*sorted(TEMPLATES.glob("*.h")), *sorted((TEMPLATES / "cpu").glob("*.h"))]
    return {str(path.relative_to(TEMPLATES)): path.read_text() for path in files}


def _kernel_unit(kernel: CpuKernel) -> Unit:
    compiler = toolchain.find_compiler()
    level = list(Isa).index(kernel.isa)
    flags = (*_COMMON_FLAGS, *_MATH_FLAGS, *_ISA_FLAGS[kernel.isa], f"-DMOEFLEX_ISA={level}")
    return Unit(
        name=kernel.name,
        source=kernel.source,
        source_name="kernel.cpp",
        artifact_name="kernel.so",
        command=(*compiler.command, *flags, f"-I{TEMPLATES}", "{source}", "-o", "{artifact}"),
        inputs=_Inputs({**_headers(), "compiler": compiler.version}),
    )


def _library_unit() -> Unit:
    compiler = toolchain.find_compiler()
    root = Path(torch.__file__).parent
    includes = (f"-I{root / 'include'}", f"-I{TEMPLATES / 'cpu'}", f"-I{TEMPLATES}")
    link = (f"-L{root / 'lib'}", "-ltorch_cpu")
    define = f"-DTORCH_TARGET_VERSION={_TARGET_VERSION}"
    return Unit(
        name="cpu-op",
        source=(TEMPLATES / "cpu" / "op.cpp").read_text(),
        source_name="op.cpp",
        artifact_name="op.so",
        command=(
            *(*compiler.command, *_COMMON_FLAGS, define, *includes),
            *("{source}", *link, "-o", "{artifact}"),
        ),
        inputs=_Inputs(
            {**_headers(), "compiler": compiler.version, "torch": str(torch.__version__)}
        ),
    )


class _Inputs(dict[str, str]):
    """Inputs of a unit; hashable, since a unit is a key here and its content is in `Unit.key`."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))
