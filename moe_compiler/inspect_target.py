"""Turn what the user names into a module and example inputs: `MODULE:FACTORY`, or a Hugging Face `config.json`.

A config is built on the meta device: no weight is allocated, whatever the size of the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from moe_compiler.errors import InspectError, OptionError, UnsupportedError
from moe_compiler.reference import DTYPES

PHASES = ("prefill", "decode")
TRACE_TOKENS = 64
"""Tokens of the example input where the token count is dynamic; no size of a model should equal it by accident."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A module and what to call it with.

    Attributes:
        module: the model.
        args: positional example inputs.
        kwargs: keyword example inputs.
        phase: "prefill" | "decode" | "given".
        input_note: the inputs, in words.
        token_axis: the axis of `args[0]` that is the token count; None when the user gave the inputs.
        notes: what the reader should know.
        weights_note: where the weights came from, in words.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    phase: str
    input_note: str
    token_axis: int | None
    notes: tuple[str, ...] = ()
    weights_note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """How to build a target.

    Attributes:
        phase: "prefill": one sequence of T tokens; "decode": T sequences of one token, without a cache.
        num_tokens: T of the example input.
        experts_implementation: of transformers, "" for the model's own choice.
        dtype: "bf16" | "fp16" | "fp32" | "fp64"; "" for that of the config (bf16 where it has none) or the module's.
        meta: call a factory under `torch.device("meta")`.
        with_weights: build a configuration with weights: those of the checkpoint beside it, or else random ones.
    """

    phase: str = "prefill"
    num_tokens: int = TRACE_TOKENS
    experts_implementation: str = ""
    dtype: str = ""
    meta: bool = False
    with_weights: bool = False


def load_target(text: str, options: TargetOptions) -> Target:
    """Build what `text` names.

    Raises:
        InspectError: it cannot be found, built or called.
        OptionError: an option does not fit it.
    """
    if options.phase not in PHASES:
        raise OptionError(f"--phase takes {' or '.join(PHASES)}; got {options.phase!r}")
    if options.dtype and options.dtype not in DTYPES:
        raise OptionError(f"--dtype takes one of {', '.join(DTYPES)}; got {options.dtype!r}")
    path = Path(text)
    if path.is_dir() or path.suffix == ".json":
        return _from_config(path, options)
    if ":" not in text:
        raise InspectError(
            f"the target is MODULE:FACTORY, FILE.py:FACTORY, a config.json or the folder of one; got {text!r}, "
            "which is none of them"
        )
    return _from_factory(text, options)


def load_cpu_target(text: str, options: TargetOptions, what: str, advice: str = "") -> Target:
    """`load_target` of a model whose weights lie on a CPU.

    Args:
        text: what to build.
        options: how.
        what: begins the error: "... on CPUs; the model lies on cuda".
        advice: a sentence that ends it.

    Raises:
        InspectError, OptionError: see `load_target`.
        UnsupportedError: a weight lies elsewhere.
    """
    target = load_target(text, options)
    devices = {p.device.type for p in target.module.parameters()}
    if devices - {"cpu"}:
        problem = f"{what} on CPUs; the model lies on {', '.join(sorted(devices))}"
        raise UnsupportedError(f"{problem}. {advice}" if advice else problem)
    return target


def _from_config(path: Path, options: TargetOptions) -> Target:
    path = path / "config.json" if path.is_dir() else path
    fields = _read_config(path)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers
    except ImportError as error:
        raise InspectError(
            f'{path} is a Hugging Face configuration and needs transformers ({error}); pip install "moeflex[hf]"'
        ) from error
    notes = []
    try:
        config = transformers.AutoConfig.from_pretrained(str(path))
    except Exception as error:
        raise InspectError(
            f"transformers {transformers.__version__} cannot read {path}: {_line(error)}"
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        method = fields.get("quantization_config", {}).get("quant_method", "quantized")
        notes.append(
            f"the checkpoint stores {method} weights; inspected as if they were not quantized"
        )
        del config.quantization_config
    dtype = DTYPES[options.dtype] if options.dtype else _config_dtype(config)
    if not options.with_weights:
        module = _build(transformers, config, dtype, options, "meta")
        return _hf_target(module, options, tuple(notes))
    if next(path.parent.glob("*.safetensors"), None) is not None:
        module = _load_checkpoint(transformers, path.parent, dtype, options)
        note = f"the checkpoint in {path.parent.name or path.parent}"
    else:
        torch.manual_seed(0)
        module = _build(transformers, config, dtype, options, "cpu")
        note = "random, seed 0: there is no checkpoint beside the configuration"
    return dataclasses.replace(_hf_target(module, options, tuple(notes)), weights_note=note)


def _load_checkpoint(
    transformers: Any, folder: Path, dtype: torch.dtype, options: TargetOptions
) -> nn.Module:
    try:
        module = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, **_experts_argument(options)
        )
    except Exception as error:
        raise InspectError(
            f"transformers {transformers.__version__} cannot load the checkpoint in {folder}: {_line(error)}"
        ) from error
    assert isinstance(module, nn.Module)
    return module.eval()


def _experts_argument(options: TargetOptions) -> dict[str, Any]:
    name = options.experts_implementation
    return {"experts_implementation": name} if name else {}


def _read_config(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InspectError(f"no configuration can be read at {path}: {error.strerror}") from error
    except ValueError as error:
        raise InspectError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise InspectError(
            f"{path} has no `model_type`: it is not the config.json of a Hugging Face model"
        )
    return fields


def _config_dtype(config: Any) -> torch.dtype:
    found = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    found = getattr(torch, found, None) if isinstance(found, str) else found
    return found if isinstance(found, torch.dtype) and found.is_floating_point else torch.bfloat16


def _build(
    transformers: Any, config: Any, dtype: torch.dtype, options: TargetOptions, device: str
) -> nn.Module:
    failures = []
    text = _text_config(config)
    for candidate in (config,) if text is config else (config, text):
        try:
            with torch.device(device), _default_dtype(dtype):
                module = transformers.AutoModelForCausalLM.from_config(
                    candidate, dtype=dtype, **_experts_argument(options)
                )
        except Exception as error:
            failures.append(f"{type(candidate).__name__}: {_line(error)}")
        else:
            assert isinstance(module, nn.Module)
            return module.eval()
    raise InspectError(
        f"transformers {transformers.__version__} cannot build a causal language model from this configuration: "
        + "; ".join(failures)
    )


def _text_config(config: Any) -> Any:
    get = getattr(config, "get_text_config", None)
    return get() if get is not None else config


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _hf_target(module: nn.Module, options: TargetOptions, notes: tuple[str, ...]) -> Target:
    """A language model gets token ids: [1, T] for prefill, [T, 1] for decode."""
    shape = (1, options.num_tokens) if options.phase == "prefill" else (options.num_tokens, 1)
    device = next(module.parameters()).device
    ids = torch.zeros(shape, dtype=torch.int64, device=device)
    what = (
        "one sequence of T tokens"
        if options.phase == "prefill"
        else "T sequences of one token, no cache"
    )
    return Target(
        module=module,
        args=(ids,),
        kwargs={"use_cache": False},
        phase=options.phase,
        input_note=what,
        token_axis=1 if options.phase == "prefill" else 0,
        notes=notes,
    )


def _from_factory(text: str, options: TargetOptions) -> Target:
    module_name, _, attribute = text.rpartition(":")
    found: Any = _import(module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InspectError(
                f"{module_name} has no {part!r}; the target is MODULE:FACTORY, got {text!r}"
            )
        found = getattr(found, part)
    if not isinstance(found, nn.Module):
        found = _call(found, text, options)
    module, inputs = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(module, nn.Module):
        raise InspectError(
            f"{text} gave a {type(found).__name__}; it has to give a torch.nn.Module, or a pair "
            "(module, example_inputs)"
        )
    if options.dtype:
        module = module.to(DTYPES[options.dtype])
    if options.experts_implementation:
        _set_experts(module, options.experts_implementation)
    module = module.eval()
    note = "as the factory made them"
    if inputs is not None:
        args, kwargs = _as_arguments(inputs)
        what = "the inputs that the factory gave"
        return Target(module, args, kwargs, "given", what, None, weights_note=note)
    if _is_language_model(module):
        return dataclasses.replace(_hf_target(module, options, ()), weights_note=note)
    raise InspectError(
        f"{text} gave a {type(module).__name__} without example inputs; return (module, example_inputs), where "
        "example_inputs is a tensor, a tuple of positional or a dict of keyword arguments"
    )


def _import(name: str) -> ModuleType:
    try:
        if name.endswith(".py"):
            return _import_file(Path(name))
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        return importlib.import_module(name)
    except InspectError:
        raise
    except Exception as error:
        raise InspectError(
            f"{name} cannot be imported: {type(error).__name__}: {_line(error)}"
        ) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InspectError(f"there is no file {path}")
    name = path.stem if path.stem.isidentifier() else "inspected"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def _call(factory: Any, text: str, options: TargetOptions) -> Any:
    if not callable(factory):
        raise InspectError(
            f"{text} is a {type(factory).__name__}; it has to be a torch.nn.Module or a callable that returns one"
        )
    try:
        with torch.device("meta") if options.meta else contextlib.nullcontext():
            return factory()
    except Exception as error:
        raise InspectError(
            f"{text} was called without arguments and raised {type(error).__name__}: {_line(error)}"
        ) from error


def _as_arguments(inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), inputs
    if isinstance(inputs, (tuple, list)):
        if (
            len(inputs) == 2
            and isinstance(inputs[0], (tuple, list))
            and isinstance(inputs[1], Mapping)
        ):
            return tuple(inputs[0]), inputs[1]
        return tuple(inputs), {}
    return (inputs,), {}


def _set_experts(module: nn.Module, name: str) -> None:
    setter = getattr(module, "set_experts_implementation", None)
    if setter is None:
        raise OptionError(
            f"--experts-implementation is a choice of transformers; {type(module).__name__} does not offer it"
        )
    try:
        setter(name)
    except (ValueError, KeyError, TypeError) as error:
        raise OptionError(f"--experts-implementation {name}: {_line(error)}") from error


def _is_language_model(module: nn.Module) -> bool:
    return hasattr(module, "get_input_embeddings") and hasattr(module, "config")


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
