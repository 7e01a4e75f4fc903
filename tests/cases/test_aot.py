"""Kind: exported graphs, and packages made ahead of time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases.blocks import BACKEND, Block, gather, rand, renormalized
from tests.tolerances import assert_close_to_eager, assert_close_to_fp32

TOKENS = (5, 1, 2, 64)


@pytest.mark.parametrize("form", ["gather", "grouped", "dense"])
def test_exported_with_a_dynamic_token_axis(form: str) -> None:
    """The token axis became a constant, or export failed on sizes that the data decides."""
    model = Block(form=form).eval()
    shapes = {"x": {0: torch.export.Dim.DYNAMIC}}
    exported = torch.export.export(model, (rand(5, 16),), dynamic_shapes=shapes)
    compiled = torch.compile(exported.module(), backend=BACKEND)
    twin = Block(form="loop").double()
    with torch.no_grad():
        for num_tokens in TOKENS:
            x = rand(num_tokens, 16, seed=num_tokens)
            assert_close_to_fp32(compiled(x), model(x), twin(x.double()))


class Derived(Block):
    """Constants that a compiler may fold: a transposed router, scaled experts."""

    def forward(self, x: Tensor) -> Tensor:
        ids, w = renormalized(x @ self.gate.t().contiguous(), self.top_k)
        return gather(x, ids, w, self.w13, (self.w2 * 0.5).contiguous(), F.silu)


def test_folded_constants_follow_their_weights() -> None:
    model, new = Derived().eval(), Derived(seed=3)
    compiled = torch.compile(model, backend=BACKEND)
    x = rand(5, 16)
    with torch.no_grad():
        assert_close_to_eager(compiled(x), model(x))
        for name in ("gate", "w13", "w2"):
            getattr(model, name).copy_(getattr(new, name))
            assert_close_to_eager(compiled(x), model(x))


@pytest.mark.slow
def test_package_of_an_unchanged_export_still_works(tmp_path) -> None:
    """Having moeflex loaded changes nothing for PyTorch's own ahead-of-time path."""
    import moe_compiler.backend  # noqa: F401

    model = Derived().eval()
    with torch.no_grad():
        shapes = {"x": {0: torch.export.Dim.DYNAMIC}}
        exported = torch.export.export(model, (rand(5, 16),), dynamic_shapes=shapes)
        path = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "model.pt2")
        )
        loaded = torch._inductor.aoti_load_package(path)
        for num_tokens in TOKENS:
            x = rand(num_tokens, 16, seed=num_tokens)
            assert_close_to_eager(loaded(x), model(x))


class Wrapper(nn.Module):
    """The compiled block inside a module that stays eager."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = torch.compile(inner, backend=BACKEND)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def test_state_dict_of_a_compiled_part_is_saved_and_loaded(tmp_path) -> None:
    first, second = Wrapper(Block(form="gather")), Wrapper(Block(form="gather", seed=7))
    x = rand(9, 16)
    with torch.no_grad():
        want = first(x)
        second(x)
        torch.save(first.state_dict(), tmp_path / "state.pt")
        second.load_state_dict(torch.load(tmp_path / "state.pt"))
        assert_close_to_eager(second(x), want)
