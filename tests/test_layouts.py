"""`torch.compile` over a group: both layouts, switched between steps, beside the model of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_compiler
from moe_compiler.errors import LayoutError, OptionError, UnsupportedError
from moe_compiler.expert_blocks import Layout
from moe_compiler.ir import MoEPlan, RouterSpec, Score
from moe_compiler.layouts import model_of_parameter
from moe_compiler.reference import moe_layer
from moe_compiler.runtime import gathered_layer, op  # noqa: F401  defines the op
from moe_compiler.runtime.stand_in import stand_in
from tests.passes.test_tensor_parallel import DenseAndHead, H, Layer, qwen2, qwen3
from tests.runtime.ranks import run_ranks
from tests.runtime.test_switch import model_tensors, spec_of, static_store

STEPS = 4

SLOW = pytest.mark.slow


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(
        model,
        backend=moe_compiler.moeflex,
        dynamic=False,
        options={"group": "world", "disable": ("inductor",), **options},
    )


class Small(nn.Module):
    """One layer between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, H)
        self.layer = Layer(repeat=True)
        self.head = nn.Linear(H, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(ids)))


def tied() -> nn.Module:
    """Embedding, MLP, experts beside a shared expert, and the embedding again as the head."""
    return DenseAndHead(tied=True)


def build(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def decode(model: Any, window: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy tokens of a sliding window [batch, length], and the last logits."""
    tokens = []
    for _ in range(STEPS):
        logits = model(window)[:, -1]
        token = logits.argmax(-1, keepdim=True)
        tokens.append(token)
        window = torch.cat((window[:, 1:], token), 1)
    return torch.cat(tokens, 1), logits


def prompts() -> Tensor:
    return torch.randint(0, 64, (4, 6), generator=torch.Generator().manual_seed(3))


def check_decode(
    rank: int, num_ranks: int, folder: Path, kind: Callable[[], nn.Module]
) -> dict[str, Any]:
    whole = prompts()
    share = len(whole) // num_ranks
    mine = whole[rank * share : (rank + 1) * share]
    found: dict[str, Any] = {}
    with torch.no_grad():
        model = compiled(build(kind), initial="ep")
        found["ep"] = decode(model, mine)
        found["layouts"] = [moe_compiler.layout(model)]
        report = moe_compiler.switch(model, "tp", check=True)
        found["report"] = report
        found["tp"] = decode(model, whole)
        found["layouts"].append(moe_compiler.layout(model))
        moe_compiler.switch(model, "ep")
        found["ep again"] = decode(model, mine)
        static = compiled(build(kind), layouts=("tp",))
        found["tp static"] = decode(static, whole)
        new = dict(build(kind, seed=1).named_parameters())
        moe_compiler.refit(model, {n: p.detach() for n, p in new.items()})
        moe_compiler.switch(model, "tp")
        found["refit"] = decode(model, whole)
        experts = next(p for n, p in model.named_parameters() if "w13" in n or "gate_up" in n)
        found["nan"] = bool(experts.isnan().all())
        experts.mul_(1.0)
        with pytest.raises(LayoutError, match=r"moe_compiler\.refit"):
            model(whole)
    return found


def equal(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "kind",
    [
        Small,
        tied,
        pytest.param(qwen3, marks=pytest.mark.slow),
        pytest.param(qwen2, marks=pytest.mark.slow),
    ],
)
def test_a_decode_over_two_ranks(tmp_path: Path, kind: Callable[[], nn.Module]) -> None:
    """EP on requests of its own, TP on all of them, back, new values: tokens of one process, bits of the layout."""
    with torch.no_grad():
        tokens, logits = decode(build(kind), prompts())
        new_tokens, _ = decode(build(kind, seed=1), prompts())
    ranks = run_ranks(check_decode, 2, tmp_path, kind)
    for rank, found in enumerate(ranks):
        rows = slice(rank * 2, rank * 2 + 2)
        assert torch.equal(found["ep"][0], tokens[rows])
        torch.testing.assert_close(found["ep"][1], logits[rows], rtol=1e-4, atol=1e-5)
        assert torch.equal(found["tp"][0], tokens)
        torch.testing.assert_close(found["tp"][1], logits, rtol=1e-4, atol=1e-5)
        assert equal(found["tp"], found["tp static"])
        assert equal(found["ep"], found["ep again"])
        assert equal(found["tp"], ranks[0]["tp"])
        assert torch.equal(found["refit"][0], new_tokens)
        assert found["nan"]
        assert found["layouts"] == ["ep", "tp"]
        assert found["report"].done
        assert found["report"].way == "peer copies"
        assert 0 < found["report"].link_share < 10
        assert found["report"].crossed_bytes == found["report"].local_bytes > 0


def uneven_tokens(rank: int, num_ranks: int, folder: Path) -> list[Tensor]:
    """The op in steps in which some ranks, or all, have no tokens; six experts over four ranks."""
    plan, experts = narrow_layer(rank, num_ranks)
    found = []
    for counts in UNEVEN:
        x, ids, weights = tokens_of(rank, counts[rank])
        found.append(
            torch.ops.moeflex.gathered_moe_layer(
                x, [ids, weights], experts, plan.key, "fp32", "0", 6, num_ranks
            )
        )
    return found


UNEVEN = ((3, 0, 1, 2), (0, 0, 0, 0), (0, 2, 0, 0))
SPEC = spec_of(6)


def tokens_of(rank: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand(num_tokens, 6, generator=generator).topk(2).indices
    x = torch.randn(num_tokens, SPEC.hidden, generator=generator)
    return x, ids, torch.rand(num_tokens, 2, generator=generator)


def narrow_layer(rank: int, num_ranks: int) -> tuple[MoEPlan, list[Tensor]]:
    store = static_store(rank, num_ranks, SPEC, Layout.EP, 0)
    local = store.arena.plan.experts[0].local_spec(SPEC, Layout.EP)
    router = RouterSpec(score=Score.EXTERNAL, top_k=2 * num_ranks, num_experts=local.num_experts)
    return MoEPlan(router=router, experts=local, out_dtype="fp32"), list(store.experts(0))


def test_ranks_without_tokens(tmp_path: Path) -> None:
    router = RouterSpec(score=Score.EXTERNAL, top_k=2, num_experts=6)
    plan = MoEPlan(router=router, experts=SPEC)
    with op.plain_torch():
        ranks = run_ranks(uneven_tokens, 4, tmp_path)
    for rank, found in enumerate(ranks):
        for step, counts in enumerate(UNEVEN):
            x, ids, weights = tokens_of(rank, counts[rank])
            expected = moe_layer(plan, x, [ids, weights], model_tensors(SPEC, 0))
            torch.testing.assert_close(found[step], expected)


UNCUT = {
    "heads": (lambda: Layer(q=5, kv=5), "5 heads"),
    "expert width": (lambda: Layer(width=9), "I = 9"),
    "not asked for": (lambda: Layer(), "layouts=('ep',) was asked for"),
}


def only_ep(rank: int, num_ranks: int, folder: Path, name: str) -> dict[str, Any]:
    build = UNCUT[name][0]
    torch.manual_seed(0)
    x = torch.randn(2, 3, H)[rank % 2 :][:1]
    torch.manual_seed(1)
    source = build()
    layouts = ("ep",) if name == "not asked for" else ("ep", "tp")
    with torch.no_grad():
        found: dict[str, Any] = {"expected": source(x)}
        model = compiled(source, layouts=layouts)
        found["before"] = model(x)
        found["report"] = moe_compiler.switch(model, "tp")
        found["after"] = model(x)
        found["layout"] = moe_compiler.layout(model)
        store = model_of_parameter(source.moe.w13).store
        found["blocks"] = store.arena.plan.experts[0].num_blocks
        if "heads" in name:
            torch._dynamo.reset()
            with pytest.raises(Exception, match="layout 'tp' cannot be had: 5 heads"):
                compiled(build(), initial="tp")(x)
    return found


@pytest.mark.parametrize("name", UNCUT)
def test_a_model_that_cannot_be_cut_runs_in_ep(tmp_path: Path, name: str) -> None:
    """Experts stay whole then; a switch is refused with the reason, and nothing is lost by that."""
    for found in run_ranks(only_ep, 4 if "width" in name else 2, tmp_path, name):
        torch.testing.assert_close(found["before"], found["expected"])
        assert torch.equal(found["after"], found["before"])
        assert not found["report"].done
        assert UNCUT[name][1] in found["report"].reason
        assert found["layout"] == "ep"
        assert found["blocks"] == 1


def refusals(rank: int, num_ranks: int, folder: Path) -> list[str]:
    found = []
    with pytest.raises(Exception, match=r"under torch[.]no_grad") as raised:
        compiled(Layer())(torch.randn(1, 3, H))
    found.append(type(raised.value).__name__)
    with pytest.raises(Exception, match="'group' takes 'world'"), torch.no_grad():
        compiled(Layer(), group="mars")(torch.randn(1, 3, H))
    with pytest.raises(Exception, match="a padding token"), torch.no_grad():
        compiled(Layer(), layouts=("ep",))(torch.randn(1, 0, H))
    return found


def test_refusals_over_a_group(tmp_path: Path) -> None:
    run_ranks(refusals, 1, tmp_path)


def test_without_a_group_there_are_no_layouts() -> None:
    with pytest.raises(LayoutError, match="has no layouts"):
        moe_compiler.layout(Layer())
    with pytest.raises(Exception, match="not initialised"), torch.no_grad():
        compiled(Layer())(torch.randn(1, 3, H))


@pytest.mark.parametrize(
    "options", [{"layouts": ("sp",)}, {"layouts": ()}, {"layouts": ("ep",), "initial": "tp"}]
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"option '(layouts|initial)'"), torch.no_grad():
        compiled(Layer(), **options)(torch.randn(1, 3, H))
    assert issubclass(OptionError, ValueError)
    assert issubclass(UnsupportedError, NotImplementedError)


def test_a_stand_in_is_nan_and_costs_no_memory() -> None:
    big = stand_in(torch.Size((1 << 16, 1 << 17)), torch.float32)
    assert big.is_contiguous()
    assert big[-1, -5:].isnan().all()
    assert big[1234, 5678].isnan()
    small = stand_in(torch.Size((3, 5)), torch.bfloat16)
    assert small.isnan().all()
    small.zero_()
    assert stand_in(torch.Size((3, 5)), torch.bfloat16).isnan().all()
