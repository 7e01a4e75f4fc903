"""CUDA source -> checked cubin, on a machine with or without a GPU.

NVRTC, which CUDA builds of torch bring, is used where it is found; `nvcc` is the fallback. A cubin is refused when
ptxas serialised wgmma or ignored setmaxnreg (C7508, C7510, C7514), when it uses the stack (spills
do), and, where a disassembler is found, when a k loop holds a gpu-wide fence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from moe_compiler.errors import BuildError, ToolchainError
from moe_compiler.runtime import build as build_cache

log = logging.getLogger(__name__)

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"
LAYER_TEMPLATE = TEMPLATES / "cuda" / "layer.cu.tmpl"
# ptxas: setmaxnreg ignored; wgmma serialised (function call, register allocation).
REFUSED_WARNINGS = ("C7508", "C7510", "C7514")
_SLOW_BUILD_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelResources:
    """What a kernel of a cubin uses: registers and bytes of stack a thread, shared bytes a block.

    The registers are those at entry; the shared memory is what the kernel asks for at its launch.
    """

    num_registers: int
    stack_bytes: int
    shared_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CudaBinary:
    """A cubin that passed the checks.

    Attributes:
        name: short name, for people.
        entry: name of the kernel function.
        cubin: the ELF image.
        resources: of `entry`.
        compiler: which, and its version.
        log: what the compiler said.
        seconds: wall time of the compilation, or of the look into the cache.
        cached: it was found in the build cache.
        disassembled: whether the k loops were looked at (a disassembler was found).
    """

    name: str
    entry: str
    cubin: bytes
    resources: KernelResources
    compiler: str
    log: str
    seconds: float
    cached: bool
    disassembled: bool


def read_template() -> str:
    """The text template that names the choices of a layer kernel."""
    return LAYER_TEMPLATE.read_text()


def find_nvcc() -> str | None:
    """Path of nvcc: $CUDA_HOME, the PATH, the usual folder; None when there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [Path(home) / "bin" / "nvcc"] if home else []
    found = shutil.which("nvcc")
    places += [Path(found)] if found else []
    places.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((str(path) for path in places if path.is_file()), None)


def find_nvrtc() -> str | None:
    """Path of the NVRTC library: an installed wheel, $CUDA_HOME, the usual folder; None when there is none."""
    folders = [
        path for folder in sys.path for path in sorted(Path(folder or ".").glob("nvidia/*/lib"))
    ]
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders += [Path(home) / "lib64"] if home else []
    folders.append(Path("/usr/local/cuda/lib64"))
    for folder in folders:
        found = [path for path in folder.glob("libnvrtc.so.*") if _is_recent(path)]
        if found:
            return str(max(found, key=lambda path: path.name))
    return None


def _is_recent(library: Path) -> bool:
    """sm_90a and C++17 need NVRTC 12 or newer."""
    major = library.name.removeprefix("libnvrtc.so.").split(".")[0]
    return major.isdigit() and int(major) >= 12


def find_disassembler() -> str | None:
    """Path of nvdisasm: the PATH, next to nvcc, or an installed wheel; None when there is none."""
    found = shutil.which("nvdisasm")
    if found:
        return found
    nvcc = find_nvcc()
    places = [Path(nvcc).resolve().parent / "nvdisasm"] if nvcc else []
    for folder in sys.path:
        places += sorted(Path(folder or ".").glob("nvidia/cu*/bin/nvdisasm"))
    return next((str(path) for path in places if path.is_file()), None)


def build(
    name: str,
    source: str,
    *,
    entry: str,
    arch: str = "sm_90a",
    compiler: str = "",
    allow_stack: bool = False,
) -> CudaBinary:
    """Compile one translation unit, or find it in the build cache, and check the result.

    Args:
        name: short name, for messages and the cache.
        source: CUDA C++; may include the headers under `templates`.
        entry: name of the kernel function.
        arch: target.
        compiler: "nvrtc", "nvcc", or "" for the first that is found.
        allow_stack: accept stack use (watchdog builds).

    Raises:
        ToolchainError: no compiler was found.
        BuildError: the compiler failed, or the result is refused.
    """
    unit, version = _unit(name, source, arch, compiler)
    report = build_cache.build(unit)
    if report.seconds > _SLOW_BUILD_S:
        log.info("built %s in %.1f s with %s", name, report.seconds, version)
    artifact = Path(report.path)
    cubin, text = artifact.read_bytes(), (artifact.parent / "log.txt").read_text()
    resources = read_resources(cubin, entry)
    _refuse(name, text, resources, allow_stack)
    # The cache holds refused builds too: only the marker says that the loops were looked at.
    marker = artifact.parent / "loops_checked.txt"
    disassembler = "" if marker.exists() else find_disassembler() or ""
    if disassembler:
        _refuse_fences(name, cubin, disassembler)
        with contextlib.suppress(OSError):
            marker.write_text(f"{disassembler}\n")
    return CudaBinary(
        name=name,
        entry=entry,
        cubin=cubin,
        resources=resources,
        compiler=version,
        log=text,
        seconds=report.seconds,
        cached=report.cached,
        disassembled=bool(disassembler) or marker.exists(),
    )


def _refuse_fences(name: str, cubin: bytes, disassembler: str) -> None:
    fences = find_loop_fences(disassemble(cubin, disassembler))
    if fences:
        raise BuildError(
            f"{name}: a k loop holds gpu-wide fences ({'; '.join(fences[:3])}); every wait and arrive "
            "inside the loop must be of CTA scope"
        )


def _refuse(name: str, text: str, resources: KernelResources, allow_stack: bool) -> None:
    for code in REFUSED_WARNINGS:
        if code in text:
            line = next(line for line in text.splitlines() if code in line)
            raise BuildError(
                f"{name}: ptxas reported {code}, which costs most of the speed: {line.strip()}"
            )
    if resources.stack_bytes and not allow_stack:
        raise BuildError(
            f"{name}: the kernel uses {resources.stack_bytes} bytes of stack a thread (spills or an indexed array); "
            "0 are allowed"
        )


def _unit(name: str, source: str, arch: str, compiler: str) -> tuple[build_cache.Unit, str]:
    """What is to be built, and with which compiler."""
    nvcc = find_nvcc()
    nvrtc = find_nvrtc() if compiler != "nvcc" else None
    if nvrtc is not None:
        library = Path(nvrtc).resolve()
        version = f"{library} of {library.stat().st_size} bytes"
        script = str(Path(__file__).with_name("cuda_nvrtc.py"))
        command = [sys.executable, script, nvrtc, "{source}", "{artifact}", arch, str(TEMPLATES)]
    elif nvcc is not None and compiler != "nvrtc":
        version = _nvcc_version(nvcc)
        number = arch.removeprefix("sm_")
        command = [nvcc, "-std=c++17", "-O3", "-cubin", "-Xptxas", "-v", f"-I{TEMPLATES}"]
        command += [
            f"-gencode=arch=compute_{number},code=sm_{number}",
            "{source}",
            "-o",
            "{artifact}",
        ]
    else:
        raise ToolchainError(
            "building a CUDA kernel needs NVRTC (the package nvidia-cuda-nvrtc, which CUDA builds of "
            "torch bring) or nvcc on the PATH or under $CUDA_HOME; neither was found"
        )
    shared = [TEMPLATES / "cuda" / "layer_args.h", TEMPLATES / "scheduler.h"]
    headers = sorted([*TEMPLATES.glob("cuda/*.cuh"), *shared])
    inputs = {path.name: path.read_text() for path in headers}
    unit = build_cache.Unit(
        name=name,
        source=source,
        source_name="kernel.cu",
        artifact_name="kernel.cubin",
        command=tuple(command),
        inputs={**inputs, "compiler": version},
    )
    return unit, version


@functools.lru_cache(maxsize=4)
def _nvcc_version(nvcc: str) -> str:
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    return f"{nvcc} {done.stdout.strip().splitlines()[-1] if done.stdout else 'unknown'}"


# ---- what the cubin says of itself

_ATTRIBUTE_FRAME_SIZE, _ATTRIBUTE_MIN_STACK, _ATTRIBUTE_REGISTERS = 0x11, 0x12, 0x2F


def _sections(cubin: bytes) -> dict[str, tuple[int, int]]:
    """Section name -> (offset, bytes) of a 64-bit little-endian ELF image, in the file's order."""
    if cubin[:5] != b"\x7fELF\x02":
        raise BuildError("the compiler's output is no 64-bit ELF image; a cubin was asked for")
    table, entry_bytes, count, names_idx = struct.unpack_from("<40xQ10xHHH", cubin, 0)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_bytes) for i in range(count)]
    names = headers[names_idx][4]
    return {_text_at(cubin, names + header[0]): (header[4], header[5]) for header in headers}


def _text_at(cubin: bytes, start: int) -> str:
    return cubin[start : cubin.index(b"\0", start)].decode()


def read_int(cubin: bytes, name: str) -> int:
    """The initial value of the int `name`, a global variable of a cubin; 0 where it has none."""
    sections = _sections(cubin)
    offsets = [offset for offset, _ in sections.values()]
    symbols, size = sections[".symtab"]
    names, _ = sections[".strtab"]
    for at in range(symbols, symbols + size, 24):
        name_offset, section_idx, address = struct.unpack_from("<I2xHQ", cubin, at)
        if _text_at(cubin, names + name_offset) == name:
            found: int = struct.unpack_from("<i", cubin, offsets[section_idx] + address)[0]
            return found
    return 0


def _attributes(blob: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, payload) of an .nv.info section."""
    at = 0
    while at + 4 <= len(blob):
        kind, attribute, size = struct.unpack_from("<BBH", blob, at)
        at += 4
        if kind == 4:
            yield attribute, blob[at : at + size]
            at += size


def read_resources(cubin: bytes, entry: str) -> KernelResources:
    """Registers and stack of `entry`, from the ELF image: every compiler is judged alike.

    Raises:
        BuildError: the image is no cubin, or has no such kernel.
    """
    sections = _sections(cubin)
    if f".text.{entry}" not in sections:
        raise BuildError(
            f"the cubin has no kernel {entry}; it has {sorted(n for n in sections if '.text.' in n)}"
        )
    offset, size = sections[".nv.info"]
    registers = stack = 0
    for attribute, payload in _attributes(cubin[offset : offset + size]):
        if len(payload) != 8:
            continue
        value = struct.unpack("<II", payload)[1]
        if attribute == _ATTRIBUTE_REGISTERS:
            registers = max(registers, value)
        elif attribute in (_ATTRIBUTE_FRAME_SIZE, _ATTRIBUTE_MIN_STACK):
            stack = max(stack, value)
    return KernelResources(
        num_registers=registers,
        stack_bytes=stack,
        shared_bytes=read_int(cubin, "moeflex_shared_bytes"),
    )


def disassemble(cubin: bytes, disassembler: str) -> str:
    """SASS of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        result = subprocess.run(
            [disassembler, "-hex", file.name], capture_output=True, text=True, check=False
        )
    if result.returncode:
        raise BuildError(f"{disassembler} failed: {result.stderr[-1000:]}")
    return result.stdout


_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\d+\s+)?[A-Z][^;]*);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_BRANCH = re.compile(r"\bBRA(?:\.\S+)?\s.*?`\((\.L_x_\d+)\)")
_GPU_FENCE = re.compile(r"MEMBAR\.\S*(?:GPU|SYS)|CCTL\.IVALL")


def find_loop_fences(sass: str) -> list[str]:
    """Gpu-wide fences in innermost loops that multiply (HGMMA) or load (UTMALDG)."""
    code, labels = _parse(sass)
    loops = _natural_loops(code, labels)
    working = [
        body
        for body in loops.values()
        if any("HGMMA" in code[i] or "UTMALDG" in code[i] for i in body)
    ]
    inner = [body for body in working if not any(other < body for other in working)]
    return [code[i] for body in inner for i in sorted(body) if _GPU_FENCE.search(code[i])]


def _parse(sass: str) -> tuple[list[str], dict[str, int]]:
    """Instructions in order, and label -> position of the instruction that follows it."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        label = _LABEL.match(line.strip())
        if label:
            labels[label.group(1)] = len(code)
        instruction = _INSTRUCTION.search(line)
        if instruction:
            code.append(instruction.group(2).strip())
    return code, labels


def _natural_loops(code: list[str], labels: dict[str, int]) -> dict[int, set[int]]:
    """Loop header -> its body: what reaches a backward branch without passing the header."""
    predecessors: dict[int, list[int]] = {i: [] for i in range(len(code))}
    back_edges = []
    for i, text in enumerate(code):
        branch = _BRANCH.search(text)
        target = labels.get(branch.group(1)) if branch else None
        if target is not None and target < len(code):
            predecessors[target].append(i)
            if target <= i:
                back_edges.append((i, target))
        if i + 1 < len(code) and not re.match(r"(BRA|EXIT|RET)\b", text):
            predecessors[i + 1].append(i)
    loops: dict[int, set[int]] = {}
    for tail, header in back_edges:
        body, todo = loops.setdefault(header, {header}), [tail]
        while todo:
            at = todo.pop()
            if at not in body:
                body.add(at)
                todo += predecessors[at]
    return loops
