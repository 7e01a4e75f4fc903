"""Measure the two speeds of this CPU that bound an MoE layer, once, and remember them.

The read speed is that of summing a buffer much larger than the caches; the matrix rate is that of a square
`torch.mm`. A narrow dtype is credited with the fp32 rate where its own is lower, since a kernel may widen on load.
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

from moe_compiler.errors import OptionError
from moe_compiler.model_report import Machine, decode, encode

_log = logging.getLogger(__name__)

PROBE_VERSION = 1
READ_BUFFER_BYTES = 256 << 20
GEMM_SIZE = 1024
NUM_REPEATS = 5
_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def probe_cpu(cache_dir: Path | None) -> Machine:
    """The speeds of this CPU with the current number of torch threads.

    Args:
        cache_dir: where the result is kept; None measures every time. A folder that cannot be written costs a
            measurement (about two seconds) per call and nothing else.
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
    facts = [PROBE_VERSION, _cpu_title(), torch.get_num_threads(), torch.__version__, platform.machine()]
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
    title = f"{_cpu_title()}, {threads} thread{'s' if threads != 1 else ''}"
    own = {name: _gemm_rate(dtype) for name, dtype in _TORCH_DTYPES.items()}
    rates = []
    for name, rate in own.items():
        widened = name in ("bf16", "fp16") and rate < own["fp32"]
        source = "fp32 rate of this machine, weights widened on load" if widened else "measured here: torch.mm"
        rates.append(
            {"dtype": name, "flop_per_s": own["fp32"] if widened else rate, "source": source}
        )
    return decode(
        Machine,
        {
            "name": "cpu",
            "title": title,
            "weight_bytes_per_s": _read_rate(),
            "weight_source": "measured here: sum of a buffer larger than the caches",
            "rates": rates,
        },
    )


def _read_rate() -> float:
    buffer = torch.ones(READ_BUFFER_BYTES // 4)
    return READ_BUFFER_BYTES / _fastest_seconds(buffer.sum)


def _gemm_rate(dtype: torch.dtype) -> float:
    # A dtype without a fast kernel may be a hundred times slower: a small product is enough to see that.
    small = torch.ones(GEMM_SIZE // 4, GEMM_SIZE // 4, dtype=dtype)
    small_seconds = _fastest_seconds(lambda: small @ small)
    small_rate = 2 * (GEMM_SIZE // 4) ** 3 / small_seconds
    if small_seconds * 64 > 0.2:
        return small_rate
    large = torch.ones(GEMM_SIZE, GEMM_SIZE, dtype=dtype)
    return max(small_rate, 2 * GEMM_SIZE**3 / _fastest_seconds(lambda: large @ large))


def _fastest_seconds(call: Callable[[], object]) -> float:
    call()
    best = float("inf")
    for _ in range(NUM_REPEATS):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
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
