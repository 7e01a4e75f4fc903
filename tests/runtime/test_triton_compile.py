"""The Triton kernels compile, without a GPU, for every GPU they are meant for."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_compiler.codegen import triton as codegen
from moe_compiler.codegen.triton import TritonTile, choose_config
from moe_compiler.runtime import triton_router
from tests.runtime.triton_cases import LAYERS

needs_triton = pytest.mark.skipif(
    bool(triton_router.missing()), reason=triton_router.missing() or "Triton is here"
)
# Shared memory of a block in bytes: CUDA C++ programming guide, table of compute capabilities.
SHARED_BYTES = {80: 166912, 89: 101376, 90: 232448, 100: 232448}


def compile_all(cache: Path, *arguments: str) -> list[dict[str, object]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", "tests.runtime.triton_ahead", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(rows: list[dict[str, object]]) -> None:
    assert {row["sm"] for row in rows} == set(SHARED_BYTES)
    for row in rows:
        assert row["shared"] <= SHARED_BYTES[row["sm"]], row
        assert row["cubin_bytes"] > 0
        products = row["kernel"] in ("moeflex_gate_up", "moeflex_down")
        assert row["mma"] == (products and not row["case"].startswith("fp32")), row
        if products and row["case"].startswith(("gpt-oss", "qwen3")):
            # Both operands, in every stage of the ring: else Triton did not see that rows are aligned.
            assert row["copies"] >= 24, row


@needs_triton
def test_one_router_and_one_layer_for_every_gpu(tmp_path: Path) -> None:
    check(compile_all(tmp_path, "--few"))


@needs_triton
@pytest.mark.slow
def test_every_router_and_every_kind_of_layer(tmp_path: Path) -> None:
    check(compile_all(tmp_path))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_tiles_fit_and_agree(capability: tuple[int, int], dtype: str) -> None:
    for name in ("qwen3-30b", "gpt-oss", "relu2-plain"):
        for num_tokens in (1, 16, 64, 256, 2048, 8192):
            config = choose_config(LAYERS[name].plan, num_tokens, dtype, capability)
            assert config.gate_up.block_m == config.down.block_m
            first = 2 if LAYERS[name].plan.experts.gated else 1
            for tile, products in ((config.gate_up, first), (config.down, 1)):
                limit = codegen._SHARED_BYTES.get(capability, codegen._SMALLEST_SHARED_BYTES)
                assert tile.shared_bytes(products, dtype) <= limit
                assert tile.num_stages >= 2 and tile.block_k >= 32


def test_batch_invariance_has_one_tile() -> None:
    plan = dataclasses.replace(LAYERS["qwen3-30b"].plan, batch_invariant=True)
    found = [choose_config(plan, t, "bf16", (9, 0)) for t in (1, 64, 4096)]
    assert len({(config.gate_up, config.down) for config in found}) == 1


def test_shared_bytes_count_both_operands() -> None:
    tile = TritonTile(block_m=64, block_n=128, block_k=32, group=8, num_warps=4, num_stages=3)
    assert tile.shared_bytes(1, "bf16") == 3 * (64 + 128) * 32 * 2
    assert tile.shared_bytes(2, "fp32") == 3 * (64 + 256) * 32 * 4
