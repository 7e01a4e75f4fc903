"""Functions that Triton kernels share, and whether Triton is here at all.

Import this module only where `triton_missing()` of `runtime.triton_launch` is "".

Under the interpreter (`TRITON_INTERPRET=1`, the CPU tests) libdevice is absent and numpy's functions
serve; on a GPU the exponentials are those of libdevice, which torch's CUDA kernels use too:
`tl.exp` is an approximation with an error that grows with its argument, enough to swap two experts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

INTERPRETED: bool = bool(knobs.runtime.interpret)

# float("nan") of every bit pattern sorts above +inf, as in torch.topk on CUDA.
_HIGHEST = tl.constexpr(0x7FFFFFFF)


if INTERPRETED:

    @triton.jit
    def exact_exp(x):
        """e ** x."""
        return tl.exp(x)

    @triton.jit
    def exact_softplus(x):
        """log(1 + e ** x), as `F.softplus` with its default threshold."""
        e = tl.exp(tl.minimum(x, 20.0))
        u = 1.0 + e
        # log1p by a log that is correctly rounded: the quotient takes the rounding of u back.
        near = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
        return tl.where(x > 20.0, x, near)

    @triton.jit
    def dot_into(a, b, total):
        """total + a @ b in fp32: numpy has no bf16."""
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)

    @triton.jit
    def cast_to(x, DTYPE: tl.constexpr):
        """Fp32 values in DTYPE, to the nearest, ties to even: the interpreter truncates to bf16."""
        if tl.bfloat16 == DTYPE:
            bits = x.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
            x = tl.where(x != x, x, bits.to(tl.float32, bitcast=True))
        return x.to(DTYPE)

else:

    @triton.jit
    def exact_exp(x):
        """e ** x."""
        return libdevice.exp(x)

    @triton.jit
    def exact_softplus(x):
        """log(1 + e ** x), as `F.softplus` with its default threshold."""
        return tl.where(x > 20.0, x, libdevice.log1p(libdevice.exp(x)))

    @triton.jit
    def dot_into(a, b, total):
        """total + a @ b, sums in fp32, no TF32."""
        return tl.dot(a, b, total, input_precision="ieee")

    @triton.jit
    def cast_to(x, DTYPE: tl.constexpr):
        """Fp32 values in DTYPE, to the nearest, ties to even."""
        return x.to(DTYPE)


@triton.jit
def exact_sigmoid(x):
    """1 / (1 + e ** -x), each step rounded as in eager."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + exact_exp(-x))


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Fp32 values as `DTYPE` would hold them."""
    return cast_to(x, DTYPE).to(tl.float32)


@triton.jit
def order_key(x):
    """int32 with the order of fp32 values: -0.0 below 0.0, every NaN above +inf."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, _HIGHEST, key)


@triton.jit
def key_value(key):
    """The fp32 value of an `order_key`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def first_of_max(key, SIZE: tl.constexpr):
    """(largest int32 of a vector [SIZE], the lowest index that holds it)."""
    best = tl.max(key, axis=0)
    return best, tl.min(tl.where(key == best, tl.arange(0, SIZE), SIZE), axis=0)
