"""What this machine has for moeflex, what will work on it, and what to do about the rest."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from moe_compiler.errors import MoeflexError
from moe_compiler.ir import Name
from moe_compiler.runtime import build, cpu_target, cuda_build, peers, toolchain, triton_router

MIN_TORCH, TORCH_LIMIT = (2, 11), (2, 14)
_FEW_SHARED_BYTES = 1 << 30


class Verdict(Name):
    """What a finding means."""

    OK = "ok"
    ABSENT = "absent"  # not here; what it would add is said
    BROKEN = "broken"  # here, or needed, and it does not work


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        area: "python" | "cpu" | "gpu" | "ranks" | "cache".
        what: the thing.
        verdict: what it means.
        found: what is there, in words.
        effect: what works, or does not work, because of it.
        advice: what to do; "" when there is nothing to do.
    """

    area: str
    what: str
    verdict: Verdict
    found: str
    effect: str = ""
    advice: str = ""


def examine(progress: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """Look at everything; at most a few seconds. Nothing is compiled but one empty file, nothing is left behind.

    Args:
        progress: is told what is looked at.
    """
    found: list[Finding] = []
    for area, look in (
        ("Python packages", _packages),
        ("the CPU and its compiler", _cpu),
        ("the GPUs", _gpus),
        ("what ranks need", _ranks),
        ("the cache folder", _cache),
    ):
        progress(f"looking at {area}")
        found += look()
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _packages() -> Iterator[Finding]:
    version = str(torch.__version__)
    fits = MIN_TORCH <= tuple(int(part) for part in version.split(".")[:2]) < TORCH_LIMIT
    yield Finding(
        area="python",
        what="torch",
        verdict=Verdict.OK if fits else Verdict.BROKEN,
        found=f"{version}, Python {platform.python_version()}",
        effect="" if fits else "moeflex is tested with torch 2.11 to 2.13",
        advice="" if fits else 'pip install "torch>=2.11,<2.14"',
    )
    for package, effect in (
        ("transformers", "Hugging Face models and config.json files"),
        ("safetensors", "checkpoints of Hugging Face"),
    ):
        version = _version(package)
        yield Finding(
            area="python",
            what=package,
            verdict=Verdict.OK if version else Verdict.ABSENT,
            found=version or "not installed",
            effect=("" if version else "without it: no ") + effect,
            advice="" if version else 'pip install "moeflex[hf]"',
        )
    missing = triton_router.missing()
    yield Finding(
        area="python",
        what="triton",
        verdict=Verdict.ABSENT if missing else Verdict.OK,
        found="not installed" if missing else _version("triton"),
        effect="router and layer kernels on GPUs; Inductor's own GPU kernels",
        advice=missing and "it comes with the CUDA builds of torch; pip install triton adds it",
    )


def _cpu() -> Iterator[Finding]:
    reason = cpu_target.unavailable()
    threads = torch.get_num_threads()
    if reason is not None:
        yield Finding(
            area="cpu",
            what="C++ compiler",
            verdict=Verdict.BROKEN,
            found="none",
            effect="MoE blocks run in plain PyTorch, and Inductor cannot compile for the CPU",
            advice=reason,
        )
        return
    compiler = toolchain.find_compiler()
    yield Finding(area="cpu", what="C++ compiler", verdict=Verdict.OK, found=compiler.version)
    try:
        isa = cpu_target.isa()
    except MoeflexError as error:
        yield Finding(
            area="cpu",
            what="instruction set",
            verdict=Verdict.BROKEN,
            found=str(error),
            effect="no CPU kernel can be built",
            advice="unset MOEFLEX_CPU_ISA",
        )
        return
    widest = {"amx_bf16": "bf16 in AMX tiles", "avx512_bf16": "bf16 products in AVX-512"}
    yield Finding(
        area="cpu",
        what="instruction set",
        verdict=Verdict.OK,
        found=f"{isa}, {threads} threads",
        effect=widest.get(isa, "bf16 and fp16 are widened to fp32 in registers"),
    )
    yield _headers()


def _headers() -> Finding:
    """Inductor's C++ wrapper includes Python.h."""
    import sysconfig

    folder = sysconfig.get_paths()["include"]
    there = os.path.exists(os.path.join(folder, "Python.h"))
    return Finding(
        area="cpu",
        what="Python headers",
        verdict=Verdict.OK if there else Verdict.BROKEN,
        found=folder if there else f"{folder} has no Python.h",
        effect="" if there else "Inductor cannot compile for the CPU",
        advice="" if there else "Debian/Ubuntu: apt-get install python3-dev",
    )


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        yield Finding(
            area="gpu",
            what="CUDA device",
            verdict=Verdict.ABSENT,
            found=f"none that this torch can use (built for {'CUDA ' + built if built else 'CPUs only'})",
            effect="models run on the CPU; `inspect --device h200` still predicts",
        )
    else:
        for index in range(torch.cuda.device_count()):
            yield _gpu(index)
    nvrtc, nvcc = cuda_build.find_nvrtc(), cuda_build.find_nvcc()
    needed = torch.cuda.is_available() and any(
        torch.cuda.get_device_capability(i) == (9, 0) for i in range(torch.cuda.device_count())
    )
    yield Finding(
        area="gpu",
        what="CUDA compiler",
        verdict=Verdict.OK if nvrtc or nvcc else Verdict.BROKEN if needed else Verdict.ABSENT,
        found=nvrtc or nvcc or "neither NVRTC nor nvcc",
        effect="builds the sm_90a layer kernels",
        advice="" if nvrtc or nvcc else 'pip install "moeflex[cuda]"',
    )


def _gpu(index: int) -> Finding:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    found = (
        f"{properties.name}, compute capability {capability[0]}.{capability[1]}, "
        f"{properties.total_memory / 1e9:.0f} GB"
    )
    if capability == (9, 0):
        verdict, effect = Verdict.OK, "the layer runs in one launch of the sm_90a kernels"
    elif capability >= (8, 0):
        verdict, effect = Verdict.OK, "router and layer run as Triton kernels"
    else:
        verdict, effect = (
            Verdict.ABSENT,
            "compute capability 8.0 is needed; MoE blocks stay with Inductor",
        )
    return Finding(area="gpu", what=f"device {index}", verdict=verdict, found=found, effect=effect)


def _ranks() -> Iterator[Finding]:
    import torch.distributed as dist

    available = dist.is_available() and dist.is_gloo_available()
    yield Finding(
        area="ranks",
        what="torch.distributed",
        verdict=Verdict.OK if available else Verdict.ABSENT,
        found="gloo" + (", NCCL" if dist.is_available() and dist.is_nccl_available() else "")
        if available
        else "not in this torch",
        effect='options={"group": ...} over processes of this machine',
    )
    folder = peers.segment_folder()
    if folder != peers.SHARED_MEMORY:
        yield Finding(
            area="ranks",
            what="shared memory",
            verdict=Verdict.ABSENT,
            found=f"{peers.SHARED_MEMORY} cannot be written",
            effect=f"arenas of several ranks lie in {folder}, on a disk",
            advice=f"mount a tmpfs at {peers.SHARED_MEMORY}",
        )
    else:
        free = shutil.disk_usage(folder).free
        small = free < _FEW_SHARED_BYTES
        yield Finding(
            area="ranks",
            what="shared memory",
            verdict=Verdict.ABSENT if small else Verdict.OK,
            found=f"{free / 1e9:.1f} GB free in {folder}",
            effect="the arenas of all ranks have to fit; else experts move by collectives"
            if small
            else "holds the arenas of all ranks on a CPU",
            advice="docker run --shm-size=8g, or a larger tmpfs" if small else "",
        )
    yield from _links()


def _links() -> Iterator[Finding]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for first in range(count):
        others = [other for other in range(count) if other != first]
        reached = [o for o in others if torch.cuda.can_device_access_peer(first, o)]
        if others:
            yield Finding(
                area="ranks",
                what=f"peers of device {first}",
                verdict=Verdict.OK if reached == others else Verdict.BROKEN,
                found=f"maps {reached or 'none'} of {others}",
                effect="peer copies" if reached == others else "experts move by collectives",
            )


def _cache() -> Iterator[Finding]:
    try:
        root = build.cache_root()
        start = time.perf_counter()
        with tempfile.NamedTemporaryFile(dir=root) as file:
            file.write(b"x" * (1 << 20))
            file.flush()
        seconds = time.perf_counter() - start
    except (MoeflexError, OSError) as error:
        yield Finding(
            area="cache",
            what="cache folder",
            verdict=Verdict.BROKEN,
            found=str(error),
            effect="every process builds its kernels anew, or cannot",
            advice="set MOEFLEX_CACHE_DIR to a folder that can be written",
        )
        return
    temporary = root != Path(build.wanted_cache_root())
    yield Finding(
        area="cache",
        what="cache folder",
        verdict=Verdict.BROKEN if temporary else Verdict.OK,
        found=f"{root}, {shutil.disk_usage(root).free / 1e9:.0f} GB free, 1 MB written in {seconds * 1e3:.0f} ms",
        effect="builds are lost when the temporary folder is cleared"
        if temporary
        else "kernels, libraries and proofs are kept here (`moeflex cache`)",
        advice="set MOEFLEX_CACHE_DIR to a folder that can be written" if temporary else "",
    )


def works(findings: list[Finding]) -> bool:
    """Whether nothing that is needed is broken."""
    return all(finding.verdict is not Verdict.BROKEN for finding in findings)


def system() -> str:
    """Operating system and machine, in one line."""
    return f"{platform.system()} {platform.release()} {platform.machine()}, {sys.executable}"
