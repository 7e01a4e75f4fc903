"""Kind: a second copy of the experts."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from torch import nn

from tests.cases.blocks import BACKEND, Block, rand


def resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def large(form: str, transposed: bool) -> Block:
    """About 190 MiB of bf16 experts that are cheap to make."""
    model = Block(form=form, num_experts=32, hidden=512, intermediate=1)
    w13 = torch.full((32, 512, 4096), 0.01, dtype=torch.bfloat16)
    w13 *= torch.linspace(-1, 1, 32)[:, None, None].bfloat16()
    w2 = torch.full((32, 2048, 512), 0.01, dtype=torch.bfloat16)
    # Both matrices as views of [in, out] storage, or as they are.
    w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    if not transposed:
        w13, w2 = w13.contiguous(), w2.contiguous()
    model.gate = nn.Parameter((rand(32, 512) * 0.05).bfloat16())
    model.w13, model.w2 = nn.Parameter(w13), nn.Parameter(w2)
    return model.requires_grad_(False)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
@pytest.mark.parametrize("form", ["loop", "gather"])
@pytest.mark.parametrize("transposed", [False, True])
def test_no_second_copy_of_the_experts(form: str, transposed: bool) -> None:
    """Packing at compile time kept both the parameters and the packed copy."""
    # What the first compilation of a process loads must not count.
    small = Block(form=form, dtype=torch.bfloat16).requires_grad_(False)
    warm_up = torch.compile(small, backend=BACKEND)
    for num_tokens in (4, 6):
        warm_up(rand(num_tokens, 16).bfloat16())
    torch._dynamo.reset()
    model = large(form, transposed)
    x = rand(2, 512).bfloat16()
    size = model.w13.nbytes + model.w2.nbytes
    compiled = torch.compile(model, backend=BACKEND)
    before = resident_bytes()
    for _ in range(3):
        y = compiled(x)
    grown = resident_bytes() - before
    assert grown < 0.25 * size, f"grew {grown >> 20} MiB with {size >> 20} MiB of experts"
    model.w2.mul_(-1)
    torch.testing.assert_close(compiled(x), -y, rtol=2e-2, atol=1e-3)
