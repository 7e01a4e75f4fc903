"""One small Qwen3-MoE over several processes: expert-parallel, then tensor-parallel, then back.

Random weights, nothing is downloaded, no GPU is needed:

    torchrun --nproc-per-node 2 examples/switch_tp_ep.py
"""

from __future__ import annotations

import logging
import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import moe_compiler

BATCH, LENGTH, STEPS = 4, 16, 4

console = Console(width=110)


def build_model() -> nn.Module:
    """A Qwen3-MoE of two layers with 16 experts each, the same weights on every rank."""
    try:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    except ImportError:
        console.print('This example needs transformers: pip install -e ".\\[hf]"')
        raise SystemExit(1) from None
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=128,
        moe_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).eval()


def decode(model: nn.Module, window: Tensor) -> Tensor:
    """Greedy tokens [batch, STEPS] behind a sliding window [batch, LENGTH]."""
    tokens = []
    for _ in range(STEPS):
        token = model(window, use_cache=False).logits[:, -1:].argmax(-1)
        tokens.append(token)
        window = torch.cat((window[:, 1:], token), 1)
    return torch.cat(tokens, 1)


def main() -> int:
    """Decode in both layouts, and print what every switch did."""
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    prompts = torch.randint(0, 512, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    mine = prompts.tensor_split(num_ranks)[rank]
    with torch.no_grad():
        expected = decode(build_model(), prompts)
        model = torch.compile(
            build_model(),
            backend="moeflex",
            dynamic=False,
            options={"group": "world", "layouts": ("ep", "tp"), "initial": "ep"},
        )
        rows = [
            ("ep", "its own requests", decode(model, mine), expected.tensor_split(num_ranks)[rank])
        ]
        reports = [moe_compiler.switch(model, "tp", check=True)]
        rows.append(("tp", "all requests", decode(model, prompts), expected))
        reports.append(moe_compiler.switch(model, "ep", check=True))
        rows.append(("ep", "its own requests", decode(model, mine), rows[0][2]))
    equal = all(torch.equal(found, wanted) for _, _, found, wanted in rows)
    if rank == 0:
        show(rows, reports)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if equal else 1


def show(
    rows: list[tuple[str, str, Tensor, Tensor]], reports: list[moe_compiler.SwitchReport]
) -> None:
    """Print both tables."""
    table = Table(
        title="Rank 0: greedy tokens beside one process with eager PyTorch", title_justify="left"
    )
    for name in ("layout", "decodes", "tokens", "equal"):
        table.add_column(name)
    for layout, what, found, wanted in rows:
        table.add_row(layout, what, str(found[0].tolist()), str(torch.equal(found, wanted)))
    console.print(table)
    table = Table(title="Rank 0: the switches", title_justify="left")
    for name in ("from", "to", "done", "from other ranks", "in place", "ms by phase", "GB/s"):
        table.add_column(name)
    for report in reports:
        table.add_row(
            *(str(report.source), str(report.target), str(report.done)),
            *(f"{report.crossed_bytes:,} bytes", f"{report.local_bytes:,} bytes"),
            ", ".join(f"{phase} {ms:.2f}" for phase, ms in report.phase_ms),
            f"{report.gbps:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
