"""MoE blocks as people write them outside of transformers, and blocks that only look like one.

`STYLES` must match, `LOOPS` cannot be captured as one graph (their results still have to be right),
`LOOKALIKES` must be left alone. Every module takes x [B, S, H] or [T, H] and keeps its shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A router and the sizes; subclasses add experts and `mix`."""

    def __init__(
        self,
        hidden: int = 64,
        intermediate: int = 32,
        num_experts: int = 8,
        top_k: int = 2,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.hidden, self.intermediate = hidden, intermediate
        self.num_experts, self.top_k = num_experts, top_k
        self._dtype, self._generator = dtype, torch.Generator().manual_seed(seed)
        self.gate = nn.Parameter(self.draw(num_experts, hidden))
        self.make_experts()
        del self._generator

    def draw(self, *shape: int) -> Tensor:
        """Seeded normal values scaled by the last axis."""
        values = torch.randn(*shape, generator=self._generator) / math.sqrt(shape[-1])
        return values.to(self._dtype)

    def make_experts(self) -> None:
        """Separate stacked tensors w1 (gate), w3 (up) [E, I, H] and w2 [E, H, I]."""
        e, i, h = self.num_experts, self.intermediate, self.hidden
        self.w1, self.w3 = nn.Parameter(self.draw(e, i, h)), nn.Parameter(self.draw(e, i, h))
        self.w2 = nn.Parameter(self.draw(e, h, i))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """ids and weights [T, K]: softmax, top-k, renormalised."""
        probabilities = F.softmax(F.linear(x, self.gate), dim=-1, dtype=torch.float32)
        weights, ids = torch.topk(probabilities, self.top_k, dim=-1)
        return ids, (weights / weights.sum(-1, keepdim=True)).to(x.dtype)

    def mix(self, x: Tensor) -> Tensor:
        """The block on rows [T, H]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.reshape(-1, self.hidden)).view(x.shape)


class Expert(nn.Module):
    """A gated SiLU MLP."""

    def __init__(self, block: Block, intermediate: int = 0) -> None:
        super().__init__()
        wide = intermediate or block.intermediate
        self.gate_proj = nn.Linear(block.hidden, wide, bias=False, dtype=block._dtype)
        self.up_proj = nn.Linear(block.hidden, wide, bias=False, dtype=block._dtype)
        self.down_proj = nn.Linear(wide, block.hidden, bias=False, dtype=block._dtype)
        for linear in (self.gate_proj, self.up_proj, self.down_proj):
            linear.weight = nn.Parameter(block.draw(*linear.weight.shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ListBlock(Block):
    """Experts in a ModuleList."""

    def make_experts(self) -> None:
        self.experts = nn.ModuleList(Expert(self) for _ in range(self.num_experts))


# --------------------------------------------------------------------------------------- must match


class GatheredEinsum(Block):
    """gpt-fast: the chosen experts' matrices are gathered for each token."""

    def mix(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(F.softmax(F.linear(x, self.gate), dim=-1), self.top_k, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        gate = F.silu(torch.einsum("th,tkih->tki", x, self.w1[ids]))
        up = torch.einsum("th,tkih->tki", x, self.w3[ids])
        rows = torch.einsum("tki,tkhi->tkh", gate * up, self.w2[ids])
        return torch.einsum("tkh,tk->th", rows, weights)


class GroupedSigmoid(Block):
    """torchtitan: sigmoid scores with a selection bias, sort, three grouped GEMMs, scatter_add."""

    score_first = True

    def make_experts(self) -> None:
        super().make_experts()
        self.register_buffer("expert_bias", 0.3 * self.draw(self.num_experts).float())
        self.register_buffer("tokens_per_expert", torch.zeros(self.num_experts), persistent=False)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(F.linear(x, self.gate).float())
        ids = torch.topk(scores + self.expert_bias, k=self.top_k, dim=1).indices
        weights = scores.gather(dim=1, index=ids)
        return ids, weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)

    def mix(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        flat = ids.reshape(-1)
        counts = torch.histc(flat.float(), bins=self.num_experts, min=0, max=self.num_experts)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        order = torch.argsort(flat, stable=True)
        scores, token = weights.reshape(-1)[order].unsqueeze(-1), order // self.top_k
        rows = x[token]
        if self.score_first:
            rows = (rows.float() * scores).to(x.dtype)
        rows = self.experts(rows, torch.cumsum(counts, dim=0, dtype=torch.int32)).to(x.dtype)
        if not self.score_first:
            rows = (rows.float() * scores).to(x.dtype)
        index = token.unsqueeze(-1).expand(-1, self.hidden)
        return torch.zeros_like(x).scatter_add(dim=0, index=index, src=rows)

    def experts(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Grouped GEMMs in bf16, the only dtype that `_grouped_mm` traces in."""
        w1, w2, w3 = (w.bfloat16().transpose(-2, -1) for w in (self.w1, self.w2, self.w3))
        rows = rows.bfloat16()
        hidden = F.silu(torch._grouped_mm(rows, w1, offs=ends))
        hidden = hidden * torch._grouped_mm(rows, w3, offs=ends)
        return torch._grouped_mm(hidden, w2, offs=ends)


class GroupedSigmoidScoreAfter(GroupedSigmoid):
    """The same with the score on the rows that leave the experts."""

    score_first = False


class LoopWhere(ListBlock):
    """A loop over all experts: where, gather, MLP, index_add_."""

    def mix(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            rows = expert(x[token]) * weights[token, slot, None]
            out.index_add_(0, token, rows.to(x.dtype))
        return out


class LoopOneHotMask(ListBlock):
    """The same over a one-hot mask [E, K, T], with the row gather through a new axis."""

    def mix(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        for number in range(self.num_experts):
            slot, token = torch.where(mask[number])
            rows = x[None, token].reshape(-1, self.hidden)
            out.index_add_(0, token, self.experts[number](rows) * weights[token, slot, None])
        return out


class LoopPlusEquals(ListBlock):
    """`out[rows] += ...` where each row appears once an expert; softmax over the chosen logits."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, ids = torch.topk(F.linear(x, self.gate), self.top_k)
        return ids, F.softmax(logits, dim=1, dtype=torch.float32).to(x.dtype)

    def mix(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            out[token] += weights[token, slot, None] * expert(x[token])
        return out


class LoopStacked(Block):
    """A loop over slices of stacked tensors."""

    def mix(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            rows = x[token]
            hidden = F.silu(F.linear(rows, self.w1[e])) * F.linear(rows, self.w3[e])
            rows = F.linear(hidden, self.w2[e]) * weights[token, slot, None]
            out.index_add_(0, token, rows)
        return out


class DenseUnrolled(ListBlock):
    """Every expert on every token, weighted with zero where not chosen."""

    def mix(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = torch.where(ids == number, weights, 0.0).sum(-1, keepdim=True)
            out = out + expert(x) * weight
        return out


class DenseEinsum(Block):
    """All experts by einsum, weighted with a gate [.., E] that is zero where not chosen."""

    def forward(self, x: Tensor) -> Tensor:
        scores = F.softmax(F.linear(x, self.gate), dim=-1)
        weights, ids = torch.topk(scores, self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        gates = torch.zeros_like(scores).scatter(-1, ids, weights)
        up = torch.einsum("...h,eih->...ei", x, self.w3)
        hidden = F.silu(torch.einsum("...h,eih->...ei", x, self.w1)) * up
        return torch.einsum("...ei,ehi,...e->...h", hidden, self.w2, gates)


class DenseBmm(Block):
    """Llama 4: the rows are repeated for all experts, scaled at the input, and go through bmm."""

    def mix(self, x: Tensor) -> Tensor:
        logits, ids = torch.topk(F.linear(x, self.gate), 1, dim=1)
        shape = (x.shape[0], self.num_experts)
        scores = torch.full(shape, -torch.inf, dtype=x.dtype, device=x.device)
        scores = torch.sigmoid(scores.scatter_(1, ids, logits).float()).to(x.dtype)
        rows = x.repeat(self.num_experts, 1) * scores.transpose(0, 1).reshape(-1, 1)
        rows = rows.view(self.num_experts, -1, self.hidden)
        hidden = F.silu(torch.bmm(rows, self.w1.transpose(1, 2)))
        hidden = hidden * torch.bmm(rows, self.w3.transpose(1, 2))
        return torch.bmm(hidden, self.w2.transpose(1, 2)).sum(0)


# ------------------------------------------------------------- cannot be one graph, must stay right


class LoopHitExperts(ListBlock):
    """Iterates the experts that have tokens, a tensor of data-dependent length."""

    def mix(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        for number in mask.sum(dim=(-1, -2)).greater(0).nonzero():
            slot, token = torch.where(mask[number].squeeze(0))
            rows = self.experts[int(number)](x[token]) * weights[token, slot, None]
            out.index_add_(0, token, rows)
        return out


class LoopSkipAny(ListBlock):
    """Skips experts without tokens by asking the mask."""

    def mix(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = ids == number
            rows = chosen.any(-1)
            if rows.any():
                weight = (weights * chosen).sum(-1)[rows]
                out[rows] += expert(x[rows]) * weight[:, None]
        return out


class LoopBincount(ListBlock):
    """DeepSeek's reference code: counts as a Python list."""

    def mix(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        counts = torch.bincount(ids.flatten(), minlength=self.num_experts).tolist()
        for number in range(self.num_experts):
            if counts[number] == 0:
                continue
            token, slot = torch.where(ids == number)
            out[token] += self.experts[number](x[token]) * weights[token, slot, None]
        return out


class LoopSortedSlices(ListBlock):
    """Sorted rows cut by a Python list of counts, then put back in order."""

    def mix(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        order = ids.view(-1).argsort()
        rows, parts, start = x[order // self.top_k], [], 0
        counts = torch.bincount(ids.view(-1), minlength=self.num_experts)
        for number, count in enumerate(counts.tolist()):
            if count:
                parts.append(self.experts[number](rows[start : start + count]))
                start += count
        out = torch.empty_like(rows)
        out[order] = torch.cat(parts)
        return (out.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)


# ----------------------------------------------------------------------------------- must not match


class SwitchCapacity(Block):
    """Top-1 with a capacity: tokens above it are dropped."""

    def mix(self, x: Tensor) -> Tensor:
        num_tokens = x.shape[0]
        capacity = math.ceil(num_tokens * 1.25 / self.num_experts)
        best, ids = F.softmax(F.linear(x, self.gate).float(), -1).max(-1)
        chosen = F.one_hot(ids, self.num_experts)
        place = (torch.cumsum(chosen, 0) - 1) * chosen
        keep = (place < capacity) & (chosen > 0)
        slots = F.one_hot(torch.where(keep, place, 0), capacity).to(x.dtype) * keep.unsqueeze(-1)
        rows = torch.einsum("tec,th->ech", slots, x)
        hidden = F.silu(torch.einsum("ech,eih->eci", rows, self.w1))
        hidden = hidden * torch.einsum("ech,eih->eci", rows, self.w3)
        rows = torch.einsum("eci,ehi->ech", hidden, self.w2)
        return torch.einsum("tec,ech->th", slots * best.to(x.dtype)[:, None, None], rows)


class ScatterOverwrites(Block):
    """`out[token] = rows` with repeated tokens: the last writer wins, nothing is summed."""

    def mix(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        gate = F.silu(torch.einsum("th,tkih->tki", x, self.w1[ids]))
        up = torch.einsum("th,tkih->tki", x, self.w3[ids])
        rows = torch.einsum("tki,tkhi->tkh", gate * up, self.w2[ids]) * weights[..., None]
        token = torch.arange(x.shape[0], device=x.device).repeat_interleave(self.top_k)
        out = torch.zeros_like(x)
        out[token] = rows.reshape(-1, self.hidden)
        return out


class UnequalExperts(ListBlock):
    """The experts have different intermediate sizes."""

    def make_experts(self) -> None:
        sizes = [self.intermediate + 8 * (e % 2) for e in range(self.num_experts)]
        self.experts = nn.ModuleList(Expert(self, size) for size in sizes)

    mix = DenseUnrolled.mix


class IdentityExperts(ListBlock):
    """The router has two more columns than there are experts; those return x itself."""

    def make_experts(self) -> None:
        super().make_experts()
        self.gate = nn.Parameter(self.draw(self.num_experts + 2, self.hidden))

    def mix(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = x * torch.where(ids >= self.num_experts, weights, 0.0).sum(-1, keepdim=True)
        for number, expert in enumerate(self.experts):
            weight = torch.where(ids == number, weights, 0.0).sum(-1, keepdim=True)
            out = out + expert(x) * weight
        return out


class MixedActivations(ListBlock):
    """The last expert uses another activation than the others."""

    def mix(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            f = F.gelu if number == self.num_experts - 1 else F.silu
            rows = expert.down_proj(f(expert.gate_proj(x)) * expert.up_proj(x))
            weight = torch.where(ids == number, weights, 0.0).sum(-1, keepdim=True)
            out = out + rows * weight
        return out


class NormBetween(Block):
    """A norm with statistics over the hidden activations between the two projections."""

    def mix(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        gate = F.silu(torch.einsum("th,tkih->tki", x, self.w1[ids]))
        hidden = gate * torch.einsum("th,tkih->tki", x, self.w3[ids])
        hidden = F.layer_norm(hidden, (self.intermediate,))
        rows = torch.einsum("tki,tkhi->tkh", hidden, self.w2[ids])
        return (rows * weights[..., None]).sum(1)


class TokensTalk(Block):
    """The expert output of a token depends on the mean over all tokens."""

    def mix(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        gate = F.silu(torch.einsum("th,tkih->tki", x, self.w1[ids]))
        hidden = gate * torch.einsum("th,tkih->tki", x, self.w3[ids])
        hidden = hidden - hidden.mean(0, keepdim=True)
        rows = torch.einsum("tki,tkhi->tkh", hidden, self.w2[ids])
        return (rows * weights[..., None]).sum(1)


class TopKWithoutExperts(Block):
    """A lookup in a table: top-k and a gather, no matrix of an expert."""

    def mix(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        table = self.w1[:, 0, :]
        return (table[ids] * weights[..., None]).sum(1)


class SoftMixture(Block):
    """A dense mixture: every expert counts, nothing is selected."""

    def mix(self, x: Tensor) -> Tensor:
        gates = F.softmax(F.linear(x, self.gate), dim=-1)
        hidden = F.silu(torch.einsum("th,eih->tei", x, self.w1))
        hidden = hidden * torch.einsum("th,eih->tei", x, self.w3)
        return torch.einsum("tei,ehi,te->th", hidden, self.w2, gates)


# ------------ the experts match, the router is none that we know: ids and weights stay in the graph


class LearnedTemperature(GatheredEinsum):
    """Softmax over the chosen logits divided by a learned temperature of each expert."""

    def make_experts(self) -> None:
        super().make_experts()
        self.temperature = nn.Parameter(1.0 + 0.5 * self.draw(self.num_experts).abs())

    def mix(self, x: Tensor) -> Tensor:
        logits, ids = torch.topk(F.linear(x, self.gate), self.top_k)
        weights = F.softmax(logits / self.temperature[ids], dim=-1)
        return self.gathered(x, ids, weights)

    def gathered(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The experts of the gathered form."""
        gate = F.silu(torch.einsum("th,tkih->tki", x, self.w1[ids]))
        up = torch.einsum("th,tkih->tki", x, self.w3[ids])
        rows = torch.einsum("tki,tkhi->tkh", gate * up, self.w2[ids])
        return (rows * weights[..., None]).sum(1)


class TanhScores(LearnedTemperature):
    """A score function that no published router uses."""

    def mix(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(torch.tanh(F.linear(x, self.gate)) + 1.5, self.top_k)
        return self.gathered(x, ids, weights / weights.square().sum(-1, keepdim=True).sqrt())


STYLES: dict[str, Callable[..., Block]] = {
    "gathered_einsum": GatheredEinsum,
    "grouped_score_before": GroupedSigmoid,
    "grouped_score_after": GroupedSigmoidScoreAfter,
    "loop_where": LoopWhere,
    "loop_one_hot_mask": LoopOneHotMask,
    "loop_plus_equals": LoopPlusEquals,
    "loop_stacked": LoopStacked,
    "dense_unrolled": DenseUnrolled,
    "dense_einsum": DenseEinsum,
    "dense_bmm": DenseBmm,
}
LOOPS: dict[str, Callable[..., Block]] = {
    "loop_hit_experts": LoopHitExperts,
    "loop_skip_any": LoopSkipAny,
    "loop_bincount": LoopBincount,
    "loop_sorted_slices": LoopSortedSlices,
}
LOOKALIKES: dict[str, Callable[..., Block]] = {
    "switch_capacity": SwitchCapacity,
    "scatter_overwrites": ScatterOverwrites,
    "unequal_experts": UnequalExperts,
    "identity_experts": IdentityExperts,
    "mixed_activations": MixedActivations,
    "norm_between": NormBetween,
    "tokens_talk": TokensTalk,
    "topk_without_experts": TopKWithoutExperts,
    "soft_mixture": SoftMixture,
}
UNKNOWN_ROUTERS: dict[str, Callable[..., Block]] = {
    "learned_temperature": LearnedTemperature,
    "tanh_scores": TanhScores,
}


def rows(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Seeded normal input; (2, 17, 64) by default."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (2, 17, 64)), generator=generator).to(dtype)


def build(name: str, **sizes: Any) -> Block:
    """A block of any of the groups above, in eval mode."""
    for group in (STYLES, LOOPS, LOOKALIKES, UNKNOWN_ROUTERS):
        if name in group:
            return group[name](**sizes).eval()
    raise KeyError(name)
