"""Measure the two speeds of this CPU that bound an MoE layer, once, and remember them.

The read speed is that of summing a buffer much larger than the caches. The matrix rate is that of a
square `torch.mm` on one thread, times the number of threads: cores do not share their multipliers,
and one thread is measured well even on a machine that has other work. A narrow dtype is credited
with the fp32 rate where its own is lower, since a kernel may widen on load.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from moe_compiler.codec import decode, encode
from moe_compiler.errors import OptionError
from moe_compiler.model_report import Machine, Rate

_log = logging.getLogger(__name__)

PROBE_VERSION = 1
READ_BUFFER_BYTES = 256 << 20
GEMM_SIZE = 1024
PROBE_SECONDS = 0.25
_TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def probe_cpu(cache_dir: Path | None) -> Machine:
    """The speeds of this CPU with the current number of torch threads.

    Args:
        cache_dir: where the result is kept; None measures every time. A folder that cannot be written costs a
            measurement (about three seconds) per call and nothing else.
    """
    key = _key()
    path = None if cache_dir is None else cache_dir / f"machine-{key}.json"
    if path is not None:
        machine = _read(path)
        if machine is not None:
            return machine
    machine = _measure()
    if path is not None:
        _write(path, machine)
    return machine


def _key() -> str:
    facts = [
        PROBE_VERSION,
        _cpu_title(),
        torch.get_num_threads(),
        torch.__version__,
        platform.machine(),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _cpu_title() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


def _measure() -> Machine:
    threads = torch.get_num_threads()
    plural = "s" if threads != 1 else ""
    read_rate = _read_rate()
    torch.set_num_threads(1)
    try:
        read_rate = max(read_rate, _read_rate())
        measured = {name: _gemm_rate(dtype) * threads for name, dtype in _TORCH_DTYPES.items()}
    finally:
        torch.set_num_threads(threads)
    return Machine(
        name="cpu",
        title=f"{_cpu_title()}, {threads} thread{plural}",
        weight_bytes_per_s=read_rate,
        weight_source="measured here: sum of a buffer larger than the caches",
        rates=tuple(_credit(name, measured) for name in measured),
    )


def _credit(dtype: str, measured: dict[str, float]) -> Rate:
    if dtype in ("bf16", "fp16") and measured[dtype] < measured["fp32"]:
        source = "the fp32 rate of this machine: weights are widened on load"
        return Rate(dtype=dtype, flop_per_s=measured["fp32"], source=source)
    source = "measured here: torch.mm on one thread, times the number of threads"
    return Rate(dtype=dtype, flop_per_s=measured[dtype], source=source)


def _read_rate() -> float:
    buffer = torch.ones(READ_BUFFER_BYTES // 4)
    return READ_BUFFER_BYTES / _fastest_seconds(buffer.sum)


def _gemm_rate(dtype: torch.dtype) -> float:
    small, large = (torch.ones(size, size, dtype=dtype) for size in (GEMM_SIZE // 4, GEMM_SIZE))
    small_seconds = _fastest_seconds(lambda: small @ small)
    small_rate = 2 * (GEMM_SIZE // 4) ** 3 / small_seconds
    # A dtype without a fast kernel is a hundred times slower: the small product is enough to see that.
    if small_seconds * 64 > 2 * PROBE_SECONDS:
        return small_rate
    return max(small_rate, 2 * GEMM_SIZE**3 / _fastest_seconds(lambda: large @ large))


def _fastest_seconds(call: Callable[[], object]) -> float:
    """The fastest of the runs that fit into `PROBE_SECONDS` (at least three): other work only ever slows one down."""
    call()
    best, num_runs = float("inf"), 0
    end = time.perf_counter() + PROBE_SECONDS
    while num_runs < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        num_runs += 1
    return best


def _read(path: Path) -> Machine | None:
    try:
        return decode(Machine, json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OptionError):
        return None


def _write(path: Path, machine: Machine) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".machine-")
        with os.fdopen(handle, "w") as file:
            json.dump(encode(machine), file)
        os.replace(temporary, path)
    except OSError as error:
        _log.info("the measured speeds of this CPU are not kept: %s", error)
