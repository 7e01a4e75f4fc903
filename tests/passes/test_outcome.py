"""A proof that was stored comes back as it was, and a damaged one is made again."""

from __future__ import annotations

import pytest

from moe_compiler.ir import (
    ActivationKind,
    ActivationSpec,
    ExpertSpec,
    GateLayout,
    Proof,
    RouterSpec,
    Score,
)
from moe_compiler.passes.outcome import Outcome, ProofMemory
from moe_compiler.runtime.proof_cache import ProofFiles

SPEC = ExpertSpec(
    num_experts=8,
    hidden=40,
    intermediate=36,
    gate_layout=GateLayout.INTERLEAVED,
    activation=ActivationSpec(kind=ActivationKind.SILU, alpha=1.702, gate_max=7.0, up_shift=1.0),
)
PROOF = Proof(max_error=3e-16, num_runs=17, precision="fp64", seconds=0.25, peak_bytes=4096)
ROUTER = RouterSpec(score=Score.SIGMOID, top_k=4, num_experts=8, has_bias=True, scale=2.5)

OUTCOMES = [
    Outcome(spec=SPEC, swapped=True, router=ROUTER, router_note="", proof=PROOF),
    Outcome(spec=SPEC, swapped=False, router=None, router_note="unknown score", proof=PROOF),
    Outcome(spec=None, swapped=False, router=None, router_note="", proof=PROOF, reason="no sum"),
]


@pytest.mark.parametrize("outcome", OUTCOMES, ids=["proven", "router unknown", "refused"])
def test_round_trip(outcome: Outcome) -> None:
    assert Outcome.from_text(outcome.to_text()) == outcome


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"plan": 3}', OUTCOMES[0].to_text()[:200]]
)
def test_damaged_text_is_no_outcome(text: str) -> None:
    assert Outcome.from_text(text) is None


def test_another_process_finds_the_proof(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFLEX_CACHE_DIR", str(tmp_path))
    first, second, other = ProofMemory(), ProofMemory(), ProofMemory()
    first.store = second.store = ProofFiles("v1")
    other.store = ProofFiles("v2")
    first.put("key", OUTCOMES[0])
    found = second.get("key")
    assert found is not None
    assert found.proof.reused
    assert found.proof.seconds == 0.0
    assert (found.spec, found.router, found.swapped) == (SPEC, ROUTER, True)
    assert second.get("another key") is None
    assert other.get("key") is None  # another version of the sources proves again
    for path in (tmp_path / "proofs").iterdir():
        path.write_text(path.read_text()[:50])
    third = ProofMemory()
    third.store = ProofFiles("v1")
    assert third.get("key") is None


def test_cache_that_cannot_be_written_is_no_error(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "proofs"
    blocked.write_text("a file where the folder should be")
    monkeypatch.setenv("MOEFLEX_CACHE_DIR", str(tmp_path))
    store = ProofFiles("v1")
    store.save("key", "text")
    assert store.load("key") is None
