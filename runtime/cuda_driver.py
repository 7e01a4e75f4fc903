"""The few driver calls that a layer launch needs, through ctypes: no package on the user's machine
but the driver.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from moe_compiler.errors import MoeflexError

_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_DATA_TYPES = {"fp16": 6, "bf16": 9}  # CU_TENSOR_MAP_DATA_TYPE_*
_SWIZZLE_128B, _L2_128B = 3, 2
MAP_BYTES = 128


class DriverError(MoeflexError):
    """A CUDA driver call failed."""


@functools.lru_cache(maxsize=1)
def driver() -> ctypes.CDLL:
    """The CUDA driver.

    Raises:
        DriverError: this machine has none.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(
            f"a CUDA launch needs the NVIDIA driver (libcuda.so.1); {error}"
        ) from error


def check(code: int, what: str) -> None:
    """Raise DriverError unless `code` is CUDA_SUCCESS."""
    if code == 0:
        return
    name = ctypes.c_char_p()
    driver().cuGetErrorName(code, ctypes.byref(name))
    text = name.value.decode() if name.value else "unknown error"
    raise DriverError(f"{what} failed: {text} ({code})")


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared_bytes")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class TensorMap:
    """An encoded CUtensorMap (128 bytes, 64-byte aligned) of a 16-bit tensor; reads beyond its
    edge give zeros.

    Args:
        address: of element 0.
        dtype: "bf16" | "fp16".
        dims: elements along each axis, the contiguous one first.
        strides_bytes: of the axes after the first; multiples of 16.
        box: elements of a copy along each axis.
    """

    def __init__(
        self,
        address: int,
        dtype: str,
        dims: Sequence[int],
        strides_bytes: Sequence[int],
        box: Sequence[int],
    ) -> None:
        """Encode; raises DriverError when the driver refuses the layout."""
        rank = len(dims)
        self._buffer = ctypes.create_string_buffer(MAP_BYTES + 64)
        self.address = (ctypes.addressof(self._buffer) + 63) & ~63
        code = driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(self.address),
            _DATA_TYPES[dtype],
            rank,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*dims),
            (ctypes.c_uint64 * (rank - 1))(*strides_bytes),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*([1] * rank)),
            0,
            _SWIZZLE_128B,
            _L2_128B,
            0,
        )
        check(
            code,
            f"encoding a tensor map: dims {tuple(dims)}, strides {tuple(strides_bytes)}, box {tuple(box)}",
        )


class Kernel:
    """A kernel of a cubin, loaded into the current context."""

    def __init__(self, cubin: bytes, entry: str) -> None:
        """Load; the kernel's need of shared memory is read from its module."""
        self._module = ctypes.c_void_p()
        check(driver().cuModuleLoadData(ctypes.byref(self._module), cubin), "loading a cubin")
        self._function = ctypes.c_void_p()
        code = driver().cuModuleGetFunction(
            ctypes.byref(self._function), self._module, entry.encode()
        )
        check(code, f"finding kernel {entry}")
        self.shared_bytes = self.read_ints("moeflex_shared_bytes", 1)[0]
        code = driver().cuFuncSetAttribute(
            self._function, _MAX_DYNAMIC_SHARED_BYTES, self.shared_bytes
        )
        check(code, f"asking for {self.shared_bytes} bytes of shared memory")

    def read_ints(self, name: str, count: int) -> list[int]:
        """The first `count` ints of a global variable of the module (synchronises)."""
        address, size = ctypes.c_uint64(), ctypes.c_size_t()
        code = driver().cuModuleGetGlobal_v2(
            ctypes.byref(address), ctypes.byref(size), self._module, name.encode()
        )
        check(code, f"finding global {name}")
        values = (ctypes.c_int * count)()
        check(driver().cuMemcpyDtoH_v2(values, address, 4 * count), f"reading global {name}")
        return list(values)

    def launch(
        self, grid: int, num_threads: int, arguments: Any, stream: int, cooperative: bool
    ) -> None:
        """Launch on `stream`; `arguments` is an array of pointers to the parameters."""
        attribute = _LaunchAttribute(id=_COOPERATIVE)
        attribute.value[0] = 1
        config = _LaunchConfig(grid, 1, 1, num_threads, 1, 1, self.shared_bytes, stream, None, 0)
        if cooperative:
            config.attributes, config.num_attributes = ctypes.addressof(attribute), 1
        check(
            driver().cuLaunchKernelEx(ctypes.byref(config), self._function, arguments, None),
            "launching the layer",
        )
