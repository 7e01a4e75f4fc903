"""Compile one CUDA file with NVRTC: `python cuda_nvrtc.py SOURCE CUBIN ARCH INCLUDE_DIR`; prints
what the compiler says.

A process of its own, so that the build cache treats it as any compiler. It imports nothing of this
package.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path


def main(source: str, cubin: str, arch: str, include_dir: str) -> int:
    """Write `cubin`; 0 on success."""
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError:
        from cuda.core.experimental import Program, ProgramOptions
    options = ProgramOptions(
        name="kernel.cu",
        arch=arch,
        std="c++17",
        include_path=[include_dir],
        ptxas_options=["-v", "-O3"],
    )
    text = io.StringIO()
    try:
        code = Program(Path(source).read_text(), "c++", options).compile("cubin", logs=text).code
    except Exception as error:  # cuda.core raises several kinds; the message is the compiler's
        print(f"{text.getvalue()}\n{type(error).__name__}: {error}")
        return 1
    print(text.getvalue())
    Path(cubin).write_bytes(bytes(code))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
