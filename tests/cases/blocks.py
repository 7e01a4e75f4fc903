"""A small MoE block in several spellings, and the comparison of a compiled model with eager.

Routers take logits [T, E] and give ids and weights [T, K]; forms take x, ids, weights and the
stacked experts w13 [E, 2I, H], w2 [E, H, I].
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tolerances import assert_close_to_fp32, relative_error

BACKEND = os.environ.get("MOEFLEX_TEST_BACKEND", "moeflex")

Route = Callable[[Tensor, int], tuple[Tensor, Tensor]]
Activation = Callable[[Tensor], Tensor]


def rand(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Seeded normal values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def renormalized(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Softmax, top-k, divided by the sum."""
    weights, ids = logits.softmax(-1).topk(k)
    return ids, weights / weights.sum(-1, keepdim=True)


def plain_softmax(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Softmax, top-k."""
    weights, ids = logits.softmax(-1).topk(k)
    return ids, weights


def softmax_after(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Top-k, then softmax over the selected."""
    values, ids = logits.topk(k)
    return ids, values.softmax(-1)


def sigmoid_renormalized(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Sigmoid, top-k, divided by the sum plus a tiny number."""
    weights, ids = logits.sigmoid().topk(k)
    return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20)


def wide(x: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def loop(x: Tensor, ids: Tensor, w: Tensor, w13: Tensor, w2: Tensor, act: Activation) -> Tensor:
    """One pass per expert over the tokens that chose it."""
    out = torch.zeros(x.shape[0], w2.shape[1], dtype=wide(x), device=x.device)
    for expert in range(w13.shape[0]):
        token, slot = torch.where(ids == expert)
        gate, up = F.linear(x[token], w13[expert]).chunk(2, -1)
        y = F.linear(act(gate) * up, w2[expert])
        out.index_add_(0, token, y.to(out.dtype) * w[token, slot, None].to(out.dtype))
    return out.to(x.dtype)


def gather(x: Tensor, ids: Tensor, w: Tensor, w13: Tensor, w2: Tensor, act: Activation) -> Tensor:
    """The chosen experts' weights are gathered for every token."""
    gate, up = torch.einsum("th,tkih->tki", x, w13[ids]).chunk(2, -1)
    y = torch.einsum("tki,tkhi->tkh", act(gate) * up, w2[ids])
    return (y.to(wide(x)) * w.to(wide(x)).unsqueeze(-1)).sum(1).to(x.dtype)


def grouped_matmul(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """In bf16, the one dtype in which torch can trace it."""
    return F.grouped_mm(rows.bfloat16(), weights.bfloat16(), offs=ends).to(rows.dtype)


def grouped(x: Tensor, ids: Tensor, w: Tensor, w13: Tensor, w2: Tensor, act: Activation) -> Tensor:
    """Sort by expert, grouped matmuls, unsort."""
    num_tokens, k = ids.shape
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    experts = torch.arange(w13.shape[0], device=x.device)
    ends = (flat[:, None] == experts).sum(0).cumsum(0).to(torch.int32)
    gate, up = grouped_matmul(x[order // k], w13.transpose(-2, -1), ends).chunk(2, -1)
    y = grouped_matmul(act(gate) * up, w2.transpose(-2, -1), ends)
    y = y[torch.argsort(order)].view(num_tokens, k, w2.shape[1])
    return (y.to(wide(x)) * w.to(wide(x)).unsqueeze(-1)).sum(1).to(x.dtype)


def dense(x: Tensor, ids: Tensor, w: Tensor, w13: Tensor, w2: Tensor, act: Activation) -> Tensor:
    """Every expert on every token, weighted by a matrix [T, E] that is mostly zero."""
    mix = torch.zeros(x.shape[0], w13.shape[0], dtype=w.dtype, device=x.device).scatter(1, ids, w)
    gate, up = torch.einsum("th,eih->tei", x, w13).chunk(2, -1)
    y = torch.einsum("tei,ehi->teh", act(gate) * up, w2)
    return torch.einsum("te,teh->th", mix.to(x.dtype), y)


FORMS = {"loop": loop, "gather": gather, "grouped": grouped, "dense": dense}


class Block(nn.Module):
    """Router and experts; subclasses change `forward`.

    The router runs in fp32, so that a bf16 block and its fp64 twin select the same experts.
    """

    def __init__(
        self,
        route: Route = renormalized,
        form: str = "loop",
        *,
        hidden: int = 16,
        intermediate: int = 8,
        num_experts: int = 8,
        top_k: int = 2,
        act: Activation = F.silu,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> nn.Parameter:
            values = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
            return nn.Parameter(values.to(dtype))

        self.gate = draw(num_experts, hidden)
        self.w13 = draw(num_experts, 2 * intermediate, hidden)
        self.w2 = draw(num_experts, hidden, intermediate)
        self.route, self.form, self.top_k, self.act = route, form, top_k, act

    def select(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """ids and weights [T, K]."""
        return self.route(F.linear(x.to(wide(x)), self.gate.to(wide(x))), self.top_k)

    def experts(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        """The experts in the block's form."""
        return FORMS[self.form](x, ids, w, self.w13, self.w2, self.act)

    def forward(self, x: Tensor) -> Any:
        return self.experts(x, *self.select(x))


def widened(model: nn.Module) -> nn.Module:
    """A copy in fp64 whose blocks are spelled as loops: the reference of both sides."""
    twin = copy.deepcopy(model).double()
    for module in twin.modules():
        if isinstance(module, Block):
            module.form = "loop"
    return twin


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors of a nest of tuples, lists and dicts."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, dict):
        result = result.values()
    return [t for part in result for t in tensors_of(part)]


def run(model: Callable[..., Any], module: nn.Module, inputs: Sequence[Any], grad: bool) -> list:
    """Results, then (with `grad`) the gradients of inputs and parameters."""
    if not grad:
        with torch.no_grad():
            return tensors_of(model(*inputs))
    module.zero_grad(set_to_none=True)
    inputs = [
        t.detach().clone().requires_grad_()
        if isinstance(t, Tensor) and t.is_floating_point()
        else t
        for t in inputs
    ]
    results = tensors_of(model(*inputs))
    sum(t.square().sum() for t in results if t.is_floating_point()).backward()
    leaves = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    leaves += [p for p in module.parameters() if p.requires_grad]
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
    return [t.detach() for t in results] + grads


def to_double(value: Any) -> Any:
    """fp64 for floating-point tensors, anything else as it is."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def compare(
    model: nn.Module,
    *inputs: Any,
    grad: bool = False,
    replaced: bool | None = None,
    reference: nn.Module | None = None,
    **compile_options: Any,
) -> list[Tensor]:
    """Compile a copy of the model and compare it with eager; integer results must be equal.

    Args:
        model: in the dtype under test; it is not changed.
        inputs: positional arguments.
        grad: compare the gradients of inputs and parameters too.
        replaced: whether moeflex must (True) or must not (False) have taken a block.
        reference: the wide model, where `widened(model)` cannot be.
        compile_options: for `torch.compile`.

    Returns:
        What the compiled model gave.
    """
    torch._dynamo.reset()
    module = copy.deepcopy(model)
    compiled = torch.compile(module, backend=BACKEND, **compile_options)
    ours = run(compiled, module, inputs, grad)
    eager = run(model, model, inputs, grad)
    twin = reference or widened(model)
    exact = run(twin, twin, [to_double(t) for t in inputs], grad)
    assert len(ours) == len(eager) == len(exact)
    for mine, theirs, precise in zip(ours, eager, exact, strict=True):
        if not theirs.is_floating_point():
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
            continue
        # A reference that is far from eager would allow anything.
        assert relative_error(theirs, precise) < 0.1
        assert_close_to_fp32(mine, theirs, precise)
    if replaced is not None:
        assert (num_replaced() > 0) == replaced, found()
    return ours


def num_replaced() -> int:
    """Blocks that moeflex took since the last reset; skips the test with another backend."""
    import pytest

    if BACKEND != "moeflex":
        pytest.skip("only moeflex reports what it replaced")
    import moe_compiler

    return sum(report.num_replaced for report in moe_compiler.reports())


def found() -> str:
    """What moeflex says about the graphs since the last reset."""
    import moe_compiler

    lines = []
    for report in moe_compiler.reports():
        lines += [f"{r.form}, {r.router.kind}" for r in report.regions]
        lines += [*report.placements, *report.notes]
        lines += [f"left alone: {refusal.node}: {refusal.reason}" for refusal in report.refused]
    return "; ".join(lines) or "no candidate was seen"
