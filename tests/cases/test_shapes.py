"""Kind: sizes, strides and token counts that kernels reject or read wrongly."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases.blocks import BACKEND, Block, compare, rand, renormalized
from tests.tolerances import assert_close_to_eager


@pytest.mark.parametrize("sizes", [(33, 17), (257, 24), (20, 12), (6, 6), (1, 1), (7, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_no_multiple_of_16_bytes(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    hidden, intermediate = sizes
    model = Block(hidden=hidden, intermediate=intermediate, num_experts=4, dtype=dtype)
    compare(model, rand(5, hidden, dtype=dtype), replaced=None if hidden == 1 else True)


@pytest.mark.parametrize("top_k", [1, 3])
def test_token_counts(top_k: int) -> None:
    """One compiled block serves every count."""
    model = Block(form="gather", top_k=top_k, dtype=torch.bfloat16)
    compiled = torch.compile(model, backend=BACKEND, dynamic=True)
    wide = Block(form="loop", top_k=top_k, dtype=torch.bfloat16).double()
    from tests.tolerances import assert_close_to_fp32

    with torch.no_grad():
        for num_tokens in (1, 2, 3, 5, 17, 64, 127, 129, 333, 1021):
            x = rand(num_tokens, 16, seed=num_tokens, dtype=torch.bfloat16)
            assert_close_to_fp32(compiled(x), model(x), wide(x.double()))


@pytest.mark.parametrize("num_tokens", [1, 127])
def test_static_token_counts(num_tokens: int) -> None:
    compare(Block(form="loop"), rand(num_tokens, 16), replaced=True, dynamic=False)


@pytest.mark.parametrize("form", ["gather", "loop"])
def test_no_tokens_forward_and_backward(form: str) -> None:
    """No expert has rows: weight gradients are zero, and the next step is right."""
    model = Block(form=form)
    compiled = torch.compile(model, backend=BACKEND)
    for num_tokens in (0, 6, 0):
        model.zero_grad(set_to_none=True)
        x = rand(num_tokens, 16).requires_grad_()
        y = compiled(x)
        assert y.shape == (num_tokens, 16)
        y.sum().backward()  # the upstream gradient has stride 0
        ours = [
            torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()
        ]
        twin, x_twin = Block(form="gather"), x.detach().clone().requires_grad_()
        twin(x_twin).sum().backward()
        for mine, parameter in zip([*ours, x.grad], [*twin.parameters(), x_twin], strict=True):
            assert_close_to_eager(mine, parameter.grad)


def layouts() -> dict[str, Tensor]:
    base = rand(40, 40)
    return {
        "slice": base[:9, 1:17],
        "transposed": base[:16, :9].T,
        "every_second_row": base[:18:2, :16],
        "expanded": base[:1, :16].expand(9, 16),
        "odd_offset": base.reshape(-1)[3 : 3 + 144].view(9, 16),
        "three_axes": base[:8, :32].view(8, 2, 16).transpose(0, 1),
    }


class Flattening(Block):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self.experts(rows, *self.select(rows)).view(x.shape)


@pytest.mark.parametrize("name", layouts())
@pytest.mark.parametrize("form", ["loop", "gather"])
def test_input_layouts(name: str, form: str) -> None:
    compare(Flattening(form=form), layouts()[name])


class Accumulating(Block):
    """The result is added into an expanded view, which shares its memory between rows."""

    def forward(self, x: Tensor) -> Tensor:
        base = x[:1].expand(x.shape[0], -1)
        return base.index_add(0, torch.arange(x.shape[0]), self.experts(x, *self.select(x)))


def test_no_write_through_an_expanded_view() -> None:
    x = rand(9, 16)
    before = x.clone()
    compare(Accumulating(form="gather"), x)
    assert torch.equal(x, before)


class InPlaceAfter(Block):
    """The residual is updated in place with the block's result."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x * 1.0
        rows += self.experts(rows, *self.select(rows))
        return rows


@pytest.mark.parametrize("form", ["loop", "gather"])
def test_in_place_residual(form: str) -> None:
    compare(InPlaceAfter(form=form), rand(9, 16))


def to_few(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    num_experts = logits.shape[-1]
    lifted = torch.arange(num_experts, device=logits.device) % (num_experts - 1) == 0
    return renormalized(logits + 40.0 * lifted, k)


@pytest.mark.parametrize("form", ["loop", "gather"])
def test_all_tokens_to_the_first_and_the_last_expert(form: str) -> None:
    num_experts = 16 if form == "loop" else 128
    model = Block(to_few, form, num_experts=num_experts, hidden=8)
    compare(model, rand(512, 8))


def test_weights_that_are_views_of_one_buffer() -> None:
    """Experts lie in a flat buffer, as loaders and optimizers keep them."""
    model = Block(form="gather")
    flat = torch.cat([model.w13.detach().flatten(), rand(3), model.w2.detach().flatten()])
    size = model.w13.numel()
    model.w13 = torch.nn.Parameter(flat[:size].view(8, 16, 16))
    model.w2 = torch.nn.Parameter(flat[size + 3 :].view(8, 16, 8))
    compare(model, rand(9, 16))


def test_weights_stored_the_other_way_round() -> None:
    """A transposed view as the parameter: same values, other strides."""
    model = Block(form="loop")
    w13 = model.w13.detach().transpose(1, 2).contiguous().transpose(1, 2)
    w2 = model.w2.detach().permute(2, 0, 1).contiguous().permute(1, 2, 0)
    model.w13, model.w2 = torch.nn.Parameter(w13), torch.nn.Parameter(w2)
    compare(model, rand(9, 16))


class Batched(Block):
    """The token axis is folded from batch and time by `view`, the result is unfolded."""

    def forward(self, x: Tensor) -> Tensor:
        batch, time, hidden = x.shape
        rows = F.layer_norm(x, (hidden,)).view(batch * time, hidden)
        return x + self.experts(rows, *self.select(rows)).view(batch, time, hidden)


def test_changing_batch_and_time() -> None:
    model = Batched(form="gather")
    compiled = torch.compile(model, backend=BACKEND)
    with torch.no_grad():
        for batch, time in ((2, 5), (1, 9), (3, 1), (1, 1)):
            x = rand(batch, time, 16, seed=time)
            assert_close_to_eager(compiled(x), model(x))
