"""The face of the backend: how torch finds it, what it takes, what it leaves in caches and logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import moe_compiler
from moe_compiler import inductor, settings
from moe_compiler.options import Options
from tests.models import styles

BLOCK = "gathered_einsum"

# The block's graph has no pointwise kernel for Inductor: nothing but the op has to be built.
CHILD = """
import json, os, sys, torch
from torch._dynamo.utils import counters
from tests.models import styles
if "digest" in os.environ:
    from moe_compiler import inductor
    inductor.source_digest = lambda: os.environ["digest"]
block = styles.build("gathered_einsum")
compiled = torch.compile(block, backend="moeflex", options=json.loads(os.environ["options"]))
x = styles.rows(6, 64)
with torch.no_grad():
    torch.testing.assert_close(compiled(x), block(x), rtol=1e-4, atol=1e-5)
y = compiled(x)
y.sum().backward()
import moe_compiler
print(json.dumps({
    "hit": counters["aot_autograd"]["autograd_cache_hit"],
    "miss": counters["aot_autograd"]["autograd_cache_miss"],
    "bypass": counters["aot_autograd"]["autograd_cache_bypass"],
    "fx_hit": counters["inductor"]["fxgraph_cache_hit"],
    "fx_miss": counters["inductor"]["fxgraph_cache_miss"],
    "replaced": [report.num_replaced for report in moe_compiler.reports()],
    "notes": [report.notes for report in moe_compiler.reports()],
}))
"""


def child(code, **environ):
    """Run code in a fresh interpreter; its output, and its standard error."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd(), **environ}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


def compiled_in_child(cache, options=None, **environ):
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(cache), **environ}
    out, _ = child(CHILD, options=json.dumps(options or {}), **environ)
    return json.loads(out.splitlines()[-1])


def test_torch_finds_the_backend_without_an_import_and_imports_it_late():
    out, _ = child(
        "import sys, torch\n"
        "assert 'moeflex' in torch._dynamo.list_backends(None)\n"
        "assert 'moe_compiler.backend' not in sys.modules\n"
        "compiled = torch.compile(torch.nn.Linear(4, 4), backend='moeflex',"
        " options={'disable': ('inductor',)})\n"
        "print(tuple(compiled(torch.ones(2, 4)).shape))\n"
        "assert 'moe_compiler.passes.match_moe' not in sys.modules\n"
        "assert 'transformers' not in sys.modules\n"
    )
    assert out.strip() == "(2, 4)"


def test_the_package_imports_without_torch():
    child(
        "import sys, moe_compiler\n"
        "assert 'torch' not in sys.modules\n"
        "import moe_compiler.passes, moe_compiler.codegen, moe_compiler.runtime\n"
        "import moe_compiler.templates\n"
        "assert 'torch' not in sys.modules\n"
    )


def test_names_of_the_package():
    for name in moe_compiler.__all__:
        assert getattr(moe_compiler, name) is not None
    assert set(moe_compiler.__all__) <= set(dir(moe_compiler))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        moe_compiler.nonsense  # noqa: B018


def test_torch_logs_shows_match_plan_and_build():
    _, err = child(CHILD, options='{"disable": ["inductor"]}', TORCH_LOGS="+moe_compiler")
    for text in ("matched", "softmax>top2>sum", "-> cpu", "as moeflex::moe_layer", "build"):
        assert text in err, text


def test_quiet_without_torch_logs():
    _, err = child(CHILD, options='{"disable": ["inductor"]}')
    assert "moe" not in err.lower()


def test_wrong_option_is_named_to_the_user():
    compiled = torch.compile(nn.Linear(4, 4), backend="moeflex", options={"strickt": True})
    with pytest.raises(Exception, match=r"unknown option 'strickt': did you mean 'strict'"):
        compiled(torch.ones(2, 4))


@pytest.fixture
def calls(monkeypatch):
    """What Inductor is called with; it returns the graph as it stands."""
    seen = []

    def compile_fx(gm, example_inputs, inner_compile=None, config_patches=None):
        tag = torch.compiler.config.cache_key_tag
        seen.append({"patches": config_patches, "tag": tag, "inner": inner_compile})
        return gm.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    return seen


def test_mode_and_options_reach_inductor(calls):
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    torch.compile(model, backend="moeflex")(x)
    torch._dynamo.reset()
    torch.compile(model, backend="moeflex", mode="max-autotune")(x)
    torch._dynamo.reset()
    torch.compile(model, backend="moeflex", options={"epilogue_fusion": False})(x)
    assert calls[0]["patches"] is None
    assert calls[1]["patches"]["max_autotune"] is True
    assert calls[2]["patches"] == {"epilogue_fusion": False}


def test_inductor_probes_the_cpu_beside_our_passes(calls, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "torch._inductor.cpu_vec_isa.valid_vec_isa_list",
        lambda: asked.append(threading.current_thread().name),
    )
    inductor._probe.cache_clear()
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    torch.compile(model, backend="moeflex", options={"cpp.simdlen": 0})(x)
    assert not inductor._probe.cache_info().currsize, "the settings decide what the answers are"
    for _ in range(2):
        torch._dynamo.reset()
        torch.compile(model, backend="moeflex")(x)
    inductor._probe().join()
    assert asked == ["moeflex-probe"]


def test_a_probe_that_fails_is_no_error(calls, monkeypatch):
    def fail():
        raise OSError("no processes left")

    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", fail)
    inductor._probe.cache_clear()
    torch.compile(nn.Linear(4, 4), backend="moeflex")(torch.ones(2, 4))
    inductor._probe().join()
    assert len(calls) == 1


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_every_mode_computes(mode):
    block, x = styles.build(BLOCK), styles.rows(5, 64)
    with torch.no_grad():
        y = torch.compile(block, backend="moeflex", mode=mode)(x)
        torch.testing.assert_close(y, block(x), rtol=1e-4, atol=1e-5)


def test_only_graphs_with_our_op_have_cache_keys_of_their_own(calls):
    torch.compile(nn.Linear(4, 4), backend="moeflex")(torch.ones(2, 4))
    with torch.no_grad():
        torch.compile(styles.build(BLOCK), backend="moeflex")(styles.rows(5, 64))
    assert calls[0]["tag"] == ""
    assert inductor.source_digest() in calls[1]["tag"]
    assert torch.compiler.config.cache_key_tag == ""


def test_cache_tag_covers_the_options_that_matter():
    def tag(**options):
        with inductor.cache_tag(Options(**options))():
            return torch.compiler.config.cache_key_tag

    assert tag() == tag(dump_dir="/tmp", strict=True)
    tags = {tag(), tag(batch_invariant=True), tag(absorb_router="never"), tag(target="triton")}
    assert len(tags) == 4


def test_source_digest_covers_every_room(monkeypatch):
    seen = []
    real = open

    def record(path, *args, **kwargs):
        seen.append(str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", record)
    inductor.source_digest.__wrapped__()
    for name in ("ir.py", "passes/match_moe.py", "codegen/cpu.py", "runtime/op.py"):
        assert any(path.endswith(f"moe_compiler/{name}") for path in seen), name
    assert any("templates" in path and path.endswith(".h") for path in seen)
    assert not any("__pycache__" in path for path in seen)


@pytest.mark.slow
def test_second_process_hits_the_caches_and_a_change_of_ours_misses(tmp_path):
    first = compiled_in_child(tmp_path, digest="these sources")
    assert first["replaced"] == [1, 1]
    assert first["bypass"] == 0
    assert first["miss"] == 2
    second = compiled_in_child(tmp_path, digest="these sources")
    assert second["replaced"] == [1, 1]
    assert (second["hit"], second["miss"], second["fx_miss"]) == (2, 0, 0)
    changed = compiled_in_child(tmp_path, digest="other sources")
    assert (changed["hit"], changed["fx_hit"]) == (0, 0)
    options = compiled_in_child(tmp_path, {"batch_invariant": True}, digest="these sources")
    assert options["hit"] == 0


def test_without_a_cxx_compiler_the_model_still_runs(tmp_path):
    _, err = child(
        "import torch, moe_compiler\n"
        "from tests.models import styles\n"
        "for model in (styles.build('gathered_einsum'), torch.nn.Sequential(torch.nn.GELU())):\n"
        "    compiled, x = torch.compile(model, backend='moeflex'), styles.rows(6, 64)\n"
        "    x.requires_grad_()\n"
        "    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)\n"
        "    compiled(x).sum().backward()\n"
        "    assert x.grad is not None\n"
        "    print(moe_compiler.last_report().placements)\n",
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"),
        MOEFLEX_CACHE_DIR=str(tmp_path / "ours"),
        CXX="/nonexistent/c++",
        PATH="/nonexistent",
    )
    assert err.count("apt-get install g++") == 1, err


def test_disabled_capture_and_stages_by_the_environment():
    code = (
        "import torch, moe_compiler\n"
        "from tests.models import styles\n"
        "model, x = styles.build('gathered_einsum'), styles.rows(6, 64)\n"
        "y = torch.compile(model, backend='moeflex', options={'max_autotune': False})\n"
        "with torch.no_grad(): y(x)\n"
        "report = moe_compiler.last_report()\n"
        "print(len(report.regions), [name for name, _ in report.stage_seconds])\n"
    )
    out, _ = child(code, MOEFLEX_DISABLE="all,inductor")
    assert out.strip() == "0 ['inductor']"


def test_a_bad_switch_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setenv("MOEFLEX_STRICT", "maybe")
    settings.get.cache_clear()
    try:
        with pytest.raises(Exception, match="MOEFLEX_STRICT takes 0 or 1"):
            torch.compile(nn.Linear(4, 4), backend="moeflex")(torch.ones(2, 4))
    finally:
        monkeypatch.undo()
        settings.get.cache_clear()


def test_dynamic_scalar_restarts_the_analysis():
    block = styles.build(BLOCK)

    @torch.compile(backend="moeflex", dynamic=True)
    def scaled(x, factor):
        return block(x) * factor

    x = styles.rows(6, 64)
    with torch.no_grad():
        for factor in (1.5, 2.5, -3.25):
            torch.testing.assert_close(scaled(x, factor), block(x) * factor, rtol=1e-4, atol=1e-5)
