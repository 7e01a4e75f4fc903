"""`moeflex compile`: a model becomes one file that runs elsewhere.

```
build     inspect_target.py      MODULE:FACTORY or config.json -> module, example inputs
export    inspect_capture.py     torch.export, the token count a symbol
edit      pipeline.edit_exported the same passes as torch.compile: match, plan, build, replace
compile   AOTInductor            the rest of the graph -> model.so
package   runtime/container.py   code, kernels, weights, manifest -> model.mflx
```
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from moe_compiler import __version__, cpu_kernels, pipeline, settings
from moe_compiler import options as options_module
from moe_compiler.aoti import CompiledGraph, compile_program
from moe_compiler.artifact import (
    CALLS,
    CODE,
    FORMAT,
    OP_LIBRARY,
    WEIGHTS,
    Block,
    Constant,
    Kernel,
    Manifest,
    MemberEntry,
    Requirements,
    Weights,
)
from moe_compiler.errors import InspectError, OptionError, UnsupportedError
from moe_compiler.inspect_target import TRACE_TOKENS, Target, TargetOptions, load_target
from moe_compiler.placement import Placement
from moe_compiler.report import GraphReport
from moe_compiler.runtime import capture, container, cpu_target, tensor_file, toolchain
from moe_compiler.targets import CPU, Device

log = logging.getLogger(__name__)

TARGETS = ("cpu", "sm_90a")
LAYOUTS = ("single", "ep", "tp")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to compile, and how.

    Attributes:
        model: `MODULE:FACTORY`, `FILE.py:FACTORY`, a `config.json` or its folder.
        output: path of the artifact.
        tokens: smallest and largest token count; equal ones make it static.
        axis: of the first input (and of those of equal length there) that is the token count, where the factory gave
            the inputs; a language model knows its own.
        dtype: "bf16" | "fp16" | "fp32" | "fp64"; "" for the model's own.
        target: one of `TARGETS`.
        layouts: some of `LAYOUTS`.
        weights: "inside" | "outside": in the artifact, or in a safetensors file beside it.
        cpu_isa: "native" | "avx2" | "avx512": what the CPU must have.
        experts_implementation: of transformers, "" for the model's own.
        strict: a block that is left to Inductor is an error.
    """

    model: str
    output: str
    tokens: tuple[int, int] = (1, 8192)
    axis: int = 0
    dtype: str = ""
    target: str = "cpu"
    layouts: tuple[str, ...] = ("single",)
    weights: str = "inside"
    cpu_isa: str = "native"
    experts_implementation: str = ""
    strict: bool = False

    def check(self) -> None:
        """Check the values.

        Raises:
            OptionError: one cannot be used.
            UnsupportedError: one is valid and not built yet.
        """
        for name, choices in (
            ("target", TARGETS),
            ("weights", ("inside", "outside")),
            ("cpu_isa", ("native", "avx2", "avx512")),
        ):
            if getattr(self, name) not in choices:
                option = "--" + name.replace("_", "-")
                raise OptionError(
                    f"{option} takes one of {', '.join(choices)}; got {getattr(self, name)!r}"
                )
        first, last = self.tokens
        if not 1 <= first <= last:
            raise OptionError(
                f"--tokens takes one count or a range such as 1:8192; got {first}:{last}"
            )
        if not self.layouts or set(self.layouts) - set(LAYOUTS):
            raise OptionError(
                f"--layouts takes some of {', '.join(LAYOUTS)}; got {', '.join(self.layouts) or 'none'}"
            )
        if self.layouts != ("single",):
            raise UnsupportedError(
                "artifacts over several ranks are not built yet; --layouts takes single. For expert and tensor "
                "parallelism compile in the process: torch.compile(model, backend='moeflex', options={'group': "
                "'world', 'layouts': ('ep', 'tp')}), as examples/switch_tp_ep.py does."
            )
        if self.target != "cpu":
            raise UnsupportedError(
                "artifacts for GPUs are not built yet; --target takes cpu. On the GPU itself use "
                "torch.compile(model, backend='moeflex')."
            )


def compile_model(
    request: Request, progress: Callable[[str], None] = lambda _: None
) -> tuple[Manifest, str]:
    """Compile a model into an artifact.

    Args:
        request: what and how.
        progress: called with a short sentence at the start of each step.

    Returns:
        What the artifact says of itself, and the SHA-256 that stands for the whole file.

    Raises:
        ArtifactError: it cannot be written, or the model holds what an artifact cannot.
        InspectError: the model cannot be built or exported.
        NoMatchError: under `strict`, when a block would be left to Inductor.
        ToolchainError: there is no C++ compiler.
    """
    request.check()
    toolchain.find_compiler()
    _check_folder(request.output)
    progress(f"building {request.model}")
    target = load_target(
        request.model,
        TargetOptions(
            num_tokens=min(TRACE_TOKENS, request.tokens[1]),
            experts_implementation=request.experts_implementation,
            dtype=request.dtype,
            with_weights=True,
        ),
    )
    progress(f"exporting {type(target.module).__name__}")
    program = export(target, request)
    progress("finding and proving MoE blocks")
    options = options_module.resolve(
        {"absorb_router": "never", "strict": request.strict or settings.get().strict},
        None,
        settings.get(),
        pipeline.STAGES,
    )
    report, placements = edit_program(program, options, Device(type="cpu"))
    progress(f"compiling the graph around {report.num_replaced} MoE blocks")
    graph = compile_program(program, request.cpu_isa)
    progress("waiting for kernels")
    kernels, sources = _kernels(placements)
    progress(f"writing {request.output}")
    return _package(request, target, report, graph, kernels, sources)


def _check_folder(output: str) -> None:
    folder = Path(output).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OptionError(f"--output: the folder {folder} is not there or cannot be written to")


def export(target: Target, request: Request) -> torch.export.ExportedProgram:
    """The model as an ATen graph whose token count is a symbol.

    Raises:
        InspectError: it cannot be exported.
        OptionError: the token axis or range does not fit the inputs.
    """
    # A compiled graph knows the strides of its weights; the file stores them dense.
    with torch.no_grad():
        for tensor in (*target.module.parameters(), *target.module.buffers()):
            if not tensor.is_contiguous():
                tensor.data = tensor.data.contiguous()
    shapes = _dynamic_shapes(target, request)
    try:
        return capture.capture_export(
            target.module, target.args, target.kwargs, dynamic_shapes=shapes
        )
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise InspectError(
            f"torch.export cannot export {type(target.module).__name__} with {target.input_note} and "
            f"{request.tokens[0]} to {request.tokens[1]} tokens: {type(error).__name__}: "
            + " ".join(lines[:4])[:800]
        ) from error


def _dynamic_shapes(target: Target, request: Request) -> dict[str, Any] | None:
    """The token axis of the first tensor, and of those that are as long there, is one symbol; all else is static."""
    first, last = request.tokens
    axis = request.axis if target.token_axis is None else target.token_axis
    tensors = [a for a in (*target.args, *target.kwargs.values()) if isinstance(a, torch.Tensor)]
    if not tensors or tensors[0].ndim <= axis:
        raise OptionError(
            f"--axis {axis} is not an axis of the first input, {_shape_text(tensors)}"
        )
    count = tensors[0].shape[axis]
    if not first <= count <= last:
        raise OptionError(
            f"--tokens {first}:{last} does not hold the {count} tokens of the example input on axis {axis}"
        )
    if first == last:
        return None
    if count < 2:
        raise OptionError(
            f"an example input of one token is traced as a constant: give one with at least 2 on axis {axis}, or "
            "--tokens 1"
        )
    symbol = torch.export.Dim("tokens", min=first, max=last)

    def spec(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            dynamic = value.ndim > axis and value.shape[axis] == count
            return {axis: symbol} if dynamic else {}
        if isinstance(value, tuple | list):
            return type(value)(spec(entry) for entry in value)
        if isinstance(value, Mapping):
            return {name: spec(entry) for name, entry in value.items()}
        return None

    bound = inspect.signature(target.module.forward).bind(*target.args, **target.kwargs)
    return {name: spec(value) for name, value in bound.arguments.items()}


def _shape_text(tensors: Sequence[torch.Tensor]) -> str:
    return f"of shape {list(tensors[0].shape)}" if tensors else "and there is none"


def edit_program(
    program: torch.export.ExportedProgram, options: options_module.Options, device: Device
) -> tuple[GraphReport, tuple[Placement, ...]]:
    """Put the op into an exported program, in place; the builds that it needs are started."""
    signature = program.graph_signature
    constant = {*signature.inputs_to_parameters, *signature.inputs_to_buffers}
    constant.update(signature.inputs_to_lifted_tensor_constants)
    parameters = [
        node
        for node in program.graph_module.graph.nodes
        if node.op == "placeholder" and node.name in constant
    ]
    found = pipeline.edit_exported(program.graph_module, parameters, options, device)
    # The signature knows results by the names of their nodes; a replaced one has another.
    (results,) = program.graph_module.graph.find_nodes(op="output")[0].args
    for spec, node in zip(signature.output_specs, results, strict=True):
        if isinstance(node, fx.Node) and spec.arg.name != node.name:
            spec.arg = dataclasses.replace(spec.arg, name=node.name)
    return found


def _kernels(
    placements: Sequence[Placement],
) -> tuple[tuple[Kernel, ...], tuple[container.Source, ...]]:
    """What the op library is told, and the members that it needs."""
    found: dict[Kernel, None] = {}
    sources: dict[str, container.Source] = {}
    for placement in placements:
        if placement.target != CPU or placement.layer is None:
            continue
        layer = placement.layer
        built = cpu_kernels.built(layer.plan, layer.x_dtype, layer.weight_dtypes)
        name = f"kernels/{Path(built.path).parent.name.lower()}.so"
        if name not in sources:
            sources[name] = container.of_file(name, built.path)
        found[Kernel(member=name, plan=built.plan_key, spec=built.spec.hex())] = None
    if found:
        sources[OP_LIBRARY] = container.of_file(OP_LIBRARY, cpu_target.library_path())
    return tuple(found), tuple(sources.values())


def _package(
    request: Request,
    target: Target,
    report: GraphReport,
    graph: CompiledGraph,
    kernels: tuple[Kernel, ...],
    kernel_sources: tuple[container.Source, ...],
) -> tuple[Manifest, str]:
    sources = [container.of_file(CODE, graph.library), *kernel_sources]
    if graph.calls is not None:
        sources.insert(1, container.of_file(CALLS, graph.calls))
    constants, tensors = _weights_of(target.module, graph)
    content = container.of_chunks(WEIGHTS, tensor_file.chunks_of(tensors))
    inside = request.weights == "inside"
    beside = Path(request.output).with_suffix(".safetensors")
    if inside:
        sources.append(content)
    else:
        container.write_plain(beside, content)
    weights = Weights(
        where=request.weights,
        file=WEIGHTS if inside else beside.name,
        num_bytes=content.member.num_bytes,
        sha256=content.member.sha256,
        origin=target.weights_note,
    )
    features = set(graph.cpu_features)
    isas = {cpu_target.isa()} if kernels else set()
    for isa in isas:
        features |= cpu_target.features_of(isa)
    manifest = Manifest(
        format=FORMAT,
        moeflex=__version__,
        target=request.target,
        model=type(target.module).__name__,
        source=request.model,
        tokens=request.tokens,
        inputs=graph.inputs,
        outputs=graph.outputs,
        result=graph.result,
        requirements=Requirements(
            torch=str(torch.__version__),
            system=this_system(),
            cpu_features=tuple(sorted(features)),
        ),
        members=tuple(MemberEntry(**dataclasses.asdict(s.member)) for s in sources),
        kernels=kernels,
        constants=constants,
        weights=weights,
        blocks=tuple(
            Block(region=_timeless(region), target=title)
            for region, title in zip(report.regions, report.placements, strict=True)
        ),
        refused=report.refused,
        isa=", ".join(sorted(isas)),
        notes=(*target.notes, *report.notes),
        versions=_versions(),
    )
    return manifest, container.write(request.output, manifest.to_json(), sources)


def _timeless(region: Any) -> Any:
    """A region without what differs from run to run."""
    proof = dataclasses.replace(region.proof, seconds=0.0, peak_bytes=0, reused=False)
    return dataclasses.replace(region, proof=proof)


def _weights_of(
    module: nn.Module, graph: CompiledGraph
) -> tuple[tuple[Constant, ...], dict[str, torch.Tensor]]:
    """The constants of a compiled graph, and the tensors of the weights file; shared ones are stored once."""
    names: dict[int, list[str]] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
    shared = {name: group for group in names.values() for name in group}
    constants, tensors = [], {}
    for name, (source, tensor) in graph.constants.items():
        group = shared.get(source, [source])
        tensors[group[0]] = tensor
        constants.append(
            Constant(
                name=name,
                source=group[0],
                aliases=tuple(group[1:]),
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
            )
        )
    return tuple(constants), tensors


def this_system() -> str:
    """Operating system and machine, as artifacts name them."""
    return f"{sys.platform} {platform.machine().lower()}"


def _versions() -> tuple[tuple[str, str], ...]:
    found = [("python", platform.python_version()), ("torch", str(torch.__version__))]
    found.append(("compiler", toolchain.find_compiler().version))
    if "transformers" in sys.modules:
        found.append(("transformers", metadata.version("transformers")))
    return tuple(found)
