"""Tests of the passes stand alone: no stored proofs, and the op in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_compiler.passes import prove
from moe_compiler.runtime import op


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    store = prove._memory.store
    prove.remember_in(None)
    prove.clear_proofs()
    with op.plain_torch():
        yield
    prove.remember_in(store)
