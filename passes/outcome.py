"""What is remembered of a proof, so that an equal block is not proven again: in this process, and beyond it.

The key of a proof covers the operators, literals, shapes and dtypes of the slices that were run, the versions of
torch and of this package's sources. A stored proof that cannot be read is made again.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from typing import Protocol

from moe_compiler.errors import PlanError
from moe_compiler.ir import ExpertSpec, MoEPlan, Proof, RouterSpec, Score


class ProofStore(Protocol):
    """Keeps short texts beyond the process; neither method raises."""

    def load(self, key: str) -> str | None:
        """The text saved under this key, or None."""

    def save(self, key: str, text: str) -> None:
        """Save a text under this key."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of proving a candidate.

    Attributes:
        spec: what the experts compute, in the sizes of the run; None when nothing could be proven.
        swapped: gate and up are separate tensors and came up first.
        router: the proven router, or None.
        router_note: why the router stays in the graph, or "".
        proof: how it was proven.
        reason: why there is no spec, or "".
    """

    spec: ExpertSpec | None
    swapped: bool
    router: RouterSpec | None
    router_note: str
    proof: Proof
    reason: str = ""

    def to_text(self) -> str:
        """As text, for `from_text`."""
        external = RouterSpec(score=Score.EXTERNAL, top_k=1)
        plan = self.spec and MoEPlan(router=self.router or external, experts=self.spec).key
        return json.dumps(
            {
                "plan": plan,
                "swapped": self.swapped,
                "router_note": self.router_note,
                "proof": dataclasses.asdict(self.proof),
                "reason": self.reason,
            },
            sort_keys=True,
        )

    @staticmethod
    def from_text(text: str) -> Outcome | None:
        """Read an outcome back; None when the text is none (of this version)."""
        try:
            fields = json.loads(text)
            plan = None if fields["plan"] is None else MoEPlan.from_key(fields["plan"])
            external = plan is None or plan.router.score is Score.EXTERNAL
            return Outcome(
                spec=None if plan is None else plan.experts,
                swapped=bool(fields["swapped"]),
                router=None if external or plan is None else plan.router,
                router_note=str(fields["router_note"]),
                proof=Proof(**fields["proof"]),
                reason=str(fields["reason"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, PlanError):
            return None


class ProofMemory:
    """Outcomes by key: those of this process, then those of a store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Outcome] = {}
        self.store: ProofStore | None = None

    def get(self, key: str) -> Outcome | None:
        """The outcome of an equal block, its proof marked as reused; None when there is none."""
        with self._lock:
            found = self._known.get(key)
        if found is None and self.store is not None:
            text = self.store.load(key)
            found = Outcome.from_text(text) if text is not None else None
        if found is None:
            return None
        proof = dataclasses.replace(found.proof, seconds=0.0, reused=True)
        found = dataclasses.replace(found, proof=proof)
        with self._lock:
            self._known[key] = found
        return found

    def put(self, key: str, outcome: Outcome) -> None:
        """Remember an outcome."""
        with self._lock:
            self._known[key] = outcome
        if self.store is not None:
            self.store.save(key, outcome.to_text())

    def clear(self) -> None:
        """Forget what this process has proven; the store stays."""
        with self._lock:
            self._known.clear()
