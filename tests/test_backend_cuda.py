"""`torch.compile(model, backend="moeflex")` on a Hopper GPU."""

from __future__ import annotations

import copy
import functools
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import moe_compiler
from moe_compiler import placement
from moe_compiler.backend import moeflex
from moe_compiler.layer import Device
from tests import tolerances
from tests.models import styles, zoo
from tests.tolerances import assert_close_to_fp32

# Later tokens of a sequence see, through the attention, one that was sent to another expert.
assert_close = functools.partial(tolerances.assert_most_rows_close_to_fp32, share=0.25)

pytestmark = pytest.mark.gpu

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
TARGET = "cuda sm_90a"


@pytest.fixture(scope="module", autouse=True)
def _on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def placements() -> set[str]:
    return {placed for report in moe_compiler.reports() for placed in report.placements}


def model_of(family: str, dtype: torch.dtype, implementation: str = "grouped_mm") -> nn.Module:
    return zoo.build(family, implementation, dtype).cuda().requires_grad_(False)


def wide(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).float()


def logits(model: Any, ids: Tensor, **more: Any) -> Tensor:
    return model(ids, use_cache=False, **more).logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill(family: str, dtype: torch.dtype) -> None:
    model = model_of(family, dtype)
    compiled = torch.compile(model, backend=moeflex)
    exact = wide(model)
    for length in (17, 40, 150):  # static, then dynamic in T
        ids = zoo.token_ids(2, length).cuda()
        ours = logits(compiled, ids)
        assert_close(ours.cpu(), logits(model, ids).cpu(), logits(exact, ids).cpu())
    assert placements() == {TARGET}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_decode(family: str, cache: str) -> None:
    model = model_of(family, torch.bfloat16)
    compiled = torch.compile(model, backend=moeflex)
    steps = []
    for run in (compiled, model, wide(model)):
        store = static_cache(model) if cache == "static" else None
        ids = zoo.token_ids(2, 8).cuda()
        first = model if run is compiled else run
        out = first(ids[:, :7], use_cache=True, past_key_values=store)
        steps.append(run(ids[:, 7:], use_cache=True, past_key_values=out.past_key_values).logits)
    assert_close(*(step.cpu() for step in steps))
    assert placements() == {TARGET}


def static_cache(model: nn.Module) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=32)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_reduce_overhead_uses_cuda_graphs(family: str) -> None:
    model = model_of(family, torch.bfloat16)
    compiled = torch.compile(model, backend=moeflex, mode="reduce-overhead")
    exact = wide(model)
    for seed in range(6):
        ids = zoo.token_ids(2, 16, seed).cuda()
        torch.compiler.cudagraph_mark_step_begin()
        ours = logits(compiled, ids).clone()
        assert_close(ours.cpu(), logits(model, ids).cpu(), logits(exact, ids).cpu())
    from torch._inductor.cudagraph_trees import get_container

    manager = get_container(torch.cuda.current_device()).tree_manager
    assert manager is not None
    assert manager.roots, "nothing was captured"
    assert placements() == {TARGET}


def test_a_manual_capture_replays_with_new_inputs() -> None:
    model = model_of("qwen3_moe", torch.bfloat16)
    compiled = torch.compile(model, backend=moeflex)
    ids = zoo.token_ids(2, 16).cuda()
    for _ in range(3):
        logits(compiled, ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = logits(compiled, ids)
    for seed in range(3):
        ids.copy_(zoo.token_ids(2, 16, seed).cuda())
        graph.replay()
        assert torch.equal(out, logits(compiled, ids))


def test_new_weights_are_seen_by_the_next_call() -> None:
    model = model_of("qwen3_moe", torch.bfloat16)
    compiled = torch.compile(model, backend=moeflex)
    ids = zoo.token_ids(2, 16).cuda()
    logits(compiled, ids)
    num_graphs = len(moe_compiler.reports())
    state = {k: v.clone() for k, v in model.state_dict().items()}
    other = model_of("qwen3_moe", torch.bfloat16)
    zoo.randomize(other.cpu(), seed=7)
    other.cuda()
    exact = wide(other)
    model.load_state_dict(other.state_dict())
    assert_close(logits(compiled, ids).cpu(), logits(other, ids).cpu(), logits(exact, ids).cpu())
    # a refit by slices, and storage that was swapped
    model.load_state_dict(state)
    want = logits(compiled, ids)
    for parameter in model.parameters():
        if parameter.ndim == 3:
            parameter.mul_(2)
            parameter[0].copy_(parameter[0])
            parameter.data = parameter.data / 2
    assert torch.equal(logits(compiled, ids), want)
    assert len(moe_compiler.reports()) == num_graphs, "new values must not compile again"


def test_a_model_that_moves_and_changes_its_dtype() -> None:
    model = model_of("mixtral", torch.bfloat16)
    compiled = torch.compile(model, backend=moeflex)
    ids = zoo.token_ids(2, 16).cuda()
    want = logits(compiled, ids)
    model.cpu().cuda()
    assert torch.equal(logits(compiled, ids), want)
    model.half()
    exact = wide(model)
    assert_close(logits(compiled, ids).cpu(), logits(model, ids).cpu(), logits(exact, ids).cpu())


def test_gradients() -> None:
    model = zoo.build("qwen3_moe", "grouped_mm", torch.bfloat16).cuda()
    exact = wide(model)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=moeflex)
    ids = zoo.token_ids(2, 16).cuda()
    found = []
    for run, owner in ((compiled, model), (eager, eager), (exact, exact)):
        with torch.enable_grad():
            logits(run, ids).float().square().mean().backward()
        found.append([p.grad for p in owner.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[2]) > 0
    for ours, same, wider in zip(*found, strict=True):
        assert_close_to_fp32(ours.cpu(), same.cpu(), wider.cpu())
    assert placements() == {TARGET}


def test_no_second_copy_of_the_experts_and_nothing_stays() -> None:
    torch.compile(model_of("qwen3_moe", torch.bfloat16), backend=moeflex)(
        zoo.token_ids(2, 16).cuda(), use_cache=False
    )
    gc.collect()
    empty = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    from transformers import AutoModelForCausalLM

    config = zoo.config_of("qwen3_moe", hidden_size=512, moe_intermediate_size=512, num_experts=64)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    compiled = torch.compile(model, backend=moeflex)
    experts = sum(p.nbytes for p in model.parameters() if p.ndim == 3)
    ids = zoo.token_ids(2, 16).cuda()
    before = torch.cuda.memory_allocated()
    logits(compiled, ids)  # Inductor measures its kernels with a buffer of the size of the L2
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        logits(compiled, ids)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < experts / 4
    assert torch.cuda.memory_allocated() - before < experts / 100
    assert placements() == {TARGET}
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert torch.cuda.memory_allocated() - empty < experts / 100


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_other_gpus_say_why(monkeypatch, capability: tuple[int, int]) -> None:
    # Patched at our end only: Triton would write code for that GPU, too.
    found = Device(type="cuda", capability=capability)
    monkeypatch.setattr(placement, "device_of", lambda _: found)
    model = model_of("qwen3_moe", torch.bfloat16)
    ids = zoo.token_ids(2, 16).cuda()
    torch.compile(model, backend=moeflex)(ids, use_cache=False)
    assert all(f"this is {found.title}" in placed for placed in placements())


def test_experts_in_a_list_say_why() -> None:
    block = styles.build("loop_plus_equals", dtype=torch.bfloat16).cuda().requires_grad_(False)
    x = styles.rows(dtype=torch.bfloat16).cuda()
    ours = torch.compile(block, backend=moeflex)(x)
    exact = wide(block)
    assert_close_to_fp32(ours.cpu(), block(x).cpu(), exact(x.float()).cpu())
    assert any("one tensor an expert" in placed for placed in placements())
