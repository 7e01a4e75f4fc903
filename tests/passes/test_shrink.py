"""Whatever sizes coincide, a choice of small sizes runs to the right shape or is refused."""

from __future__ import annotations

import math

import pytest
import torch

from moe_compiler.passes import match_moe
from moe_compiler.passes.candidates import Candidate
from moe_compiler.passes.expert_run import ExpertRun, random_case, random_tensors
from moe_compiler.passes.operands import NoSpecError
from moe_compiler.passes.shrink import SMALL_TOKENS, candidate_sizes
from moe_compiler.passes.subgraph import SliceError
from tests.passes import graphs
from tests.passes.test_match_moe import Small


class Rows(Small):
    """[B, S, H] in and out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)


SIZES = {
    "T = H": (96, 96, 70, 6),
    "H = I": (70, 96, 96, 6),
    "T K = 2 I": (80, 72, 80, 6),
    "T = I": (80, 72, 80, 7),
    "H = 2 I": (66, 144, 72, 6),
    "E = T": (72, 80, 66, 72),
    "E = H": (66, 72, 80, 72),
    "K = small": (2, 72, 66, 6),
    "odd": (71, 67, 73, 5),
    "divisors": (256, 128, 192, 8),
    "tiny": (3, 12, 10, 6),
    "B = 4, S = 32": ((4, 32), 80, 72, 6),
    "B = 32, S = 4": ((32, 4), 80, 72, 6),
    "B = 2, S = H": ((2, 80), 80, 72, 6),
}


def candidate(
    monkeypatch: pytest.MonkeyPatch, module: torch.nn.Module, x: torch.Tensor, dynamic: bool
) -> Candidate:
    seen: list[Candidate] = []

    def keep(found: Candidate, **_: str) -> None:
        seen.append(found)
        raise NoSpecError("only looking")

    monkeypatch.setattr(match_moe, "prove_region", keep)
    graphs.match(module, x, dynamic=dynamic)
    return seen[0]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", list(SIZES))
def test_every_choice_runs_or_is_refused(
    name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, hidden, inter, experts = SIZES[name]
    leading = rows if isinstance(rows, tuple) else (rows,)
    found = candidate(
        monkeypatch, Rows(hidden, experts, inter), torch.randn(*leading, hidden), dynamic
    )
    choices = list(candidate_sizes(found.part, x=found.x, ids=found.ids, operands=found.operands))
    assert choices[-1].literals == {}
    num_run = 0
    for sizes in choices:
        run = ExpertRun(
            found.part,
            x=found.x,
            ids=found.ids,
            weights=found.weights,
            dense=found.dense,
            operands=found.operands,
            sizes=sizes,
        )
        generator = torch.Generator().manual_seed(0)
        try:
            out = run(*random_case(run, generator, scale=1.0), random_tensors(run, generator))
        except SliceError:
            assert sizes.literals, "the sizes as they are must run"
            continue
        num_run += 1
        assert out.shape == (run.num_tokens, run.hidden)
        assert bool(out.isfinite().all())
        assert (run.top_k, run.operands.num_experts) == (2, experts)
        if dynamic and hidden not in leading:  # Dynamo takes an axis as long as H for static
            assert run.num_tokens <= 2 * SMALL_TOKENS
        elif not dynamic and not sizes.literals:
            assert (run.num_tokens, run.hidden) == (math.prod(leading), hidden)
    assert num_run


def test_sizes_that_are_all_different_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    found = candidate(monkeypatch, Small(136, 6, 200), torch.randn(300, 136), False)
    first = next(candidate_sizes(found.part, x=found.x, ids=found.ids, operands=found.operands))
    assert first.shape(found.x) == (SMALL_TOKENS, 40)
    assert first.shape(found.operands.down[0]) == (6, 40, 36)
