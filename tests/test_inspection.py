"""Inspection from target to report, on models of every fate: matched, refused, unseen, untraceable."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moe_compiler import inspection
from moe_compiler.block_groups import fold_names, fold_numbers, group_blocks
from moe_compiler.errors import InspectError, OptionError
from moe_compiler.inspection import Request, inspect_model, machine_of
from moe_compiler.model_report import ModelReport, Stage, Status
from moe_compiler.outline import build_outline
from tests.models import styles

HERE = str(Path(__file__).resolve())
CONFIGS = Path(__file__).parent / "data" / "configs"


class Stack(nn.Module):
    """Blocks with a residual."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(styles.build(name) for name in names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            out = layer(x)
            x = x + (out[0] if isinstance(out, tuple) else out)
        return x


def mixed() -> tuple[nn.Module, torch.Tensor]:
    names = (
        "gathered_einsum",
        "gathered_einsum",
        "scatter_overwrites",
        "gathered_einsum",
        "tanh_scores",
    )
    return Stack(*names), styles.rows(1, 33, 64)


def whole() -> tuple[nn.Module, torch.Tensor]:
    return Stack("gathered_einsum"), styles.rows(1, 33, 64)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = styles.build("gathered_einsum")
        self.idle = styles.build("gathered_einsum")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def unused() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Unused(), (styles.rows(33, 64),)


def dense() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return nn.Linear(4, 4), {"input": torch.ones(2, 4)}


def data_dependent() -> tuple[nn.Module, torch.Tensor]:
    return Stack("loop_hit_experts"), styles.rows(1, 33, 64)


def bare() -> nn.Module:
    return nn.Linear(4, 4)


def not_a_module() -> list[int]:
    return [1]


def broken() -> nn.Module:
    raise RuntimeError("weights are missing")


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("wrong shape")


def raises() -> tuple[nn.Module, torch.Tensor]:
    return Raises(), torch.ones(1)


instance = bare()


def inspect(name: str, **more: Any) -> ModelReport:
    return inspect_model(Request(target=f"{HERE}:{name}", **more))


@pytest.fixture(scope="module")
def mixed_report() -> ModelReport:
    return inspect("mixed", tokens=(1, 64))


def test_blocks_come_in_order_with_names_and_fates(mixed_report: ModelReport) -> None:
    assert [block.name for block in mixed_report.blocks] == [f"layers.{i}" for i in range(5)]
    assert [str(block.status) for block in mixed_report.blocks] == [
        "matched", "matched", "refused", "matched", "matched",
    ]  # fmt: skip
    assert [group.label for group in group_blocks(mixed_report.blocks)] == [
        "layers.0-1,3",
        "layers.2",
        "layers.4",
    ]
    refused = mixed_report.blocks[2]
    assert refused.module_class == "ScatterOverwrites"
    assert "not summed" in refused.reason


def test_a_matched_block_says_all_of_itself(mixed_report: ModelReport) -> None:
    block = mixed_report.blocks[0]
    assert block.region is not None
    assert block.router == "softmax>top2>sum"
    assert block.region.form == "gathered"
    experts = block.region.experts
    assert (experts.num_experts, experts.hidden, experts.intermediate) == (8, 64, 32)
    assert block.expert_bytes == 8 * 3 * 64 * 32 * 4
    assert block.active_bytes_per_token == 2 * block.bytes_per_expert
    assert [point.tokens for point in block.floors] == [1, 64]
    assert block.region.proof.num_runs > 0
    assert mixed_report.blocks[1].region is not None
    assert mixed_report.blocks[1].region.proof.reused or mixed_report.blocks[3].region.proof.reused
    assert mixed_report.blocks[4].router == "external"
    assert "not the top 2" in mixed_report.blocks[4].region.router_note


def test_totals_are_sums(mixed_report: ModelReport) -> None:
    matched = [block for block in mixed_report.blocks if block.status is Status.MATCHED]
    assert mixed_report.expert_bytes == sum(block.expert_bytes for block in matched)
    assert mixed_report.floor_us(64) == pytest.approx(
        sum(block.floors[1].floor_us for block in matched)
    )
    parameters = list(mixed()[0].parameters())
    assert mixed_report.num_parameters == sum(p.numel() for p in parameters)
    assert mixed_report.parameter_bytes == 4 * mixed_report.num_parameters
    assert mixed_report.peak_rss_bytes > 50e6


def test_the_block_graph_is_whole_and_in_stages(mixed_report: ModelReport) -> None:
    graph = mixed_report.graphs[mixed_report.blocks[0].graph_idx]
    assert mixed_report.blocks[0].graph_idx == mixed_report.blocks[3].graph_idx
    names = {node.name for node in (*graph.nodes, *graph.outside)}
    assert all(name in names for node in graph.nodes for name in node.inputs)
    assert graph.output == graph.nodes[-1].name
    stage_of = {node.op: node.stage for node in graph.nodes}
    assert stage_of["softmax"] is Stage.ROUTER
    assert stage_of["topk"] is Stage.ROUTER
    assert stage_of["silu"] is Stage.EXPERTS
    assert {node.role for node in graph.outside} == {"x", "router", "w1", "w2", "w3"}


def test_json_goes_both_ways(mixed_report: ModelReport) -> None:
    text = mixed_report.to_json(indent=1)
    assert "Infinity" not in text
    assert ModelReport.from_json(text) == mixed_report


@pytest.mark.parametrize(
    "text", ["[1]", "{", '{"schema": 1}', '{"schema": 99}', '{"schema": 1, "extra": 2}']
)
def test_a_foreign_json_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="moeflex"):
        ModelReport.from_json(text)


def test_the_outline_folds_runs_and_patterns() -> None:
    names = ("gathered_einsum", "gathered_einsum", "dense_einsum") * 2
    model = Stack(*names)
    report = inspect_model(Request(target=f"{HERE}:whole", tokens=(1,)))
    block = report.blocks[0]
    blocks = [
        dataclasses.replace(block, name=f"layers.{i}", module_class=name)
        for i, name in enumerate(names)
    ]
    (pattern,) = build_outline(model, blocks)
    assert (pattern.label, pattern.repeat) == ("layers.0-5", 2)
    assert [(c.label, c.repeat, c.blocks) for c in pattern.children] == [
        ("layers.0-1,3-4", 2, (0, 1, 3, 4)),
        ("layers.2,5", 1, (2, 5)),
    ]


def test_names_fold_to_one_label() -> None:
    assert fold_names(["a.3.mlp", "a.4.mlp", "a.5.mlp"]) == "a.3-5.mlp"
    assert fold_names(["a.1.mlp"]) == "a.1.mlp"
    assert fold_names(["a.1.mlp", "b.1.mlp"]) == "a.1.mlp .. b.1.mlp"
    assert fold_numbers([1, 3, 5, 7]) == "1-7:2"
    assert fold_numbers([0, 1, 4, 6, 7]) == "0-1,4,6-7"
    assert fold_numbers([*list(range(0, 40, 3)), 50]) == "0,3,6,9,..,50"


def test_experts_in_no_graph_are_unseen() -> None:
    report = inspect("unused", tokens=(1,))
    assert [(b.name, b.status) for b in report.blocks] == [
        ("used", Status.MATCHED),
        ("idle", Status.UNSEEN),
    ]
    assert "not called" in report.blocks[1].reason


def test_a_model_without_experts_has_no_blocks() -> None:
    report = inspect("dense", tokens=(1,))
    assert report.blocks == ()
    assert report.num_parameters == 20


def test_a_broken_graph_gives_its_reason() -> None:
    report = inspect("data_dependent", tokens=(1,))
    assert report.num_graphs > 1
    assert report.count(Status.MATCHED) == 0
    assert any("graph break inside an MoE block" in block.reason for block in report.blocks)


@pytest.mark.parametrize(
    ("target", "needed"),
    [
        (f"{HERE}:bare", r"return \(module, example_inputs\)"),
        (f"{HERE}:instance", r"return \(module, example_inputs\)"),
        (f"{HERE}:not_a_module", "gave a list"),
        (f"{HERE}:broken", "RuntimeError: weights are missing"),
        (f"{HERE}:raises", "dynamo cannot trace Raises"),
        (f"{HERE}:missing", "has no 'missing'"),
        (f"{HERE}:HERE", "is a str"),
        ("no.such.module:f", "cannot be imported: ModuleNotFoundError"),
        ("nowhere.py:f", "no file nowhere.py"),
        ("nothing", "MODULE:FACTORY"),
        ("no_such_folder/config.json", "no configuration can be read"),
    ],
)
def test_a_bad_target_says_what_to_do(target: str, needed: str) -> None:
    with pytest.raises(InspectError, match=needed):
        inspect_model(Request(target=target))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("level", "fx"),
        ("device", "tpu"),
        ("shapes", "odd"),
        ("phase", "train"),
        ("dtype", "int8"),
        ("tokens", (0,)),
    ],
)
def test_a_bad_option_names_the_choices(field: str, value: object) -> None:
    request = dataclasses.replace(Request(target=f"{HERE}:whole"), **{field: value})
    with pytest.raises(OptionError, match=f"--{field} takes"):
        inspect_model(request)


def test_speeds_can_be_given() -> None:
    machine = machine_of(Request(target="", bandwidth_gbps=100.0, tflops=2.0))
    assert machine.weight_bytes_per_s == 1e11
    assert machine.rate("fp32").flop_per_s == 2e12
    assert machine.rate("fp32").source == "--tflops"


def test_the_cpu_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_compiler.runtime import machine_probe

    monkeypatch.setattr(machine_probe, "PROBE_SECONDS", 0.0)
    monkeypatch.setattr(inspection, "_cache_dir", lambda: tmp_path / "new")
    first = machine_of(Request(target="", device="cpu"))
    assert first.weight_bytes_per_s > 0
    assert all(rate.flop_per_s > 0 for rate in first.rates)
    monkeypatch.setattr(machine_probe, "_measure", lambda: pytest.fail("measured again"))
    assert machine_of(Request(target="", device="cpu")) == first
    (file,) = (tmp_path / "new").iterdir()
    file.write_text("{}")
    monkeypatch.setattr(machine_probe, "_measure", lambda: first)
    assert machine_of(Request(target="", device="cpu")) == first
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert (
        machine_probe.probe_cpu(blocked / "below") == first
    )  # cannot be kept, and says no more than the log


# ---- Hugging Face configurations


def small_config(folder: Path, **more: Any) -> str:
    fields = json.loads((CONFIGS / "qwen3_235b" / "config.json").read_text())
    fields.update(
        vocab_size=128, hidden_size=64, moe_intermediate_size=32, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        mlp_only_layers=[0],
    )  # fmt: skip
    fields.update(more)
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def test_a_config_is_built_without_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    request = Request(target=small_config(tmp_path), tokens=(1, 2048), device="h200")
    report = inspect_model(request)
    assert [group.label for group in group_blocks(report.blocks)] == ["model.layers.1-3.mlp"]
    block = report.blocks[0]
    assert block.status is Status.MATCHED
    assert block.region is not None
    assert (block.region.weight_dtype, block.region.num_tokens) == ("bf16", 0)
    assert block.target == "cuda sm_90a, router by a Triton kernel"
    small, large = block.workspace_bytes
    assert 0 < small < large
    (model, head) = report.outline
    assert (model.label, head.label) == ("model", "lm_head")
    assert [(n.label, n.repeat) for n in model.children if n.label.startswith("layers")] == [
        ("layers.0", 1),
        ("layers.1-3", 3),
    ]
    assert ("transformers" in dict(report.versions)) and report.capture_notes == ()


@pytest.mark.parametrize(
    ("device", "sm"), [("a100", "sm_80"), ("l40s", "sm_89"), ("b200", "sm_100")]
)
def test_other_gpus_get_the_triton_layer(tmp_path: Path, device: str, sm: str) -> None:
    pytest.importorskip("transformers")
    target = small_config(tmp_path, num_hidden_layers=2)
    block = inspect_model(Request(target=target, tokens=(1,), device=device)).blocks[0]
    assert block.target.startswith("triton (") and block.target.endswith(
        ", router by a Triton kernel"
    )
    assert f"runs on compute capability 9.0; this is {sm}" in block.target
    assert block.floors[0].floor_us > 0


def test_every_device_has_a_machine_and_a_place() -> None:
    from moe_compiler import inspection
    from moe_compiler.cli.inspect import Device

    assert set(inspection.DEVICES) == set(inspection.PLACES) == {entry.value for entry in Device}


def test_the_eager_loop_is_made_traceable_and_says_so(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    target = small_config(
        tmp_path, num_hidden_layers=2, quantization_config={"quant_method": "fp8"}
    )
    report = inspect_model(
        Request(target=target, tokens=(1,), experts_implementation="eager", phase="decode")
    )
    assert report.count(Status.MATCHED) == 1
    assert any("expert loop traced through" in note for note in report.capture_notes)
    assert any("fp8" in note for note in report.notes)


def test_the_aten_level_finds_the_same_blocks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    target = small_config(tmp_path, num_hidden_layers=2)
    torch_level = inspect_model(Request(target=target, tokens=(1,), dtype="fp32"))
    aten_level = inspect_model(Request(target=target, tokens=(1,), dtype="fp32", level="aten"))
    (a,), (b,) = torch_level.blocks, aten_level.blocks
    assert a.region is not None
    assert b.region is not None
    assert (a.name, a.router, a.region.experts) == (b.name, b.router, b.region.experts)


def test_without_transformers_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InspectError, match=r'pip install "moeflex\[hf\]"'):
        inspect_model(Request(target=small_config(tmp_path)))


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("{", "not JSON"),
        ("{}", "no `model_type`"),
        ('{"model_type": "no_such_model"}', "cannot read"),
    ],
)
def test_a_bad_config_says_what_is_wrong(tmp_path: Path, text: str, needed: str) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InspectError, match=needed):
        inspect_model(Request(target=str(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_blocks", "num_parameters"),
    [("qwen3_235b", 94, 235.1e9), ("deepseek_v3", 58, 671.0e9)],
)
def test_real_configs_fit_into_two_minutes_and_8_gb(
    name: str, num_blocks: int, num_parameters: float
) -> None:
    pytest.importorskip("transformers")
    # processor time: a busy machine makes the wall clock mean nothing
    code = (
        "import resource, sys\n"
        "from moe_compiler.inspection import Request, inspect_model\n"
        f"report = inspect_model(Request(target={str(CONFIGS / name)!r}))\n"
        "usage = resource.getrusage(resource.RUSAGE_SELF)\n"
        "seconds = usage.ru_utime + usage.ru_stime\n"
        "print(report.count('matched'), report.num_parameters, seconds, report.peak_rss_bytes)\n"
    )
    root = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    matched, parameters, seconds, peak_bytes = map(float, done.stdout.split())
    assert matched == num_blocks
    assert parameters == pytest.approx(num_parameters, rel=1e-3)
    assert seconds < 120
    assert peak_bytes < 8e9


with contextlib.suppress(ImportError):
    import transformers  # noqa: F401  before any test hides it
