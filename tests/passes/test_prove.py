"""A proof is bounded, made once, sees rounding, and what cannot be cut out is left whole."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moe_compiler.ir import MoEPlan, RouterSpec, Score
from moe_compiler.passes import expert_run, prove
from moe_compiler.passes.match_moe import MatchResult, find_regions
from moe_compiler.passes.replace import ReplaceError, replace_region
from tests.models import styles
from tests.passes import graphs
from tests.passes.test_match_moe import Small

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _nothing_is_proven() -> Iterator[None]:
    prove.clear_proofs()
    yield
    prove.clear_proofs()


def refusal(result: MatchResult) -> str:
    assert not result.matches
    (found,) = result.refused
    return found.reason


@pytest.mark.parametrize("limit", ["MAX_PROOF_BYTES", "MAX_PROOF_FLOP"])
def test_proof_that_is_too_large_is_refused_with_the_numbers(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_run, limit, 100)
    reason = refusal(graphs.match(Small(12, 6, 10), torch.randn(9, 12)))
    assert re.search(r"would need \d+\.\d GiB and \d+ GFLOP.*dynamic=True", reason), reason


def test_large_sizes_are_proven_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_run, "MAX_PROOF_BYTES", 8 << 20)
    (block,) = graphs.match(Small(256, 8, 200), torch.randn(300, 256)).matches
    assert 0 < block.region.proof.peak_bytes <= 8 << 20


PEAK = """
    import resource
    import torch
    from moe_compiler.passes.match_moe import find_regions
    from tests.models import styles
    from tests.passes import graphs

    class Quiet(styles.GroupedSigmoidScoreAfter):
        def draw(self, *shape):
            return torch.empty(*shape, dtype=self._dtype)

    def captured(tokens, **sizes):
        with torch.device("meta"), torch.no_grad():
            module = Quiet(dtype=torch.bfloat16, **sizes)
            x = torch.empty(tokens, sizes["hidden"], dtype=torch.bfloat16)
            (graph,), _ = graphs.capture(module, x)
        return graph

    def match(graph):
        (block,) = find_regions(*graph).matches
        return block.region, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    small = captured(7, hidden=64, intermediate=32, num_experts=8, top_k=2)
    large = captured(512, hidden=4096, intermediate=1536, num_experts=128, top_k=8)
    _, before = match(small)
    region, after = match(large)
    experts = region.experts
    print(experts.num_experts, experts.hidden, experts.intermediate, region.top_k, region.form)
    print(after - before)
"""


def test_memory_of_proving_a_large_grouped_block_is_small() -> None:
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PEAK)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    sizes, kilobytes = run.stdout.strip().splitlines()
    assert sizes == "128 4096 1536 8 grouped"
    assert int(kilobytes) < 200 << 10


def test_equal_layers_are_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    proven: list[object] = []
    original = prove._prove
    monkeypatch.setattr(prove, "_prove", lambda c: (proven.append(c), original(c))[1])
    layers = nn.Sequential(*(Small(12, 6, 10) for _ in range(6)), Small(12, 5, 10))
    result = graphs.match(layers, torch.randn(9, 12))
    assert [m.region.proof.reused for m in result.matches] == [False, *[True] * 5, False]
    assert len(proven) == 2


def test_failed_proof_is_remembered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wavy(Small):
        def experts(self, x, weights, ids):
            hidden = torch.sin(torch.einsum("th,tkih->tki", x, self.w1[ids]))
            return torch.einsum("tki,tkhi,tk->th", hidden, self.w2[ids], weights)

    proven: list[object] = []
    original = prove._prove
    monkeypatch.setattr(prove, "_prove", lambda c: (proven.append(c), original(c))[1])
    graph = nn.Sequential(Wavy(), Wavy())
    result = graphs.match(graph, torch.randn(9, 12))
    assert not result.matches
    assert len(result.refused) == 2
    assert len(proven) == len({id(c) for c in proven}) < 2 * len(result.refused)


def test_overflow_in_its_own_dtypes_is_refused() -> None:
    class Overflows(Small):
        def experts(self, x, weights, ids):
            gate = torch.einsum("th,tkih->tki", x, self.w1[ids])
            hidden = F.silu(gate) * torch.einsum("th,tkih->tki", x, self.w3[ids])
            hidden = (hidden * 1e7).half().float() / 1e7  # fine in fp64, infinite in fp16
            return torch.einsum("tki,tkhi,tk->th", hidden, self.w2[ids], weights)

    assert "in its own dtypes" in refusal(graphs.match(Overflows(), torch.randn(9, 12)))


def refused_replacement(module: nn.Module) -> str:
    """The reason why the only block of a module cannot be replaced; the graph must be as it was."""
    with torch.no_grad():
        ((gm, inputs),), _ = graphs.capture(module, torch.randn(9, 12))
    found = find_regions(gm, inputs)
    (block,) = found.matches
    before = gm.graph.python_code("self").src
    external = RouterSpec(score=Score.EXTERNAL, top_k=2)
    plan = MoEPlan(router=external, experts=block.region.experts, out_dtype="fp32")
    with pytest.raises(ReplaceError) as raised:
        replace_region(gm, block, plan, flow=found.flow)
    assert gm.graph.python_code("self").src == before
    assert not found.flow.erased
    assert not found.flow.replaced
    return str(raised.value)


def test_input_that_is_written_while_the_block_runs_is_refused() -> None:
    class Writes(Small):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x.clone()
            _, weights, ids = self.route(y)
            gate = torch.einsum("th,tkih->tki", y, self.w1[ids])
            hidden = F.silu(gate) * torch.einsum("th,tkih->tki", y, self.w3[ids])
            y.add_(1.0)
            return torch.einsum("tki,tkhi,tk->th", hidden, self.w2[ids], weights), y

    assert "is written to while the block runs" in refused_replacement(Writes())


def test_view_of_the_result_that_lives_on_is_refused() -> None:
    class Views(styles.LoopStacked):
        def mix(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ids, weights = self.route(x)
            out = torch.zeros_like(x)
            flat = out.view(-1, self.hidden)
            for number in range(self.num_experts):
                token, slot = torch.where(ids == number)
                hidden = F.silu(x[token] @ self.w1[number].t()) * (x[token] @ self.w3[number].t())
                rows = hidden @ self.w2[number].t()
                flat.index_add_(0, token, rows * weights[token, slot, None])
            return out, flat.square()

        forward = mix

    assert "looks at the result's memory after the block" in refused_replacement(Views(hidden=12))


def test_erased_nodes_are_those_of_the_block() -> None:
    with torch.no_grad():
        ((gm, inputs),), _ = graphs.capture(
            nn.Sequential(Small(), nn.LayerNorm(12), Small()), torch.randn(9, 12)
        )
    found = find_regions(gm, inputs)
    for block in found.matches:
        plan = MoEPlan(router=block.region.router, experts=block.region.experts, out_dtype="fp32")
        replace_region(gm, block, plan, flow=found.flow, absorb_router=True)
    gm.graph.lint()
    left = set(gm.graph.nodes)
    assert not found.flow.erased & left
    assert found.flow.erased <= {n for m in found.matches for n in m.nodes}
    dead = [n for n in left if not n.users and n.op not in ("output", "placeholder")]
    assert dead == []


def test_result_that_is_a_part_of_a_larger_tensor_is_refused() -> None:
    class Part(styles.LoopStacked):
        def __init__(self) -> None:
            super().__init__(hidden=12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ids, weights = self.route(x)
            both = torch.zeros(2, *x.shape)
            out = both[0]
            for e in range(self.num_experts):
                token, slot = torch.where(ids == e)
                rows = x[token]
                hidden = F.silu(F.linear(rows, self.w1[e])) * F.linear(rows, self.w3[e])
                rows = F.linear(hidden, self.w2[e]) * weights[token, slot, None]
                out.index_add_(0, token, rows)
            both[1] += 1
            return both

    assert "looks at the result's memory" in refused_replacement(Part())
