"""Kind: several processes, each with a compiled block of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.cases.blocks import BACKEND, Block, rand
from tests.tolerances import assert_close_to_eager

ROOT = Path(__file__).resolve().parents[2]
STEPS = ((5, 0), (0, 5), (0, 0), (3, 3), (300, 2))


def network() -> nn.Module:
    """Three blocks deep, so that an error compounds."""
    return nn.Sequential(*(Block(form="gather", seed=seed) for seed in range(3)))


class OfRank(Block):
    """A constant that differs from rank to rank, and weights of one slice of the experts."""

    def __init__(self, rank: int) -> None:
        super().__init__(form="gather", seed=rank)
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.rank


def results_of(rank: int, compiled: bool) -> list[Tensor]:
    """What a rank computes: uneven steps, a training step, and its own constant."""

    def prepare(model: nn.Module) -> nn.Module:
        return torch.compile(model, backend=BACKEND, dynamic=True) if compiled else model

    found = []
    model = prepare(Block(form="gather"))
    with torch.no_grad():
        for step, counts in enumerate(STEPS):
            found.append(model(rand(counts[rank % 2], 16, seed=step)))
        found.append(prepare(OfRank(rank))(rand(7, 16)))
    x = rand(5, 16, seed=rank).requires_grad_()
    y = prepare(network())(x)
    y.square().sum().backward()
    return [*found, y.detach(), x.grad]


def rank_main() -> None:
    """One rank, started by `launch`."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = results_of(rank, compiled=True)
    # Every rank must arrive here, with tokens or without.
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    torch.save([*found, total], f"{os.environ['RESULTS']}/{rank}.pt")
    dist.destroy_process_group()


def launch(world: int, folder: Path) -> list[list[Tensor]]:
    """What each rank saved; a rank that hangs is an error."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.cases.test_distributed import rank_main; rank_main()"
    )
    processes = []
    for rank in range(world):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "RESULTS": str(folder),
        }
        processes.append(subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], env=env))
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


@pytest.mark.slow
def test_ranks_with_one_cache_agree_with_one_process(tmp_path: Path) -> None:
    """A rank without tokens, a rank with very many, and a shared cache that is cold, then warm."""
    for _ in range(2):
        for rank, found in enumerate(launch(2, tmp_path)):
            *ours, total = found
            assert total.item() == 1.0
            for mine, eager in zip(ours, results_of(rank, compiled=False), strict=True):
                assert_close_to_eager(mine, eager)
