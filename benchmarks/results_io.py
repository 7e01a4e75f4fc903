"""Writes `benchmarks/results/<benchmark>.<device>.json`: where it ran, with what, and flat rows."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"


def commit() -> str:
    """The commit that runs, with `+` when tracked files differ from it; "" outside a checkout."""
    root = Path(__file__).resolve().parents[1]

    def git(*words: str) -> str:
        try:
            done = subprocess.run(
                ["git", *words], cwd=root, capture_output=True, text=True, check=False
            )
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    name = git("rev-parse", "--short=12", "HEAD")
    own = ("moe_compiler", "passes", "codegen", "runtime", "templates")
    return name + ("+" if name and git("status", "--porcelain", "-uno", "--", *own) else "")


def command() -> str:
    """The command line, paths relative to the repository."""
    script = os.path.relpath(sys.argv[0], RESULTS.parents[1])
    return shlex.join(["python", script, *sys.argv[1:]])


def versions(**more: str) -> dict[str, str]:
    """Versions of what a measurement depends on."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    try:
        import transformers
    except ImportError:
        pass
    else:
        found["transformers"] = transformers.__version__
    return {**found, **more}


def cpu_name() -> str:
    """The CPU as it calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def write(
    benchmark: str,
    device: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    num_devices: int = 1,
    device_name: str = "",
    **extra: Any,
) -> Path:
    """Write the newest run of a benchmark; history is in git.

    Args:
        benchmark: fixed name, e.g. "cpu_layer".
        device: short name, e.g. "cpu", "h200".
        rows: flat rows; units are in the field names.
        num_devices: how many devices took part.
        device_name: the device as it calls itself; the CPU's name when empty and `device` is "cpu".
        extra: further fields of the file; `versions` entries are merged with the common ones.
    """
    path = RESULTS / f"{benchmark}.{device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = versions(**extra.pop("versions", {}))
    content = {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": device_name or (cpu_name() if device == "cpu" else device),
        "num_devices": num_devices,
        "command": command(),
        "versions": merged,
        **extra,
        "rows": [dict(row) for row in rows],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
