"""Compile a small Qwen3-MoE with moeflex, compare it with eager PyTorch and with Inductor alone.

Random weights, nothing is downloaded, no GPU is needed:

    python examples/quickstart.py
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

BATCH, PROMPT, STEPS = 2, 128, 8
BACKENDS = ("eager", "inductor", "moeflex")
TITLES = {"eager": "eager", "inductor": "Inductor", "moeflex": "moeflex"}

console = Console(width=None if sys.stdout.isatty() else 110)


@dataclasses.dataclass
class Runner:
    """One way to run the model.

    Attributes:
        call: the model, compiled or not.
        prefill_s: seconds of each measured prefill.
        decode_s: seconds of each measured decode step.
        tokens: the tokens that it generated [BATCH, STEPS].
        logits: logits after the prompt [BATCH, PROMPT, vocabulary].
        compile_s: seconds of the first prefill and the first decode step.
    """

    call: Callable[..., Any]
    prefill_s: list[float] = dataclasses.field(default_factory=list)
    decode_s: list[float] = dataclasses.field(default_factory=list)
    tokens: Tensor | None = None
    logits: Tensor | None = None
    compile_s: float = 0.0


@contextlib.contextmanager
def progress(message: str) -> Iterator[None]:
    """Show what is being done: a spinner on a terminal, one line elsewhere."""
    if console.is_terminal:
        with console.status(message):
            yield
    else:
        console.print(message)
        yield


def build_model(dtype: torch.dtype) -> nn.Module:
    """A Qwen3-MoE of two layers with 64 experts each, top-8, random weights."""
    try:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    except ImportError:
        console.print(
            "This example needs transformers (the library itself does not).\n"
            'Install it with: pip install -e ".\\[hf]"    or run: make demo'
        )
        raise SystemExit(1) from None
    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=512,
        moe_intermediate_size=256,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).to(dtype).eval()


def generate(runner: Runner, model: nn.Module, prompt: Tensor) -> tuple[float, list[float]]:
    """Run the prompt, then STEPS greedy tokens; seconds of the prefill and of each step."""
    from transformers import StaticCache

    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    keywords = {
        name: StaticCache(config=model.config, max_cache_len=PROMPT + STEPS + 1),
        "use_cache": True,
    }
    start = time.perf_counter()
    logits = runner.call(prompt, **keywords).logits
    prefill_s = time.perf_counter() - start
    token, tokens, steps_s = logits[:, -1:].argmax(-1), [], []
    for _ in range(STEPS):
        tokens.append(token)
        start = time.perf_counter()
        step = runner.call(token, **keywords).logits
        token = step.argmax(-1)
        steps_s.append(time.perf_counter() - start)
    runner.logits, runner.tokens = logits, torch.cat(tokens, 1)
    return prefill_s, steps_s


def measure(runners: dict[str, Runner], model: nn.Module, prompt: Tensor, rounds: int) -> None:
    """The runners take turns, so that a busy moment of the machine hits all of them."""
    for number in range(rounds):
        with progress(f"measuring, round {number + 1} of {rounds}"):
            for runner in runners.values():
                prefill_s, steps_s = generate(runner, model, prompt)
                runner.prefill_s.append(prefill_s)
                runner.decode_s += steps_s


def found_table() -> Table:
    """What moeflex found, from its reports; equal blocks share a row."""
    import moe_compiler

    blocks: dict[tuple[str, ...], list[str]] = {}
    refusals: dict[str, list[str]] = {}
    for report in moe_compiler.reports():
        for region, placement in zip(report.regions, report.placements, strict=True):
            experts = region.experts
            row = (
                str(region.num_tokens or "any"),
                region.router.kind,
                f"{experts.num_experts} of [{experts.intermediate}, {experts.hidden}]",
                f"{experts.activation.name}, {region.weight_dtype}",
                placement,
            )
            blocks.setdefault(row, []).append(region.name)
        for refusal in report.refused:
            refusals.setdefault(refusal.reason, []).append(refusal.name or refusal.node)
    table = Table(title="What moeflex found and proved", title_justify="left")
    for name in ("block", "tokens", "router", "experts", "activation", "runs as"):
        table.add_column(name)
    for row, names in blocks.items():
        table.add_row(shorten(names), *row)
    for reason, names in refusals.items():
        table.add_row(shorten(names), "", "left to Inductor:", reason)
    return table


def shorten(names: list[str]) -> str:
    """`model.layers.0.mlp and 3 more`."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def speed_table(runners: dict[str, Runner]) -> Table:
    """Medians, and how many times as fast as eager each is."""
    table = Table(title="How fast", title_justify="left")
    table.add_column("")
    for name in (f"prefill, {BATCH} x {PROMPT} tokens", f"decode, {BATCH} tokens a step"):
        table.add_column(name, justify="right")
        table.add_column("to eager", justify="right")
    table.add_column("first calls", justify="right")
    base = runners["eager"]
    for name, runner in runners.items():
        row = [TITLES[name]]
        for mine, eager in ((runner.prefill_s, base.prefill_s), (runner.decode_s, base.decode_s)):
            median = statistics.median(mine)
            row += [f"{median * 1e3:.2f} ms", f"{statistics.median(eager) / median:.2f}x"]
        row.append("-" if name == "eager" else f"{runner.compile_s:.1f} s")
        table.add_row(*row)
    return table


def compare(ours: Runner, eager: Runner) -> bool:
    """Print how far the logits are apart; whether every predicted token is the same."""
    assert ours.logits is not None
    assert eager.logits is not None
    difference = (ours.logits.double() - eager.logits.double()).abs().max()
    error = (difference / eager.logits.double().abs().max()).item()
    same = (ours.logits.argmax(-1) == eager.logits.argmax(-1)).double().mean().item()
    generated = torch.equal(ours.tokens, eager.tokens)
    console.print(
        f"moeflex against eager: largest relative error of the logits {error:.1e}, "
        f"{same:.1%} of {eager.logits.shape[0] * eager.logits.shape[1]} predicted tokens equal, "
        f"generated tokens {'equal' if generated else 'different'}"
    )
    return same == 1.0 and generated


def main() -> int:
    """0 when moeflex predicts the same tokens as eager."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is measured")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch")
    logging.getLogger("torch").setLevel(logging.ERROR)

    with progress("building a Qwen3-MoE with random weights"):
        model = build_model(getattr(torch, arguments.dtype))
    num_parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"Qwen3-MoE, {num_parameters / 1e6:.0f} M parameters, {arguments.dtype}, "
        f"{torch.get_num_threads()} threads, PyTorch {torch.__version__}"
    )
    prompt = torch.randint(0, model.config.vocab_size, (BATCH, PROMPT))
    runners: dict[str, Runner] = {}
    with torch.no_grad():
        for name in BACKENDS:
            compiled = model if name == "eager" else torch.compile(model, backend=name)
            runners[name] = Runner(compiled)
            with progress(f"first calls with {TITLES[name]}"):
                start = time.perf_counter()
                generate(runners[name], model, prompt)
                runners[name].compile_s = time.perf_counter() - start
        measure(runners, model, prompt, arguments.rounds)
    console.print(found_table())
    equal = compare(runners["moeflex"], runners["eager"])
    console.print(speed_table(runners))
    return 0 if equal or arguments.dtype != "float32" else 1


if __name__ == "__main__":
    sys.exit(main())
