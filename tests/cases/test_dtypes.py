"""Kind: dtypes of weights, scores, ids and results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases.blocks import BACKEND, Block, compare, rand, renormalized
from tests.tolerances import assert_close_to_fp32


class CloseScores(Block):
    """bf16 logits that are equal in pairs; an fp32 bias decides inside each pair."""

    def __init__(self, form: str) -> None:
        super().__init__(form=form, dtype=torch.bfloat16)
        with torch.no_grad():
            self.gate[1::2] = self.gate[0::2]
        self.register_buffer("bias", torch.tensor([0, 1, 3, 2, 4, 5, 7, 6.0]) * 1e-4 + 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.gate).float().sigmoid()
        ids = (scores + self.bias).topk(self.top_k).indices
        return self.experts(x, ids, scores.gather(1, ids)), ids


@pytest.mark.parametrize("form", ["grouped", "gather"])
def test_selection_is_decided_in_fp32(form: str) -> None:
    model, x = CloseScores(form), rand(32, 16, dtype=torch.bfloat16)
    with torch.no_grad():
        y, ids = torch.compile(model, backend=BACKEND)(x)
        want, want_ids = model(x)
        assert torch.equal(ids, want_ids)
        scores = F.linear(x, model.gate).float().sigmoid().gather(1, ids).double()
        model.form = "loop"
        wide = model.double().experts(x.double(), ids, scores)
    assert_close_to_fp32(y, want, wide)


class Normed(nn.Module):
    """A norm, which autocast runs in fp32, in front of experts that it runs in bf16."""

    def __init__(self, dtype: torch.dtype, form: str) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(16), Block(form=form, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        if self.moe.form != "grouped":
            return x + self.moe(rows)
        ids, w = self.moe.select(rows)
        with torch.autocast(x.device.type, enabled=False):
            return x + self.moe.experts(rows.to(self.moe.w13.dtype), ids, w)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", ["grouped", "loop", "gather"])
def test_autocast(dtype: torch.dtype, form: str) -> None:
    """The same context gives the same dtype and value, whether compiled in or outside of it."""
    model, x = Normed(dtype, form), rand(7, 16)
    wide = Normed(dtype, "loop").double()(x.double())
    compiled = torch.compile(model, backend=BACKEND)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert_close_to_fp32(compiled(x), model(x), wide)
        if dtype is torch.float32:
            assert_close_to_fp32(compiled(x), model(x), wide)


class Given(Block):
    """ids and weights come from outside."""

    def forward(self, x: Tensor, ids: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return self.experts(x, ids, w), ids


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_ids_of_every_integer_dtype(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 3], [7, 1], [2, 2], [5, 6]], dtype=dtype)
    _, same = compare(Given(), rand(4, 16), ids, torch.rand(4, 2))
    assert same.dtype is dtype


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_minus_one_is_nobody(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 3], [-1, 1], [2, -1], [-1, -1]], dtype=dtype)
    compare(Given(), rand(4, 16), ids, torch.rand(4, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("form", ["loop", "gather"])
def test_dtypes_of_the_whole_block(dtype: torch.dtype, form: str) -> None:
    (y,) = compare(Block(form=form, dtype=dtype), rand(8, 16, dtype=dtype))
    assert y.dtype is dtype


class Mixed(Block):
    """The two expert tensors have dtypes of their own."""

    def __init__(self, up: torch.dtype, down: torch.dtype) -> None:
        super().__init__()
        self.w13 = nn.Parameter(self.w13.detach().to(up))
        self.w2 = nn.Parameter(self.w2.detach().to(down))

    def forward(self, x: Tensor) -> Tensor:
        ids, w = self.select(x)
        gate, up = torch.einsum("th,tkih->tki", x.to(self.w13.dtype), self.w13[ids]).chunk(2, -1)
        y = torch.einsum("tki,tkhi->tkh", (F.silu(gate) * up).to(self.w2.dtype), self.w2[ids])
        return (y * w[..., None].to(y.dtype)).sum(1)


@pytest.mark.parametrize(
    ("up", "down"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
    ],
)
def test_mixed_weights_under_fp32_activations(up: torch.dtype, down: torch.dtype) -> None:
    compare(Mixed(up, down), rand(8, 16))


class NarrowScores(Block):
    """The whole router runs in bf16."""

    def select(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return renormalized(F.linear(x, self.gate), self.top_k)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ids, w = self.select(x)
        return self.experts(x, ids, w), ids, w


def test_router_in_bf16() -> None:
    """Scores stay as coarse as the model made them: the same ids as eager."""
    model, x = NarrowScores(form="loop", dtype=torch.bfloat16), rand(64, 16, dtype=torch.bfloat16)
    options = {"emulate_precision_casts": True}  # Inductor itself keeps bf16 chains in fp32
    with torch.no_grad():
        y, ids, w = torch.compile(model, backend=BACKEND, options=options)(x)
        want_ids = model(x)[1]
        assert w.dtype is torch.bfloat16
        assert (ids == want_ids).double().mean() > 0.95
        experts = (model.w13.double(), model.w2.double(), F.silu)
        from tests.cases.blocks import loop

        wide = loop(x.double(), ids, w.double(), *experts)
        assert_close_to_fp32(y, loop(x, ids, w, model.w13, model.w2, F.silu), wide)


def test_fp16_is_finite_where_eager_is() -> None:
    """Sums are kept in fp32, so that ours may stay finite where eager overflows, never the reverse."""
    model = Block(form="gather", dtype=torch.float16)
    x = torch.tensor([1.0, 30.0, 300.0, 3e3, 1e4, 3e4])[:, None].half() * rand(6, 16).half()
    with torch.no_grad():
        got, want = torch.compile(model, backend=BACKEND)(x), model(x)
    finite = want.isfinite()
    assert finite[:2].all()
    assert not finite[-1].all()
    assert got[finite].isfinite().all()
    assert got.dtype == want.dtype
    torch.testing.assert_close(got[:1], want[:1], rtol=1e-2, atol=1e-2)
