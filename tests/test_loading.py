"""Checkpoints read into models on the meta device: at once, or into the arenas of a group."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_compiler
from moe_compiler import layout_graphs
from moe_compiler.errors import CheckpointError
from tests.passes.test_tensor_parallel import Experts, H
from tests.runtime.ranks import run_ranks
from tests.test_layouts import Small, build, compiled, decode, prompts

save_file = pytest.importorskip("safetensors.torch").save_file


def save(model: nn.Module, folder: Path, num_files: int = 1) -> Path:
    """Write a state dict in Hugging Face's form."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {n: t.detach().contiguous() for n, t in model.named_parameters()}
    return save_state(state, folder, num_files)


def save_state(state: dict[str, Tensor], folder: Path, num_files: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if num_files == 1:
        save_file(state, folder / "model.safetensors")
        return folder
    where = {n: f"model-{i % num_files:05d}.safetensors" for i, n in enumerate(sorted(state))}
    for file in set(where.values()):
        save_file({n: t for n, t in state.items() if where[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def on_meta(kind: Any) -> nn.Module:
    with torch.device("meta"):
        return kind()


@pytest.mark.parametrize("num_files", [1, 3])
def test_a_model_of_one_process_is_read_at_once(tmp_path: Path, num_files: int) -> None:
    wanted = build(Small)
    model = on_meta(Small)
    report = moe_compiler.load_checkpoint(model, save(wanted, tmp_path, num_files))
    assert not report.deferred
    assert report.unused == report.cast == ()
    assert report.num_bytes == sum(p.numel() * 4 for p in wanted.parameters())
    for (name, found), (_, expected) in zip(
        model.named_parameters(), wanted.named_parameters(), strict=True
    ):
        assert torch.equal(found, expected), name
    with torch.no_grad():
        assert torch.equal(model(prompts()), wanted(prompts()))


def load_and_switch(rank: int, num_ranks: int, folder: Path) -> dict[str, Any]:
    whole = prompts()
    share = len(whole) // num_ranks
    mine = whole[rank * share : (rank + 1) * share]
    found: dict[str, Any] = {}
    with torch.no_grad():
        source = on_meta(Small)
        found["report"] = moe_compiler.load_checkpoint(source, folder / "first")
        found["nan"] = bool(source.layer.moe.w13.isnan().all() and source.head.weight.isnan().all())
        with pytest.raises(Exception, match="compile with options="):
            torch.compile(source, backend=moe_compiler.moeflex)(mine)
        torch._dynamo.reset()
        model = compiled(source, initial="ep")
        found["ep"] = decode(model, mine)
        found["switched"] = moe_compiler.switch(model, "tp", check=True).done
        found["tp"] = decode(model, whole)
        again = moe_compiler.load_checkpoint(model, folder / "second")
        found["deferred again"] = again.deferred
        found["tp, second"] = decode(model, whole)
        moe_compiler.switch(model, "ep")
        found["ep, second"] = decode(model, mine)
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_load_then_switch_then_load_again(tmp_path: Path, num_ranks: int) -> None:
    first, second = build(Small), build(Small, seed=1)
    save(first, tmp_path / "first")
    save(second, tmp_path / "second", 2)
    with torch.no_grad():
        tokens, new_tokens = decode(first, prompts())[0], decode(second, prompts())[0]
    share = 4 // num_ranks
    for rank, found in enumerate(run_ranks(load_and_switch, num_ranks, tmp_path)):
        mine = slice(rank * share, (rank + 1) * share)
        assert found["report"].deferred
        assert found["nan"]
        assert found["switched"]
        assert torch.equal(found["ep"][0], tokens[mine])
        assert torch.equal(found["tp"][0], tokens)
        assert not found["deferred again"]
        assert torch.equal(found["tp, second"][0], new_tokens)
        assert torch.equal(found["ep, second"][0], new_tokens[mine])


class Wide(nn.Module):
    """100 MB of experts beside which everything else is small."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts(width=4096, num_experts=64)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x)


def peak_growth(rank: int, num_ranks: int, folder: Path) -> tuple[int, int]:
    """Bytes by which resident memory grows in `load_checkpoint`, and its peak while the arena is filled.

    Between the two the model is compiled, which takes memory of its own.
    """
    found = []

    def record(*args: Any) -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = status("VmRSS")
        model = fill_arena(*args)
        found.append(status("VmHWM") - before)
        return model

    fill_arena = layout_graphs._model_of
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_graphs, "_model_of", record)
        source = on_meta(Wide)
        before = status("VmRSS")
        moe_compiler.load_checkpoint(source, folder)
        grown = status("VmRSS") - before
        compiled(source, layouts=("ep",))(torch.randn(2, H))
    (peak,) = found
    return grown, peak


def status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_no_rank_ever_holds_much_more_than_its_shard(tmp_path: Path) -> None:
    model = build(Wide)
    num_bytes = sum(p.numel() * 4 for p in model.parameters())
    assert num_bytes > 95 << 20
    save(model, tmp_path)
    del model
    for grown, peak in run_ranks(peak_growth, 4, tmp_path):
        assert grown < num_bytes // 4
        # Beside the shard: one expert, and the pages of a peer on which the link was measured.
        assert num_bytes // 4 < peak < num_bytes * 2 // 3


def test_experts_that_are_stored_one_by_one(tmp_path: Path) -> None:
    """As Hugging Face stores Qwen3-MoE, read into the stacked parameters of its model."""
    transformers = pytest.importorskip("transformers")
    model, config = qwen(transformers)
    model.save_pretrained(tmp_path)
    stored = moe_compiler.runtime.checkpoint.Checkpoint(tmp_path).tensors
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in stored
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config)
    report = moe_compiler.load_checkpoint(empty, tmp_path)
    assert report.unused == ()
    for (name, found), (_, wanted) in zip(
        empty.state_dict().items(), model.state_dict().items(), strict=True
    ):
        assert torch.equal(found, wanted), name
    ids = torch.randint(0, 64, (1, 5))
    with torch.no_grad():
        assert torch.equal(empty.eval()(ids).logits, model(ids).logits)


def qwen(transformers: Any, **changes: Any) -> tuple[nn.Module, Any]:
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=H,
        moe_intermediate_size=16,
        num_experts=12,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        **changes,
    )
    return transformers.Qwen3MoeForCausalLM(config).eval(), config


def read_qwen(rank: int, num_ranks: int, folder: Path) -> tuple[Tensor, Tensor]:
    import transformers

    config = qwen(transformers, tie_word_embeddings=True)[1]
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config).eval()
    moe_compiler.load_checkpoint(empty, folder)
    ids = torch.arange(10).view(2, 5)
    with torch.no_grad():
        model = compiled(empty, initial="tp")
        first = model(ids, use_cache=False).logits
        moe_compiler.switch(model, "ep", check=True)
        return first, model(ids[rank : rank + 1], use_cache=False).logits


@pytest.mark.slow
def test_a_transformers_model_over_two_ranks(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, _ = qwen(transformers, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    ids = torch.arange(10).view(2, 5)
    with torch.no_grad():
        expected = model(ids).logits
    for rank, (tp, ep) in enumerate(run_ranks(read_qwen, 2, tmp_path)):
        torch.testing.assert_close(tp, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ep, expected[rank : rank + 1], rtol=1e-4, atol=1e-5)


def tear_and_load(rank: int, num_ranks: int, folder: Path) -> Any:
    """A torn switch serves nothing; after a load the first layout serves again."""
    whole = prompts()
    mine = whole[rank * 2 : rank * 2 + 2]
    with torch.no_grad():
        source = build(Small)
        model = compiled(source, initial="ep")
        model(mine)
        store = moe_compiler.layouts.model_of_parameter(source.layer.moe.w13).store
        moved = store._transfer
        move, moved.move = moved.move, lambda *_: 1 / 0
        with pytest.raises(Exception, match="Load the model again"):
            moe_compiler.switch(model, "tp")
        with pytest.raises(Exception, match="was interrupted"):
            model(mine)
        moved.move = move
        moe_compiler.load_checkpoint(model, folder)
        found = decode(model, mine)[0]
        report = moe_compiler.switch(model, "tp", check=True)
        return found, report.done, decode(model, whole)[0]


def test_a_load_repairs_a_torn_switch(tmp_path: Path) -> None:
    model = build(Small)
    save(model, tmp_path)
    with torch.no_grad():
        tokens = decode(model, prompts())[0]
    for rank, (ep, done, tp) in enumerate(run_ranks(tear_and_load, 2, tmp_path)):
        assert torch.equal(ep, tokens[rank * 2 : rank * 2 + 2])
        assert done
        assert torch.equal(tp, tokens)


def test_values_are_rounded_to_the_dtype_of_the_model(tmp_path: Path) -> None:
    wanted = build(Small)
    with torch.device("meta"):
        model = Small().to(torch.bfloat16)
    report = moe_compiler.load_checkpoint(model, save(wanted, tmp_path))
    assert len(report.cast) == len(list(wanted.parameters()))
    assert torch.equal(model.head.weight, wanted.head.weight.to(torch.bfloat16))


def broken(tmp_path: Path, what: str) -> Path:
    state = {n: t.detach().clone() for n, t in build(Small).named_parameters()}
    if what == "missing":
        del state["head.weight"]
    elif what == "shape":
        state["layer.moe.w2"] = state["layer.moe.w2"].transpose(1, 2).contiguous()
    elif what == "quantised":
        state["layer.moe.w13"] = state["layer.moe.w13"].to(torch.float8_e4m3fn)
    folder = save_state(state, tmp_path, 2 if what == "lost file" else 1)
    if what == "cut short":
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-7])
    elif what == "no header":
        (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    elif what == "lost file":
        (folder / "model-00001.safetensors").unlink()
    elif what == "outside":
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a"}}')
    elif what == "empty":
        (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing", "lacks 1 of the .* head.weight"),
        (
            "shape",
            r"layer.moe.w2: the checkpoint gives shape \(8, 8, 32\); the model has \(8, 32, 8\)",
        ),
        ("quantised", "layer.moe.w13: .* stored as F8_E4M3"),
        ("cut short", "damaged or cut short"),
        ("no header", "no safetensors file"),
        ("lost file", "model-00001.safetensors cannot be read"),
        ("outside", "outside of its folder"),
        ("empty", "has neither"),
    ],
)
def test_what_does_not_fit_says_so(tmp_path: Path, what: str, message: str) -> None:
    model = on_meta(Small)
    with pytest.raises(CheckpointError, match=message):
        moe_compiler.load_checkpoint(model, broken(tmp_path, what))
    assert all(p.is_meta for p in model.parameters())


def test_unused_tensors_are_reported(tmp_path: Path) -> None:
    state = {n: t.detach().clone() for n, t in build(Small).named_parameters()}
    save_state({**state, "extra": torch.zeros(2)}, tmp_path)
    assert moe_compiler.load_checkpoint(on_meta(Small), tmp_path).unused == ("extra",)


def test_a_meta_buffer_that_nobody_stores_is_refused(tmp_path: Path) -> None:
    class Rotary(Small):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.ones(3), persistent=False)

    save(build(Small), tmp_path)
    with pytest.raises(CheckpointError, match=r"frequencies.*in no checkpoint"):
        moe_compiler.load_checkpoint(on_meta(Rotary), tmp_path)
