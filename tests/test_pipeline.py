"""The stages: what happens to a graph, and what happens when a stage cannot do its work."""

from __future__ import annotations

import json
import logging
import sys

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import moe_compiler
from moe_compiler import cpu_kernels, pipeline, placement
from moe_compiler.errors import BuildError, NoMatchError, OptionError
from moe_compiler.ir import Score
from moe_compiler.options import Options
from moe_compiler.passes import match_moe, replace
from moe_compiler.runtime import capture, cpu_target
from tests.models import styles

NO_INDUCTOR = ("inductor",)
BLOCK = "gathered_einsum"


@pytest.fixture
def block():
    return styles.build(BLOCK)


def run(module, *args, **options):
    """Compile for moeflex and run, without Inductor unless `disable` says otherwise."""
    options.setdefault("disable", NO_INDUCTOR)
    compiled = torch.compile(module, backend=moe_compiler.moeflex, options=options)
    with torch.no_grad():
        return compiled(*args)


def check(module, x, **options):
    y = run(module, x, **options)
    with torch.no_grad():
        torch.testing.assert_close(y, module(x), rtol=1e-4, atol=1e-5)
    report = moe_compiler.last_report()
    assert report is not None
    return report


def one_graph(module, x):
    """The graph of a module as a backend receives it."""
    with torch.no_grad():
        ((gm, inputs),) = capture.capture_graphs(module, (x,))
    return gm, inputs


def has_op(callable_):
    """Whether our op is in the graph of a callable that ran without Inductor."""
    return "moeflex.moe_layer" in str(callable_.__self__.graph)


def test_a_block_is_found_and_replaced(block):
    report = check(block, styles.rows())
    assert report.placements == ("cpu",)
    assert report.num_replaced == 1
    assert report.refused == ()
    assert report.regions[0].experts.num_experts == block.num_experts
    assert [name for name, _ in report.stage_seconds] == list(pipeline.STAGES)
    assert report.seconds > 0


def test_the_op_is_in_the_graph_and_the_experts_are_gone(block):
    gm, inputs = one_graph(block, styles.rows())
    compiled = pipeline.run(gm, inputs, Options(disable=NO_INDUCTOR))
    code = str(compiled.__self__.graph)
    assert code.count("moeflex.moe_layer") == 1
    assert "tkih" not in code


def test_analyse_edits_nothing(block):
    gm, inputs = one_graph(block, styles.rows())
    before = str(gm.graph)
    report = moe_compiler.analyse(gm, inputs, Options())
    assert str(gm.graph) == before
    assert len(report.regions) == 1
    assert report.placements == ("cpu",)
    assert moe_compiler.last_report() is not report


@pytest.mark.parametrize("stage", ["match", "plan", "build", "replace"])
def test_a_disabled_stage_leaves_the_block_to_inductor(block, stage):
    report = check(block, styles.rows(), disable=(stage, "inductor"))
    assert report.num_replaced == 0
    assert stage not in dict(report.stage_seconds)


def test_all_ours_disabled(block):
    gm, inputs = one_graph(block, styles.rows())
    options = Options(disable=("match", "plan", "build", "replace", "inductor"))
    assert not has_op(pipeline.run(gm, inputs, options))


def test_a_model_without_moe_is_not_searched(monkeypatch):
    monkeypatch.setattr(match_moe, "find_regions", lambda *_: pytest.fail("searched"))
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2), nn.Softmax(-1))
    report = check(model, torch.ones(3, 4))
    assert report.regions == ()
    assert report.num_nodes > 0


@pytest.mark.parametrize("name", [*styles.STYLES, *styles.LOOKALIKES])
def test_the_cheap_look_lets_every_block_through(name):
    if name == "soft_mixture":
        pytest.skip("selects nothing")
    with torch.no_grad():
        graphs = capture.capture_graphs(styles.build(name), (styles.rows(),))
    assert any(pipeline.may_hold_moe(gm) for gm, _ in graphs)


def ours(caplog):
    """Warnings of ours: torch's own loggers write into the same capture."""
    return [
        record
        for record in caplog.records
        if record.name.startswith("moe_compiler") and record.levelno >= logging.WARNING
    ]


def broken(*_args, **_kwargs):
    raise ZeroDivisionError("a fault of ours")


@pytest.mark.parametrize(
    ("module", "name", "stage"),
    [
        (match_moe, "find_regions", "match"),
        (pipeline, "place", "plan"),
        (pipeline, "Builds", "build"),
        (replace, "replace_region", "replace"),
        (pipeline, "_copy_graph", "replace"),
    ],
)
def test_a_broken_stage_never_breaks_the_model(block, monkeypatch, caplog, module, name, stage):
    monkeypatch.setattr(pipeline, "_logged_failures", set())
    monkeypatch.setattr(module, name, broken)
    with caplog.at_level(logging.WARNING, logger="moe_compiler"):
        report = check(block, styles.rows())
    assert report.num_replaced == 0
    (record,) = ours(caplog)
    assert f"stage '{stage}' failed" in record.getMessage()
    assert "a fault of ours" in record.getMessage()
    assert record.exc_info
    assert any(f"stage '{stage}' failed" in note for note in report.notes)


def test_a_replacement_that_fails_half_way_leaves_the_graph_as_it_came(block, monkeypatch):
    monkeypatch.setattr(pipeline, "_logged_failures", set())
    real = replace.replace_region

    def half_way(*args, **kwargs):
        real(*args, **kwargs)
        broken()

    monkeypatch.setattr(replace, "replace_region", half_way)
    gm, inputs = one_graph(block, styles.rows())
    before = gm.code
    compiled = pipeline.run(gm, inputs, Options(disable=NO_INDUCTOR))
    assert compiled.__self__.code == before


def test_the_traceback_of_the_same_fault_is_logged_once(block, monkeypatch, caplog):
    monkeypatch.setattr(pipeline, "_logged_failures", set())
    monkeypatch.setattr(match_moe, "find_regions", broken)
    for rows in (3, 5):
        check(block, styles.rows(rows, 64))
        torch._dynamo.reset()
    assert [bool(record.exc_info) for record in ours(caplog)] == [True, False]


def test_strict_raises_the_fault_itself(block, monkeypatch):
    monkeypatch.setattr(match_moe, "find_regions", broken)
    gm, inputs = one_graph(block, styles.rows())
    with pytest.raises(ZeroDivisionError):
        pipeline.run(gm, inputs, Options(strict=True, disable=NO_INDUCTOR))


def test_a_block_under_activation_checkpointing_is_named(block):
    class Checkpointed(nn.Module):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    x = styles.rows(5, 64).requires_grad_()
    compiled = torch.compile(
        Checkpointed(), backend=moe_compiler.moeflex, options={"disable": NO_INDUCTOR}
    )
    torch.testing.assert_close(compiled(x), block(x), rtol=1e-4, atol=1e-5)
    (refusal,) = moe_compiler.last_report().refused
    assert "activation checkpointing" in refusal.reason


def test_strict_names_every_refused_candidate():
    gm, inputs = one_graph(styles.build("tokens_talk"), styles.rows())
    relaxed = pipeline.run(gm, inputs, Options(disable=NO_INDUCTOR))
    assert not has_op(relaxed)
    report = moe_compiler.last_report()
    assert report.refused
    gm, inputs = one_graph(styles.build("tokens_talk"), styles.rows())
    with pytest.raises(NoMatchError) as caught:
        pipeline.run(gm, inputs, Options(strict=True, disable=NO_INDUCTOR))
    for refusal in report.refused:
        assert refusal.reason in str(caught.value)


def test_a_block_that_cannot_be_cut_out_is_refused_alone(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise replace.ReplaceError("its memory is looked at elsewhere")

    monkeypatch.setattr(replace, "replace_region", refuse)
    report = check(styles.build(BLOCK), styles.rows())
    assert report.placements == ("inductor: its memory is looked at elsewhere",)
    assert report.refused[0].reason == "its memory is looked at elsewhere"


def test_a_plan_that_the_target_refuses_goes_to_inductor(block, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "unsupported", lambda *_: "too odd")
    report = check(block, styles.rows())
    assert report.placements == ("inductor: too odd",)
    assert report.refused[0].reason == "too odd"


def test_the_router_stays_outside_when_the_target_does_not_take_it(block, monkeypatch):
    asked = []

    def unsupported(plan, x_dtype, weight_dtypes):
        asked.append((plan.router.score, x_dtype, tuple(weight_dtypes)))
        return None if plan.router.score is Score.EXTERNAL else "no routers"

    monkeypatch.setattr(cpu_kernels, "unsupported", unsupported)
    assert check(block, styles.rows()).placements == ("cpu",)
    assert asked == [
        (Score.SOFTMAX, "fp32", ("fp32",) * 3),
        (Score.EXTERNAL, "fp32", ("fp32",) * 3),
    ]
    asked.clear()
    torch._dynamo.reset()
    check(block, styles.rows(), absorb_router="never")
    assert [score for score, *_ in asked] == [Score.EXTERNAL]


def test_batch_invariance_reaches_the_plan(block, monkeypatch):
    seen = []
    monkeypatch.setattr(
        cpu_kernels, "unsupported", lambda plan, *_: seen.append(plan.batch_invariant) or "no"
    )
    check(block, styles.rows(), batch_invariant=True)
    assert seen == [True, True]


def test_a_block_that_rounds_inside_is_left_to_inductor():
    class Rounds(styles.GatheredEinsum):
        def mix(self, x):
            ids, weights = self.route(x)
            up = torch.einsum("th,tkih->tki", x.bfloat16(), self.w1[ids].bfloat16()).float()
            rows = torch.einsum("tki,tkhi->tkh", torch.relu(up), self.w2[ids])
            return torch.einsum("tkh,tk->th", rows, weights)

    x = styles.rows()
    with torch.no_grad():
        assert torch.equal(run(Rounds(), x), Rounds()(x))
    report = moe_compiler.last_report()
    assert len(report.regions) + len(report.refused) >= 1
    assert all("rounds to torch.bfloat16" in placed for placed in report.placements)


def test_other_devices_are_left_to_inductor_with_a_reason(block):
    block = block.to("meta")
    gm, inputs = one_graph(block, torch.empty(5, 64, device="meta"))
    report = moe_compiler.analyse(gm, inputs, Options())
    assert all("META target" in placed for placed in report.placements)
    assert report.regions or report.refused


def test_without_a_compiler_the_op_runs_in_plain_torch_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(cpu_target, "unavailable", lambda: "no g++ on PATH")
    monkeypatch.setattr(placement, "_warned", False)
    for rows in (3, 4):
        from moe_compiler.runtime import op

        with op.plain_torch():
            report = check(styles.build(BLOCK), styles.rows(rows, 64))
        assert report.placements == ("plain torch",)
        torch._dynamo.reset()
    (record,) = ours(caplog)
    assert "run in plain torch" in record.getMessage()
    assert "no g++ on PATH" in record.getMessage()


@pytest.fixture
def failing_build(monkeypatch):
    def wait():
        raise BuildError("the compiler said no; see /tmp/log.txt")

    monkeypatch.setattr(cpu_kernels, "prepare", lambda *_: None)
    monkeypatch.setattr(cpu_target, "wait", wait)


def test_a_failed_build_gives_the_block_back(block, failing_build, caplog):
    gm, inputs = one_graph(block, styles.rows())
    before = gm.code
    compiled = pipeline.run(gm, inputs, Options(disable=NO_INDUCTOR))
    assert compiled.__self__.code == before
    with torch.no_grad():
        check(block, styles.rows())
    report = moe_compiler.last_report()
    assert report.num_replaced == 0
    assert "see /tmp/log.txt" in report.placements[0]
    assert "see /tmp/log.txt" in caplog.text


def test_a_failed_build_is_compiled_again_by_inductor(block, failing_build):
    report = check(block, styles.rows(3, 64), disable=())
    assert report.num_replaced == 0


def test_a_failed_build_under_strict_raises(block, failing_build):
    gm, inputs = one_graph(block, styles.rows())
    with pytest.raises(BuildError, match=r"see /tmp/log\.txt"):
        pipeline.run(gm, inputs, Options(strict=True, disable=NO_INDUCTOR))


def test_a_bad_option_is_no_fault_of_ours(block, monkeypatch):
    def prepare(*_):
        raise OptionError("MOEFLEX_CPU_ISA=avx512 cannot run here")

    monkeypatch.setattr(cpu_kernels, "prepare", prepare)
    gm, inputs = one_graph(block, styles.rows())
    with pytest.raises(OptionError, match="MOEFLEX_CPU_ISA"):
        pipeline.run(gm, inputs, Options(disable=NO_INDUCTOR))


def test_a_restart_that_dynamo_wants_passes_through(block, monkeypatch):
    class Restart(BaseException):
        pass

    def compile_fx(*_args, **_kwargs):
        raise Restart

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    gm, inputs = one_graph(block, styles.rows())
    with pytest.raises(Restart):
        pipeline.run(gm, inputs, Options())


def test_reports_are_kept_in_order_bounded_and_forgotten(block, monkeypatch):
    for rows in (3, 4):
        check(block, styles.rows(rows, 64), disable=NO_INDUCTOR)
        assert moe_compiler.reports()[-1] is moe_compiler.last_report()
    assert len(moe_compiler.reports()) == 2
    for _ in range(300):
        pipeline.report_module.record(pipeline.GraphReport())
    assert len(moe_compiler.reports()) == 256
    torch._dynamo.reset()
    assert moe_compiler.reports() == ()
    assert moe_compiler.last_report() is None


def test_dumps(block, tmp_path):
    check(block, styles.rows(), dump_dir=str(tmp_path))
    check(nn.Linear(64, 4), styles.rows(), dump_dir=str(tmp_path))
    first, second = sorted(tmp_path.iterdir())
    assert "einsum" in (first / "before.py").read_text()
    assert "moeflex.moe_layer" in (first / "after.py").read_text()
    report = json.loads((first / "report.json").read_text())
    assert report["regions"][0]["router"]["score"] == "softmax"
    assert report["regions"][0]["experts"]["activation"]["gate_max"] == "inf"
    assert report["placements"] == ["cpu"]
    assert not (second / "after.py").exists()


def test_a_dump_folder_that_cannot_be_written_is_no_error(block, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    check(block, styles.rows(), dump_dir=str(tmp_path / "file"))
    assert "no dump" in caplog.text


def test_the_names_of_the_stages_are_written_once():
    assert sys.modules["moe_compiler.pipeline"].STAGES[-1] == "inductor"
    methods = [name for name in vars(pipeline._Work) if name in pipeline.STAGES]
    assert methods == list(pipeline.STAGES)
