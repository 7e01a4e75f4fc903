"""The scheduler header: decode over random problems, and whole layers emulated on 1 to 3 ranks over several calls."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_compiler.runtime.schedule_twin import Problem

HERE = Path(__file__).resolve().parent
EMULATOR = HERE.parents[1] / "templates" / "emulator.cpp"


def test_decode_is_a_topological_bijection(compile_cpp: Any) -> None:
    """10^5 random problems, up to 512 experts, empty experts, one token, all tokens to one expert."""
    program = compile_cpp(HERE / "schedule_test.cpp", "-O2", "-Wall", "-Wextra", "-Werror")
    done = subprocess.run([program, "100000"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("ok 100000 problems")


@pytest.fixture(scope="module")
def emulator(compile_cpp: Any) -> ctypes.CDLL:
    """The emulator as a library."""
    return ctypes.CDLL(str(compile_cpp(EMULATOR, "-O2", "-shared", "-fPIC", "-pthread")))


class Emulation(ctypes.Structure):
    """`Emulation` of the emulator."""

    _fields_ = [
        ("problem", Problem),
        *((name, ctypes.c_int) for name in ("num_model_experts", "num_steal_tiles", "roles", "num_calls", "seed")),
    ]  # fmt: skip


def _random_problem(rng: np.random.Generator) -> Problem:
    world = int(rng.integers(1, 4))
    heights = [(4, 2, 1, 1), (8, 4, 4, 4), (3, 3, 3, 3)][rng.integers(3)]
    dispatches = world > 1 or bool(rng.integers(2))
    num_blocks = int(rng.integers(2, 6))
    return Problem(
        num_tokens=int(rng.integers(1, 20)),
        top_k=int(rng.integers(1, 4)),
        num_experts=int(rng.integers(2, 6)),
        hidden=int(rng.integers(1, 50)),
        intermediate=int(rng.integers(1, 40)),
        num_heights=int(rng.integers(1, 4)),
        heights=(ctypes.c_int * 4)(*heights),
        row_align=int(rng.choice([1, 4])),
        gemm0_cols=16,
        gemm1_cols=16,
        chunk_tiles=int(rng.integers(0, 4)),
        combine_tokens=0 if dispatches else int(rng.integers(1, 5)),
        arrivals=1,
        world=world,
        rank=0,
        num_blocks=num_blocks,
        # up to all of them: the serial schedule
        num_comm_blocks=int(rng.integers(1, num_blocks + 1)) if dispatches else 0,
    )


def _reference(p: Problem, x: Any, ids: Any, weights: Any, w13: Any, w2: Any, experts: int) -> Any:
    out = np.zeros(x.shape, np.float64)
    for token in range(len(x)):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            if 0 <= expert < experts:
                both = w13[expert].astype(np.float64) @ x[token]
                gate, up = both[: p.intermediate], both[p.intermediate :]
                out[token] += weight * (w2[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize("seed", range(300))
def test_emulated_layers_agree_with_the_reference(emulator: ctypes.CDLL, seed: int) -> None:
    """Three calls on the same segments, ranks with tokens of their own number, down to none.

    Roles merged and split; any number of comm blocks and any steal window; experts that ranks do not divide; invalid
    and repeated ids; jittered threads.
    """
    rng = np.random.default_rng(seed)
    p = _random_problem(rng)
    places = p.world * p.num_experts
    experts = places - int(rng.integers(p.num_experts)) if p.world > 1 else places
    run = Emulation(p, experts, int(rng.integers(40)), 1 + seed % 2, 3, seed)
    num_tokens = rng.integers(0, p.num_tokens + 1, (run.num_calls, p.world)).astype(np.int32)
    total = int(num_tokens.sum())
    x = rng.standard_normal((total, p.hidden)).astype(np.float32)
    weights = rng.random((total, p.top_k)).astype(np.float32)
    if seed % 5 == 0:
        ids = np.full((total, p.top_k), experts - 1, np.int32)
    else:
        ids = rng.integers(-1, places + 1, (total, p.top_k)).astype(np.int32)
    w13 = rng.standard_normal((places, 2 * p.intermediate, p.hidden)).astype(np.float32)
    w2 = rng.standard_normal((places, p.hidden, p.intermediate)).astype(np.float32)
    w13 /= np.sqrt(p.hidden)
    w13[experts:] = w2[experts:] = np.nan
    out = np.full(x.shape, np.nan, np.float32)
    arrays = [
        a.ctypes.data_as(ctypes.c_void_p) for a in (num_tokens, x, ids, weights, w13, w2, out)
    ]
    assert emulator.moeflex_emulate(ctypes.byref(run), *arrays) == 0
    expected = _reference(p, x, ids, weights, w13, w2, experts)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("flag", "clean"),
    [
        ("", True),
        ("-DMOEFLEX_BUG_RELEASE", False),
        ("-DMOEFLEX_BUG_READY", False),
        ("-DMOEFLEX_BUG_HOME", False),
        ("-DMOEFLEX_BUG_ORDER", False),
        ("-DMOEFLEX_BUG_IDS", False),
    ],
    ids=[
        "as it is", "no release", "arrivals are not released", "results are not released",
        "published before written", "one copy of ids",
    ],
)  # fmt: skip
def test_thread_sanitizer(compile_cpp: Any, flag: str, clean: bool) -> None:
    """No race as it is; every seeded fault is found."""
    flags = ["-O1", "-g", "-fsanitize=thread", "-DMOEFLEX_EMULATOR_MAIN", "-pthread"]
    program = compile_cpp(EMULATOR, *flags, *([flag] if flag else []))
    env = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run([program, "20"], capture_output=True, text=True, check=False, env=env)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run under this kernel's address layout")
    raced = "data race" in done.stderr
    assert raced != clean, done.stderr[-3000:]
