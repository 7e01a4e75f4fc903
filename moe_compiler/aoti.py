"""The call into AOTInductor: a library from an exported program, and what has to be known to run it.

AOTInductor writes zip packages of its own; they are not used, since reading one back unpickles. What is taken is the
library that it builds, without weights in it, and the file that lists the operators which the library calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from moe_compiler.artifact import TOKENS, TensorSpec
from moe_compiler.errors import ArtifactError, ToolchainError, UnsupportedError
from moe_compiler.inductor import is_missing_compiler
from moe_compiler.runtime import aoti_runner, toolchain

DEPENDENT = -2
"""Stands in a shape for a size that is computed from the token count."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompiledGraph:
    """A compiled graph.

    Attributes:
        library: path of the shared library.
        calls: path of the list of operators that it calls; None when it calls none.
        inputs: tensors of a call, in order.
        outputs: tensors of a result, in order.
        result: "tensor" | "tuple" | "dict".
        constants: name in the library -> name in the model, and the value.
        cpu_features: what the library needs of the CPU.
    """

    library: str
    calls: str | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    result: str
    constants: Mapping[str, tuple[str, torch.Tensor]]
    cpu_features: frozenset[str]


# GCC's and clang's levels of x86-64 (System V ABI), as Linux names their features.
_V3 = frozenset("avx avx2 bmi1 bmi2 f16c fma movbe abm xsave".split())
_LEVELS = {
    "avx2": ("x86-64-v3", 256, _V3),
    "avx512": (
        "x86-64-v4",
        512,
        _V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split()),
    ),
}
# What AOTI_CPU_ISA of a library's metadata stands for.
_ISA_WORDS = {
    "AVX2": frozenset("avx2 fma f16c".split()),
    "AVX512": frozenset("avx512f avx512dq avx512vl avx512bw".split()),
    "AVX512_VNNI": frozenset(["avx512_vnni"]),
    "AVX10_2": frozenset(["avx10_2"]),
    "AMX_TILE": frozenset("amx_tile amx_bf16 amx_int8".split()),
    "AMX_FP16": frozenset(["amx_fp16"]),
}


def compile_program(program: torch.export.ExportedProgram, cpu_isa: str) -> CompiledGraph:
    """Compile an exported program for CPUs.

    Args:
        program: the program, our op already in it.
        cpu_isa: "native" | "avx2" | "avx512".

    Raises:
        ToolchainError: Inductor found no C++ compiler.
        UnsupportedError: this torch cannot do what is asked.
        ArtifactError: the program holds what an artifact cannot.
    """
    inputs, outputs, result = _schema(program)
    args, kwargs = program.example_inputs
    module: Any = program.module(check_guards=False)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            files: Any = torch._inductor.aot_compile(
                module, args, kwargs, options=_configuration(cpu_isa)
            )
    except Exception as error:
        if is_missing_compiler(error):
            raise ToolchainError(
                f"AOTInductor needs a C++ compiler and found none ({error}). Install one "
                "(Debian/Ubuntu: apt-get install g++), or set CXX to one."
            ) from error
        raise
    library = _one(files, ".so")
    assert library is not None
    calls = os.path.splitext(library)[0] + ".json"
    calls_wanted = calls if os.path.exists(calls) else None
    return CompiledGraph(
        library=library,
        calls=calls_wanted,
        inputs=inputs,
        outputs=outputs,
        result=result,
        constants=_constants(library, files, program),
        cpu_features=_features(cpu_isa, library, files),
    )


def _configuration(cpu_isa: str) -> dict[str, Any]:
    from torch._inductor import config

    wanted: dict[str, Any] = {
        "aot_inductor.package": True,
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.package_constants_on_disk_format": "pickle_weights",
    }
    if cpu_isa != "native":
        march, width, _ = _LEVELS[cpu_isa]
        wanted |= {"cpp.march": march, "cpp.simdlen": width}
    known: Any = config
    for name in wanted:
        if not hasattr(known, name) and name not in known.get_config_copy():
            raise UnsupportedError(
                f"torch {torch.__version__} lacks Inductor's setting {name}, which "
                + (
                    "--cpu-isa needs; leave that option out, the artifact then runs on CPUs like this one"
                    if name.startswith("cpp.")
                    else "moeflex compile needs; it is there from torch 2.11 on"
                )
            )
    return wanted


def _one(files: Any, suffix: str) -> str | None:
    """The file of that kind: the library of the wrapper comes last."""
    found = [name for name in files if isinstance(name, str) and name.endswith(suffix)]
    return found[-1] if found else None


def _constants(
    library: str, files: Any, program: torch.export.ExportedProgram
) -> dict[str, tuple[str, torch.Tensor]]:
    values: dict[str, torch.Tensor] = {}
    for part in files:
        if isinstance(part, Mapping):
            values |= {name: entry[0] for name, entry in part.items()}
    known: dict[str, Any] = {**program.constants, **program.state_dict}
    found = {}
    for name, source in (
        aoti_runner.open_library(library).get_constant_names_to_original_fqns().items()
    ):
        value = known.get(source, values.get(name))
        if not isinstance(value, torch.Tensor):
            raise ArtifactError(
                f"the compiled graph reads the constant {source or name}, whose value is not in the model: this is "
                "a fault of moeflex; please report it"
            )
        found[name] = (source or name, value.detach())
    return found


def _features(cpu_isa: str, library: str, files: Any) -> frozenset[str]:
    if cpu_isa == "native":
        found = toolchain.code_features()
    else:
        found = _LEVELS[cpu_isa][2]
    for name in files:
        if isinstance(name, str) and name.endswith("_metadata.json"):
            with open(name, encoding="utf-8") as file:
                words = str(json.load(file).get("AOTI_CPU_ISA", "")).split()
            for word in words:
                found |= _ISA_WORDS.get(word, frozenset())
    return found


def _schema(
    program: torch.export.ExportedProgram,
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...], str]:
    nodes = {node.name: node for node in program.graph_module.graph.nodes}
    signature = program.graph_signature
    mutated = signature.buffers_to_mutate or signature.user_inputs_to_mutate
    if mutated:
        raise UnsupportedError(
            f"the model writes to {', '.join(sorted(map(str, mutated.values())))}; an artifact holds models whose "
            "forward changes nothing. Return the new value instead."
        )
    inputs = [
        _spec(name, nodes[name])
        for name in signature.user_inputs
        if isinstance(name, str) and isinstance(nodes[name].meta.get("val"), torch.Tensor)
    ]
    tokens = next((s for node in inputs for s in node[1] if isinstance(s, torch.SymInt)), None)
    result, names = _result(program)
    outputs = []
    for name, output in zip(names, signature.user_outputs, strict=True):
        if not isinstance(output, str) or not isinstance(
            nodes[output].meta.get("val"), torch.Tensor
        ):
            raise UnsupportedError(
                f"the result {name or output!r} is no tensor; an artifact returns tensors only"
            )
        outputs.append((name, *_spec(name, nodes[output])[1:]))
    return (
        tuple(_frozen(entry, tokens) for entry in inputs),
        tuple(_frozen(entry, tokens) for entry in outputs),
        result,
    )


def _spec(name: str, node: fx.Node) -> tuple[str, tuple[Any, ...], torch.dtype]:
    value = node.meta["val"]
    return name, tuple(value.shape), value.dtype


def _frozen(
    entry: tuple[str, tuple[Any, ...], torch.dtype], tokens: torch.SymInt | None
) -> TensorSpec:
    name, shape, dtype = entry

    def size(value: Any) -> int:
        if not isinstance(value, torch.SymInt):
            return int(value)
        same = tokens is not None and str(value.node.expr) == str(tokens.node.expr)
        return TOKENS if same else DEPENDENT

    return TensorSpec(
        name=name, dtype=str(dtype).removeprefix("torch."), shape=tuple(map(size, shape))
    )


def _result(program: torch.export.ExportedProgram) -> tuple[str, tuple[str, ...]]:
    """The kind of a call's result, and the names of its tensors."""
    spec = program.call_spec.out_spec
    assert spec is not None
    marks = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    if isinstance(marks, int):
        return "tensor", ("",)
    if isinstance(marks, Mapping):
        return "dict", tuple(_paths(marks))
    if isinstance(marks, tuple | list):
        return "tuple", tuple(_paths(marks))
    raise UnsupportedError(
        f"the model returns a {type(marks).__name__}; an artifact returns a tensor, a tuple or a dict of tensors"
    )


def _paths(value: Any) -> list[str]:
    """Names of the leaves; those of nested containers are joined with dots."""
    if isinstance(value, int):
        return [""]
    if isinstance(value, Mapping):
        entries = [(str(key), entry) for key, entry in value.items()]
    elif isinstance(value, tuple | list):
        entries = [(str(index), entry) for index, entry in enumerate(value)]
    else:
        raise UnsupportedError(
            f"a {type(value).__name__} is in the model's result; an artifact returns tensors in tuples and dicts. "
            "For a language model, ask for no cache (use_cache=False)."
        )
    return [f"{key}.{rest}".rstrip(".") for key, entry in entries for rest in _paths(entry)]
