"""Time to compile small MoE models with Inductor alone and with moeflex, cold and warm.

    python benchmarks/compile_time.py

Every measurement is a fresh process with cache folders of its own: the first process finds them
empty (cold), the second finds what it left (warm). What is timed is `torch.compile` and the first
call, less the second: imports, capture, the passes, code generation and the C++ compiler.
`torch.compile` belongs to it because it imports Inductor (0.5 s) where Inductor is the backend;
another backend imports it in the first call. moeflex's share is split by stage. The backends take
turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import results_io

ROOT = Path(__file__).resolve().parents[1]
MARK = "RESULT "
BACKENDS = ("inductor", "moeflex")
LAYERS, TOKENS = 4, 64

COMMON: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
# transformers' model type -> configuration.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 64,
        "moe_intermediate_size": 128,
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "q_lora_rank": 96,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "n_routed_experts": 32,
        "num_experts_per_tok": 8,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
    },
    "gpt_oss": {
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    },
}


def measure_here(model_type: str, backend: str) -> dict[str, Any]:
    """Compile in this process; seconds of compilation and of moeflex's stages."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **COMMON, **MODELS[model_type])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm").eval()
    ids = torch.randint(0, COMMON["vocab_size"], (1, TOKENS))
    times = [time.perf_counter()]
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for _ in range(2):
            compiled(ids, use_cache=False)
            times.append(time.perf_counter())
    start, first, second = times
    found: dict[str, Any] = {
        "seconds": (first - start) - (second - first),
        "num_blocks": 0,
        "stages": {},
    }
    if backend == "moeflex":
        import moe_compiler

        for report in moe_compiler.reports():
            found["num_blocks"] += report.num_replaced
            for stage, seconds in report.stage_seconds:
                found["stages"][stage] = found["stages"].get(stage, 0.0) + seconds
    return found


def measure(model_type: str, backend: str, caches: Path) -> dict[str, Any]:
    """Run `measure_here` in a fresh process with the cache folders below `caches`.

    Raises:
        RuntimeError: the process failed; its last output is in the message.
    """
    # Python compiles our sources in the cold process only, as it has done torch's.
    env = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "MOEFLEX_CACHE_DIR": str(caches / "moeflex"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [sys.executable, "-W", "ignore", __file__, "--here", model_type, backend]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return dict(json.loads(line[len(MARK) :]))
    raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")


def rows_of(model_type: str, repeats: int) -> list[dict[str, Any]]:
    """One row for the cold and one for the warm cache."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(repeats):
        for backend in BACKENDS:
            with tempfile.TemporaryDirectory(prefix="compile-time-") as folder:
                for cache in ("cold", "warm"):
                    print(f"  {model_type}: {backend}, {cache} cache", file=sys.stderr, flush=True)
                    result = measure(model_type, backend, Path(folder))
                    found.setdefault((backend, cache), []).append(result)
    rows = []
    for cache in ("cold", "warm"):
        ours = found["moeflex", cache]
        seconds = {b: [r["seconds"] for r in found[b, cache]] for b in BACKENDS}
        medians = {b: statistics.median(s) for b, s in seconds.items()}
        row: dict[str, Any] = {
            "model": model_type,
            "cache": cache,
            "layers": LAYERS,
            "tokens": TOKENS,
            "dtype": "fp32",
            "ours_us": round(medians["moeflex"] * 1e6),
            "inductor_us": round(medians["inductor"] * 1e6),
            "ratio": round(medians["moeflex"] / medians["inductor"], 3),
            "num_blocks": ours[0]["num_blocks"],
            "spread": [round(f(seconds["moeflex"]) * 1e6) for f in (min, max)],
        }
        for stage in ours[0]["stages"]:
            median = statistics.median(r["stages"][stage] for r in ours)
            row[f"stage_{stage}_us"] = round(median * 1e6)
        rows.append(row)
    return rows


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """The rows, with the stages in seconds."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Seconds to compile {LAYERS} layers")
    for name in ("model", "cache", "Inductor", "moeflex", "ratio", "of it, by stage"):
        table.add_column(name)
    for row in rows:
        stages = ", ".join(
            f"{name[6:-3]} {row[name] / 1e6:.2f}" for name in row if name.startswith("stage_")
        )
        table.add_row(
            row["model"],
            row["cache"],
            f"{row['inductor_us'] / 1e6:.2f}",
            f"{row['ours_us'] / 1e6:.2f}",
            f"{row['ratio']:.2f}",
            stages,
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main() -> int:
    """Measure, print, and write `benchmarks/results/compile_time.cpu.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="runs per figure; medians are kept")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--here", nargs=2, metavar=("MODEL", "BACKEND"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(MARK + json.dumps(measure_here(*arguments.here)))
        return 0
    rows = [row for name in arguments.models for row in rows_of(name, arguments.repeats)]
    print_table(rows)
    print(json.dumps(rows))
    if not arguments.no_write:
        results_io.write("compile_time", "cpu", rows, num_cores=os.cpu_count())
    return 0


if __name__ == "__main__":
    sys.exit(main())
