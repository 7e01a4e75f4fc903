"""What the CUDA build refuses, on a machine without a GPU."""

from __future__ import annotations

import pytest

from moe_compiler.errors import BuildError, ToolchainError
from moe_compiler.runtime import cuda_build
from moe_compiler.runtime.cuda_build import (
    KernelResources,
    build,
    find_loop_fences,
    find_nvcc,
    find_nvrtc,
)

needs_compiler = pytest.mark.skipif(
    find_nvcc() is None and find_nvrtc() is None, reason="needs nvcc or NVRTC"
)
CLEAN = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] *= 2.f; }'
STACK = """
extern "C" __global__ void k(float* x, int n) {
  float a[64];
  for (int i = 0; i < 64; ++i) a[i] = x[i];
  for (int i = 0; i < n; ++i) a[i * i % 64] += a[i % 64];
  x[threadIdx.x] = a[n];
}
"""


def sass(inside: str, outside: str = "NOP") -> str:
    """A loop that multiplies, inside a loop over tiles."""
    code = [".L_x_0:", outside, ".L_x_1:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2"]
    code += ["HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4]", inside]
    code += ["@P0 BRA `(.L_x_1)", "@P1 BRA `(.L_x_0)", "EXIT"]
    lines = [
        line if line.startswith(".L") else f"        /*{16 * i:04x}*/  {line} ;"
        for i, line in enumerate(code)
    ]
    return "\n".join(lines)


def test_a_fence_between_tiles_is_fine() -> None:
    assert find_loop_fences(sass("NOP", outside="MEMBAR.ALL.GPU")) == []


@pytest.mark.parametrize("fence", ["MEMBAR.ALL.GPU", "CCTL.IVALL", "MEMBAR.SC.SYS"])
def test_a_fence_in_the_k_loop_is_found(fence: str) -> None:
    assert find_loop_fences(sass(fence)) == [fence]


def test_a_cta_fence_in_the_k_loop_is_fine() -> None:
    assert find_loop_fences(sass("MEMBAR.ALL.CTA")) == []


@pytest.mark.parametrize("code", cuda_build.REFUSED_WARNINGS)
def test_warnings_that_cost_the_speed_are_refused(code: str) -> None:
    resources = KernelResources(num_registers=168, stack_bytes=0, shared_bytes=0)
    text = f"ptxas info    : ({code}) Potential Performance Loss: wgmma ... serialized"
    with pytest.raises(BuildError, match=code):
        cuda_build._refuse("k", text, resources, False)


@needs_compiler
def test_build_is_cached_and_read() -> None:
    first = build("clean", CLEAN, entry="k")
    second = build("clean", CLEAN, entry="k")
    assert second.cached
    assert first.cubin == second.cubin
    assert first.resources.stack_bytes == 0
    assert 0 < first.resources.num_registers < 64


@needs_compiler
def test_stack_use_is_refused_every_time() -> None:
    for _ in range(2):  # the second time it comes from the cache
        with pytest.raises(BuildError, match="bytes of stack"):
            build("stack", STACK, entry="k")
    assert build("stack", STACK, entry="k", allow_stack=True).resources.stack_bytes >= 256


@needs_compiler
def test_errors_say_what_the_compiler_said() -> None:
    with pytest.raises(BuildError, match="no_such_name"):
        build("broken", "int x = no_such_name;", entry="k")
    with pytest.raises(BuildError, match="no kernel other"):
        build("clean", CLEAN, entry="other")


def test_no_cubin_is_no_cubin() -> None:
    with pytest.raises(BuildError, match="no 64-bit ELF"):
        cuda_build.read_resources(b"nothing", "k")


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_build, "find_nvcc", lambda: None)
    monkeypatch.setattr(cuda_build, "find_nvrtc", lambda: None)
    with pytest.raises(ToolchainError, match="nvcc"):
        build("clean", CLEAN, entry="k")
