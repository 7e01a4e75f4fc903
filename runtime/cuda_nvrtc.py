"""Compile one CUDA file with NVRTC: `python cuda_nvrtc.py LIBRARY SOURCE CUBIN ARCH INCLUDE_DIR`;
prints what the compiler says.

A process of its own, so that the build cache treats it as any compiler. It needs the library alone:
it imports nothing of this package, and no package of NVIDIA's.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path


def main(library: str, source: str, cubin: str, arch: str, include_dir: str) -> int:
    """Write `cubin`; 0 on success."""
    # NVRTC asks for this one by name alone; a wheel's folder is on no search path.
    for builtins in Path(library).parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))
    nvrtc = ctypes.CDLL(library)
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p

    def check(code: int) -> None:
        if code:
            raise RuntimeError(nvrtc.nvrtcGetErrorString(code).decode())

    def read(name: str) -> bytes:
        """What a pair of calls nvrtcGet...Size and nvrtcGet... gives."""
        size = ctypes.c_size_t()
        check(getattr(nvrtc, f"nvrtcGet{name}Size")(program, ctypes.byref(size)))
        text = ctypes.create_string_buffer(max(size.value, 1))
        check(getattr(nvrtc, f"nvrtcGet{name}")(program, text))
        return text.raw[: size.value]

    program = ctypes.c_void_p()
    code = Path(source).read_bytes()
    check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), ctypes.c_char_p(code), b"kernel.cu", 0, None, None
        )
    )
    flags = [f"--gpu-architecture={arch}", "--std=c++17", f"--include-path={include_dir}"]
    flags += ["--ptxas-options=-v", "--ptxas-options=-O3"]
    options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    failed = nvrtc.nvrtcCompileProgram(program, len(flags), options)
    print(read("ProgramLog").rstrip(b"\0").decode(errors="replace"))
    if not failed:
        Path(cubin).write_bytes(read("CUBIN"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
