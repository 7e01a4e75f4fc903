"""The environment switches and the options of `torch.compile`."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_compiler import options, pipeline, settings
from moe_compiler.errors import OptionError
from moe_compiler.settings import SWITCHES, Settings


def resolve(given=None, mode=None, environ=()):
    return options.resolve(given, mode, settings.parse(dict(environ)), pipeline.STAGES)


def test_defaults():
    assert settings.parse({}) == Settings()
    assert resolve() == options.Options()


def test_every_switch_is_read():
    values = {
        "MOEFLEX_CACHE_DIR": "/c",
        "MOEFLEX_DUMP_DIR": "/d",
        "MOEFLEX_DISABLE": "replace, match",
        "MOEFLEX_STRICT": "yes",
        "MOEFLEX_CPU_ISA": "AVX2",
    }
    assert set(values) == {switch.name for switch in SWITCHES}
    for name, value in values.items():
        assert settings.parse({name: value}) != Settings(), name
        assert settings.parse({name: ""}) == Settings(), name
    assert settings.parse(values) == Settings(
        cache_dir="/c",
        dump_dir="/d",
        disable=("replace", "match"),
        strict=True,
        cpu_isa="avx2",
    )


@pytest.mark.parametrize(
    ("name", "value", "choice"),
    [("MOEFLEX_STRICT", "perhaps", "0 or 1"), ("MOEFLEX_CPU_ISA", "avx9", "avx512_bf16")],
)
def test_a_bad_value_names_the_choices(name, value, choice):
    with pytest.raises(OptionError, match=f"{name}.*{choice}.*{value}"):
        settings.parse({name: value})


def test_a_relative_folder_is_that_of_the_start(tmp_path):
    code = (
        "import os, sys; from moe_compiler import settings; os.chdir('/');"
        "print(settings.get().cache_dir)"
    )
    environ = {**os.environ, "MOEFLEX_CACHE_DIR": "./c"}
    environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert found.stdout.strip() == str(tmp_path / "c"), found.stderr


def test_settings_are_frozen_and_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().strict = True
    assert hash(Settings()) == hash(settings.parse({}))


def test_an_option_wins_over_its_switch():
    environ = {"MOEFLEX_STRICT": "1", "MOEFLEX_DUMP_DIR": "/d", "MOEFLEX_DISABLE": "build"}
    assert resolve(environ=environ).strict
    found = resolve({"strict": False, "dump_dir": "/e", "disable": "match"}, environ=environ)
    assert (found.strict, found.dump_dir, found.disable) == (False, "/e", ("match",))


def test_disabled_stages():
    assert resolve({"disable": ["replace", "match"]}).disable == ("match", "replace")
    assert resolve({"disable": "all, inductor"}).disable == pipeline.STAGES[1:]
    assert resolve({"disable": "all"}).disable == ("match", "plan", "build", "replace")
    everything = resolve(environ={"MOEFLEX_DISABLE": "all"}).disable
    assert everything == tuple(name for name in pipeline.STAGES if name != "inductor")
    with pytest.raises(OptionError, match=r"MOEFLEX_DISABLE.*match.*'matsch'"):
        resolve(environ={"MOEFLEX_DISABLE": "matsch"})
    with pytest.raises(OptionError, match="MOEFLEX_DISABLE=capture"):
        resolve({"disable": ("capture",)})
    with pytest.raises(OptionError, match="tuple of names"):
        resolve({"disable": 3})


def test_unknown_option_names_near_misses_of_both_kinds():
    with pytest.raises(OptionError, match=r"'strct'.*did you mean 'strict'"):
        resolve({"strct": True})
    with pytest.raises(OptionError, match=r"did you mean 'max_autotune'"):
        resolve({"max_autotun": True})
    with pytest.raises(OptionError, match=r"batch_invariant.*every key of torch._inductor.config"):
        resolve({"zzzzzz": 1})


def test_options_of_inductor_are_passed_on():
    found = resolve({"max-autotune": True, "triton.cudagraphs": False, "strict": True})
    assert found.inductor == (("max_autotune", True), ("triton.cudagraphs", False))
    assert options.inductor_patches(found) == {"max_autotune": True, "triton.cudagraphs": False}


@pytest.mark.parametrize(
    "given",
    [
        {"strict": 1},
        {"batch_invariant": "yes"},
        {"absorb_router": True},
        {"target": "tpu"},
        {"dump_dir": 7},
        {"max_autotune": "yes"},
        {"cpp.threads": "two"},
    ],
)
def test_a_value_of_the_wrong_type_is_refused(given):
    (name,) = given
    with pytest.raises(OptionError, match=name):
        resolve(given)


def test_mode_becomes_options_of_inductor():
    assert options.inductor_patches(resolve(mode="default")) == {}
    assert options.inductor_patches(resolve(mode="max-autotune"))["max_autotune"] is True
    # torch.compile takes either mode or options; ours may hold both
    both = resolve({"mode": "max-autotune", "coordinate_descent_tuning": False})
    assert options.inductor_patches(both)["max_autotune"] is True
    assert options.inductor_patches(both)["coordinate_descent_tuning"] is False
    with pytest.raises(OptionError, match=r"reduce-overhead.*'fast'"):
        resolve(mode="fast")
    with pytest.raises(OptionError, match="differ"):
        resolve({"mode": "max-autotune"}, mode="reduce-overhead")
