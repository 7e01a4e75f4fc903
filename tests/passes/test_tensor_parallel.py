"""One rank's tensor-parallel graph, run by ranks over gloo and compared with the whole model."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn

from moe_compiler.arena import plan_arena
from moe_compiler.expert_blocks import Layout
from moe_compiler.ir import MoEPlan, RouterSpec, Score
from moe_compiler.layout_graphs import rank_sums
from moe_compiler.passes.match_moe import find_regions
from moe_compiler.passes.nodes import find_parameters
from moe_compiler.passes.replace import replace_region
from moe_compiler.passes.tensor_parallel import (
    ShardError,
    TensorParallelGraph,
    shard_graph,
    sliced,
)
from moe_compiler.reference import expert_tensors
from moe_compiler.runtime import op
from moe_compiler.runtime.arena_views import Arena, write_expert
from tests.passes.graphs import capture
from tests.runtime.ranks import run_ranks

H = 32


class Experts(nn.Module):
    def __init__(self, width: int = 8, num_experts: int = 8) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(num_experts, H) * 0.3)
        self.w13 = nn.Parameter(torch.randn(num_experts, 2 * width, H) * 0.2)
        self.w2 = nn.Parameter(torch.randn(num_experts, H, width) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = F.linear(x, self.gate).softmax(-1).topk(2)
        g, u = torch.einsum("th,tkih->tki", x, self.w13[ids]).chunk(2, -1)
        y = torch.einsum("tki,tkhi->tkh", F.silu(g) * u, self.w2[ids])
        return (y * weights.unsqueeze(-1)).sum(1)


class Layer(nn.Module):
    """Grouped-query attention in front of a mixture of experts."""

    def __init__(
        self, q: int = 8, kv: int = 2, *, repeat: bool = False, bias: bool = False, width: int = 8
    ) -> None:
        super().__init__()
        self.q, self.kv, self.d, self.repeat = q, kv, 4, repeat
        self.wq = nn.Linear(H, q * 4, bias=bias)
        self.wk = nn.Linear(H, kv * 4, bias=bias)
        self.wv = nn.Linear(H, kv * 4, bias=bias)
        self.wo = nn.Linear(q * 4, H, bias=bias)
        self.norm = nn.RMSNorm(4)
        self.moe = Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.norm(self.wq(x).view(batch, length, self.q, self.d)).transpose(1, 2)
        k = self.norm(self.wk(x).view(batch, length, self.kv, self.d)).transpose(1, 2)
        v = self.wv(x).view(batch, length, self.kv, self.d).transpose(1, 2)
        if self.repeat:
            times = self.q // self.kv
            shape = (batch, self.kv, times, length, self.d)
            k = k[:, :, None].expand(shape).reshape(batch, self.q, length, self.d)
            v = v[:, :, None].expand(shape).reshape(batch, self.q, length, self.d)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.repeat)
        x = x + self.wo(a.transpose(1, 2).reshape(batch, length, self.q * self.d))
        return x + self.moe(x.reshape(-1, H)).view_as(x)


class Fused(Layer):
    """Query, key and value from one linear."""

    def __init__(self, kv: int = 8, *, bias: bool = False) -> None:
        super().__init__(kv=kv)
        self.sizes = [self.q * 4, kv * 4, kv * 4]
        self.wqkv = nn.Linear(H, sum(self.sizes), bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        fused = self.wqkv(x)
        parts = fused.chunk(3, -1) if self.kv == self.q else fused.split(self.sizes, dim=-1)
        q, k, v = (t.view(batch, length, -1, 4).transpose(1, 2) for t in parts)
        a = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + self.wo(a.transpose(1, 2).reshape(batch, length, self.q * self.d))
        return x + self.moe(x.reshape(-1, H)).view_as(x)


class SideBySide(Fused):
    """Every head's query, key and value lie side by side: one cut by heads serves all three."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.wqkv(x).view(batch, length, 8, 12).transpose(1, 2).chunk(3, -1)
        a = F.scaled_dot_product_attention(q, k, v)
        x = x + self.wo(a.transpose(1, 2).reshape(batch, length, self.q * self.d))
        return x + self.moe(x.reshape(-1, H)).view_as(x)


class LatentAttention(Layer):
    """Keys and values from a low-rank latent; the rotary part of the keys is one for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(H, 12 + 4, bias=False)
        self.query = nn.Linear(H, 8 * 8, bias=False)
        self.expand = nn.Linear(12, 8 * (4 + 6), bias=False)
        self.out = nn.Linear(8 * 6, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.query(x).view(batch, length, 8, 8).transpose(1, 2)
        latent, rotary = self.down(x).split([12, 4], dim=-1)
        rotary = rotary.view(batch, 1, length, 4).expand(batch, 8, length, 4)
        parts = self.expand(F.rms_norm(latent, (12,))).view(batch, length, 8, 10).transpose(1, 2)
        k, v = parts.split([4, 6], dim=-1)
        a = F.scaled_dot_product_attention(q, torch.cat((k, rotary), -1), v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(batch, length, 48))
        return x + self.moe(x.reshape(-1, H)).view_as(x)


class DenseAndHead(nn.Module):
    """A language model without attention: embedding, MLP, experts beside a shared expert, head."""

    def __init__(
        self,
        *,
        bias: bool = False,
        fused: bool = False,
        width: int = 24,
        vocab: int = 64,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, H)
        self.fused, self.moe = fused, Experts()
        self.up = nn.ModuleList(nn.Linear(H, 2 * width, bias=bias) for _ in range(2))
        self.gate = nn.ModuleList(nn.Linear(H, width, bias=bias) for _ in range(2))
        self.plain = nn.ModuleList(nn.Linear(H, width, bias=bias) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(width, H, bias=bias) for _ in range(2))
        self.head = nn.Linear(H, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def mlp(self, x: Tensor, index: int) -> Tensor:
        if self.fused:
            gate, up = self.up[index](x).chunk(2, dim=-1)
        else:
            gate, up = self.gate[index](x), self.plain[index](x)
        return self.down[index](F.silu(gate) * up)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.mlp(F.rms_norm(x, (H,)), 0)
        y = F.rms_norm(x, (H,))
        x = x + (self.moe(y.reshape(-1, H)).view_as(x) + 0.5 * self.mlp(y, 1))
        return self.head(F.rms_norm(x, (H,)))


class CausalLM(nn.Module):
    """A small model of transformers with two layers, by its name there."""

    def __init__(self, name: str, **sizes: Any) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        sizes = {
            "vocab_size": 64,
            "hidden_size": H,
            "moe_intermediate_size": 16,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            **sizes,
        }
        config = getattr(transformers, f"{name}Config")(**sizes)
        self.model = getattr(transformers, f"{name}ForCausalLM")(config).eval()

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=False).logits


def qwen3(**sizes: Any) -> CausalLM:
    return CausalLM("Qwen3Moe", num_experts=8, head_dim=8, norm_topk_prob=True, **sizes)


def qwen2(**sizes: Any) -> CausalLM:
    """With a shared expert behind a gate, a dense first layer, and biases of q, k and v."""
    sizes = {"shared_expert_intermediate_size": 24, "mlp_only_layers": [0], **sizes}
    return CausalLM("Qwen2Moe", num_experts=8, intermediate_size=48, **sizes)


def deepseek_v3() -> CausalLM:
    """Latent attention whose keys are written part by part, a dense first layer, a shared expert."""
    return CausalLM(
        "DeepseekV3",
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        intermediate_size=48,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )


def with_ops(model: nn.Module, x: Tensor) -> tuple[fx.GraphModule, list[Any], set[str]]:
    """The graph of a call with its MoE blocks as ops, the real inputs, and the names of its weights."""

    def edit(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        names.update(n.name for n in find_parameters(gm, example_inputs))
        real.extend(n.meta["grapharg"].example for n in gm.graph.nodes if n.op == "placeholder")
        found = find_regions(gm, example_inputs)
        assert found.matches, found.refused
        for block in found.matches:
            router = RouterSpec(
                score=Score.EXTERNAL,
                top_k=block.region.top_k,
                num_experts=block.region.experts.num_experts,
            )
            plan = MoEPlan(router=router, experts=block.region.experts)
            replace_region(gm, block, plan, flow=found.flow)
        gm.recompile()

    names: set[str] = set()
    real: list[Any] = []
    with torch.no_grad():
        graphs, _ = capture(model, x, edit=edit)
    assert len(graphs) == 1
    return graphs[0][0], real, names


def cut(gm: fx.GraphModule, names: set[str], num_ranks: int, rank: int = 0) -> TensorParallelGraph:
    sums = rank_sums("0", num_ranks)
    return shard_graph(gm, num_ranks=num_ranks, rank=rank, sums=sums, parameters=names)


def run_rank(
    rank: int, num_ranks: int, folder: Path, gm: fx.GraphModule, real: list[Any], names: set[str]
) -> Tensor:
    assert dist.group.WORLD is not None
    assert dist.group.WORLD.group_name == "0"
    graph = cut(gm, names, num_ranks, rank)
    inputs = dict(zip((n.name for n in gm.graph.nodes if n.op == "placeholder"), real, strict=True))
    plan = plan_arena(
        num_ranks=num_ranks, layouts=(Layout.TP,), experts=[layer.blocks for layer in graph.layers]
    )
    arena = Arena(plan, torch.zeros(plan.num_bytes, dtype=torch.uint8))
    with torch.no_grad(), op.plain_torch():
        for index, layer in enumerate(graph.layers):
            spec = layer.plan.experts
            full = [inputs.pop(name) for name in layer.sources]
            for expert in range(spec.num_experts):
                tensors = expert_tensors(spec, full, expert)
                write_expert(arena, Layout.TP, index, rank, expert, spec, tensors)
            views = arena.experts(Layout.TP, index)
            inputs.update(zip(layer.placeholders, views, strict=True))
        local = sliced(inputs, graph)
        order = [n.name for n in graph.gm.graph.nodes if n.op == "placeholder"]
        return graph.gm(*(local[name] for name in order))[0]


MODELS = {
    "gqa": (lambda: Layer(), 2),
    "gqa with biases": (lambda: Layer(bias=True), 2),
    "repeated heads": (lambda: Layer(repeat=True), 2),
    "one kv head": (lambda: Layer(kv=1), 2),
    "one kv head, one token": (lambda: Layer(kv=1, repeat=True), 2),
    "kv heads fewer than ranks": (lambda: Layer(), 4),
    "repeated kv heads fewer than ranks": (lambda: Layer(repeat=True, bias=True), 4),
    "one fused projection": (Fused, 2),
    "unequal parts of a fused projection": (lambda: Fused(kv=2, bias=True), 2),
    "heads of q, k and v side by side": (SideBySide, 2),
    "mlp": (lambda: DenseAndHead(), 2),
    "mlp with biases": (lambda: DenseAndHead(bias=True), 2),
    "fused mlp": (lambda: DenseAndHead(fused=True, bias=True), 4),
    "mlp of a width that the ranks do not divide": (lambda: DenseAndHead(width=25, vocab=65), 2),
    "head tied to the embedding": (lambda: DenseAndHead(tied=True), 2),
    "qwen3": (qwen3, 2),
    "qwen3, kv heads fewer than ranks": (qwen3, 4),
    "qwen2, shared expert": (qwen2, 2),
    "deepseek v3": (deepseek_v3, 2),
    "latent attention": (LatentAttention, 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_ranks_compute_what_the_model_computes(tmp_path: Path, name: str) -> None:
    build, num_ranks = MODELS[name]
    model = build()
    takes_ids = isinstance(model, (CausalLM, DenseAndHead))
    x = torch.randint(0, 64, (2, 5)) if takes_ids else torch.randn(2, 5, H)
    x = x[:1, :1] if "one token" in name else x
    with torch.no_grad():
        expected = model(x)
    gm, real, names = with_ops(model, x)
    ranks = run_ranks(run_rank, num_ranks, tmp_path, gm, real, names)
    for found in ranks:
        assert torch.equal(found, ranks[0])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_source_graph_stays_and_every_cut_weight_is_a_slice() -> None:
    gm, _, names = with_ops(Layer(), torch.randn(2, 5, H))
    before = gm.code
    graph = cut(gm, names, 4, rank=3)
    assert gm.code == before
    pieces = {s.placeholder.split("_modules_")[1].split("_")[0]: s for s in graph.slices}
    assert {name: (s.axis, s.start, s.length) for name, s in pieces.items()} == {
        "wq": (0, 24, 8),
        "wk": (0, 4, 4),
        "wv": (0, 4, 4),
        "wo": (1, 24, 8),
    }
    assert graph.layers[0].blocks.width == 2


def all_reduces(graph: TensorParallelGraph) -> int:
    return sum("all_reduce" in str(n.target) for n in graph.gm.graph.nodes)


def test_a_shared_expert_and_the_experts_are_summed_at_once() -> None:
    gm, _, names = with_ops(DenseAndHead(), torch.randint(0, 64, (2, 5)))
    assert all_reduces(cut(gm, names, 2)) == 2  # the MLP's; both experts'
    gm, _, names = with_ops(DenseAndHead(bias=True), torch.randint(0, 64, (2, 5)))
    assert all_reduces(cut(gm, names, 2)) == 3  # a bias comes behind its own sum


def test_a_tied_head_is_cut_and_its_embedding_is_not() -> None:
    gm, _, names = with_ops(DenseAndHead(tied=True), torch.randint(0, 64, (2, 5)))
    graph = cut(gm, names, 2, rank=1)
    (head,) = [p for p in graph.slices if p.start == 32 and p.length == 32]
    assert head.placeholder != head.source
    inputs = {n.name: n for n in graph.gm.graph.nodes if n.op == "placeholder"}
    assert {str(n.target.__name__) for n in inputs[head.source].users} == {"embedding"}  # type: ignore[union-attr]


def test_what_stays_whole_is_said() -> None:
    gm, _, names = with_ops(DenseAndHead(width=25, vocab=65), torch.randint(0, 64, (2, 5)))
    graph = cut(gm, names, 2)
    assert not graph.slices
    reasons = " | ".join(graph.whole)
    assert reasons.count("the MLP of") == 2
    assert "25 columns, 2 ranks" in reasons
    assert "the head" in reasons


@pytest.mark.parametrize("build", [qwen3, qwen2, deepseek_v3])
def test_cuts_what_the_model_s_own_plan_cuts(build: Callable[[], CausalLM]) -> None:
    """Structure finds every linear that `tp_plan` of transformers names column- or row-wise."""
    model = build()
    plan = {**model.model.model.config.base_model_tp_plan, "lm_head": "colwise"}
    gm, _, names = with_ops(model, torch.randint(0, 64, (2, 5)))
    graph = cut(gm, names, 2)
    found = {
        piece.source.removeprefix("l_self_").removesuffix("_parameters_weight_"): piece.axis
        for piece in graph.slices
        if "weight" in piece.source
    }
    wanted = {}
    for name, module in model.named_modules():
        key = re.sub(r"\.\d+\.", ".*.", name.removeprefix("model.model."))
        way = plan.get(key.removeprefix("model."), "")
        if isinstance(module, nn.Linear) and way.startswith(("colwise", "rowwise")):
            wanted["_".join(f"modules_{part}" for part in name.split("."))] = int(way[0] == "r")
    assert len(wanted) >= 9
    assert wanted.items() <= found.items()


class MixesHeads(Layer):
    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            w(x).view(batch, length, 8, 4).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        a = F.scaled_dot_product_attention(q.softmax(1), k, v)
        x = x + self.wo(a.transpose(1, 2).reshape(batch, length, self.q * self.d))
        return x + self.moe(x.reshape(-1, H)).view_as(x)


class ScalesHeads(Layer):
    """A parameter with a value for every head is whole where the heads are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, 8, 4).transpose(1, 2) * self.scale
        k, v = (w(x).view(batch, length, 2, 4).transpose(1, 2) for w in (self.wk, self.wv))
        a = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + self.wo(a.transpose(1, 2).reshape(batch, length, self.q * self.d))
        return x + self.moe(x.reshape(-1, H)).view_as(x)


REFUSED = {
    "heads that the ranks do not divide": (lambda: Layer(q=6, kv=6), 4, "6 heads"),
    "kv heads that no groups of ranks hold": (lambda: Layer(q=12, kv=4), 6, "4 heads"),
    "an expert width that the ranks do not divide": (lambda: Layer(width=9), 2, "I = 9"),
    "a softmax over the heads": (lambda: MixesHeads(kv=8), 2, "along the axis that is cut"),
    "a value for every head": (ScalesHeads, 2, "with the whole"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_says_why(name: str) -> None:
    build, num_ranks, reason = REFUSED[name]
    gm, _, names = with_ops(build(), torch.randn(2, 5, H))
    with pytest.raises(ShardError, match=reason):
        cut(gm, names, num_ranks)
