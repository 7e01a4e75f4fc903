"""Routing traces: ids of the experts of every token, read from a file or generated, and what they make ranks move."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from moe_compiler.errors import OptionError

GENERATORS = ("balanced", "random", "power-law:A")
_MAX_EXPONENT = 100.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankTraffic:
    """What one layer asks of one rank.

    Attributes:
        counts: rows of each of its experts.
        num_tokens: tokens that are its own.
        arrivals: tokens of other ranks that it pulls, each once.
        results: rows that it sends to other ranks.
    """

    counts: tuple[int, ...]
    num_tokens: int
    arrivals: int
    results: int


def generate(kind: str, num_tokens: int, num_experts: int, top_k: int, *, seed: int = 0) -> Tensor:
    """Ids [1, T, K], different within a token.

    Args:
        kind: `balanced` (experts in turn), `random`, or `power-law:A` (expert e with weight (e + 1)^-A).
        num_tokens: T.
        num_experts: E.
        top_k: K.
        seed: of the random ones.

    Raises:
        OptionError: there is no such kind.
    """
    if kind == "balanced":
        routes = torch.arange(num_tokens * top_k).view(num_tokens, top_k)
        return (routes % num_experts)[None]
    name, _, text = kind.partition(":")
    exponent = 0.0 if kind == "random" else _exponent(text) if name == "power-law" else math.nan
    if not 0 <= exponent <= _MAX_EXPONENT:
        raise OptionError(
            f"a routing is one of {', '.join(GENERATORS)} with A from 0 to {_MAX_EXPONENT:.0f}, or a file; got {kind!r}"
        )
    generator = torch.Generator().manual_seed(seed)
    # The K largest of log weight + Gumbel noise are a draw without replacement.
    noise = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    log_weights = -exponent * torch.arange(1, num_experts + 1, dtype=torch.float64).log()
    return (log_weights - (-noise.log()).log()).topk(top_k, dim=1).indices[None]


def _exponent(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def read(file: Path) -> Tensor:
    """Ids [L, T, K] of a file.

    `.npy` holds [T, K] or [L, T, K]; a line of `.csv` is a token; a line of `.jsonl` is a layer, `[[id, ...], ...]`.

    Raises:
        OptionError: the file cannot be read as that.
    """
    readers = {".npy": _read_npy, ".csv": _read_csv, ".jsonl": _read_jsonl}
    if file.suffix not in readers:
        raise OptionError(f"a trace is a .npy, .csv or .jsonl file; got {str(file)!r}")
    try:
        ids = readers[file.suffix](file)
    except (OSError, ValueError, TypeError) as error:
        raise OptionError(f"{file} cannot be read as expert ids: {error}") from error
    ids = ids[None] if ids.dim() == 2 else ids
    if ids.dim() != 3 or ids.is_floating_point() or ids.dtype == torch.bool or not ids.numel():
        raise OptionError(
            f"{file} must hold integer ids [T, K] or [L, T, K], one or more; got {list(ids.shape)} {ids.dtype}"
        )
    return ids.long()


def _read_npy(file: Path) -> Tensor:
    try:
        import numpy
    except ImportError as error:
        raise OptionError(".npy files need numpy; install it or write .csv or .jsonl") from error
    return torch.from_numpy(numpy.load(file, allow_pickle=False))


def _read_csv(file: Path) -> Tensor:
    with file.open(newline="", encoding="utf-8") as lines:
        return torch.tensor([[int(cell) for cell in row] for row in csv.reader(lines) if row])


def _read_jsonl(file: Path) -> Tensor:
    text = file.read_text(encoding="utf-8")
    return torch.tensor([json.loads(line) for line in text.splitlines() if line.strip()])


def traffic(ids: Tensor, num_experts: int, num_ranks: int) -> tuple[RankTraffic, ...]:
    """What each rank computes and moves for one layer.

    Tokens are dealt to the ranks in order and evenly, experts as `ceil(E / R)` a rank.

    Args:
        ids: [T, K]; an id below 0 or from E on is no route.
        num_experts: E.
        num_ranks: R.
    """
    num_tokens = ids.shape[0]
    home = torch.arange(num_tokens) * num_ranks // max(1, num_tokens)
    per_rank = -(-num_experts // num_ranks)
    valid = (ids >= 0) & (ids < num_experts)
    counts = torch.bincount(ids[valid], minlength=num_experts).tolist()
    found = []
    for rank in range(num_ranks):
        foreign = valid & (ids // per_rank == rank) & (home != rank)[:, None]
        found.append(
            RankTraffic(
                counts=tuple(counts[rank * per_rank : (rank + 1) * per_rank]),
                num_tokens=int((home == rank).sum()),
                arrivals=int(foreign.any(1).sum()),
                results=int(foreign.sum()),
            )
        )
    return tuple(found)
