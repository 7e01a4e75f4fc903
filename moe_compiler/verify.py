"""`moeflex verify`: what the compiled model gives beside what eager gives, for the whole and for every MoE block.

```
whole model   torch.compile(model, backend="moeflex"), or an artifact, against the model itself
blocks        the edited graph is interpreted; at each op the kernel runs beside the reference on the same inputs
```

Both over several token counts and random inputs, and by the rule of `deviation.py`: our error against fp32 may be twice
that of eager in the same dtype.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from moe_compiler import ahead, cpu_kernels, pipeline, reference, settings
from moe_compiler import options as options_module
from moe_compiler.deviation import Deviation, compare
from moe_compiler.errors import InspectError, OptionError
from moe_compiler.inspect_target import Target, TargetOptions, load_cpu_target
from moe_compiler.random_inputs import RandomInputs
from moe_compiler.report import GraphReport
from moe_compiler.runtime import op
from moe_compiler.runtime.artifact_runner import Artifact, load
from moe_compiler.targets import Device

MOST_ROWS = 0.75
"""In a half type the whole model is judged by this share of its rows; see `deviation.compare`."""
SUFFIX = ".mflx"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to verify.

    Attributes:
        subject: an artifact, or what `inspect_target.load_target` takes.
        against: the same; "" for the model itself in eager mode.
        tokens: token counts.
        routings: random inputs for each count.
        seed: of the first input.
        axis: the token axis of inputs that a factory gave.
        dtype: of the model; "" for its own.
        experts_implementation: of transformers; "" for the model's own.
    """

    subject: str
    against: str = ""
    tokens: tuple[int, ...] = (2, 16, 64)
    routings: int = 3
    seed: int = 0
    axis: int = 0
    dtype: str = ""
    experts_implementation: str = ""

    @property
    def cases(self) -> list[tuple[int, int]]:
        """Token count and seed of every input."""
        seeds = range(self.seed, self.seed + self.routings)
        return [(tokens, seed) for tokens in self.tokens for seed in seeds]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was compared, at its worst.

    Attributes:
        what: "whole model", or the block's qualified name.
        num_inputs: inputs that were compared.
        tokens: token count of the worst.
        seed: its input's seed.
        output: which of the results, "" for the only one.
        worst: its deviation.
    """

    what: str
    num_inputs: int
    tokens: int
    seed: int
    output: str
    worst: Deviation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was found.

    Attributes:
        subject: what was verified, in words.
        against: what it was compared with, in words.
        checks: the whole model first, then its blocks.
        notes: what the reader should know.
    """

    subject: str
    against: str
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether everything is within what is allowed."""
        return all(check.worst.passed for check in self.checks)


Model = Callable[..., Any]


def verify(request: Request, progress: Callable[[str], None] = lambda _: None) -> VerifyReport:
    """Run what was asked for.

    Args:
        request: what and how.
        progress: called with a short sentence at the start of each step.

    Raises:
        ArtifactError: an artifact cannot be loaded.
        InspectError: a model cannot be built or exported, or an input cannot be made for it.
        OptionError: the token counts do not fit.
    """
    artifact = _artifact(request.subject, progress)
    text = artifact.manifest.source if artifact else request.subject
    if request.against.endswith(SUFFIX):
        return _two_artifacts(request, artifact, progress)
    progress(f"building {request.against or text}")
    target = _target(request, request.against or text)
    if artifact is not None:
        _take_weights(target.module, artifact)
    inputs = RandomInputs(target, request.axis)
    subject: Model
    if artifact is not None:
        subject, title = _called_by_name(artifact, target), f"artifact {request.subject}"
    else:
        progress("compiling")
        torch._dynamo.reset()
        subject = torch.compile(target.module, backend="moeflex")
        title = f'{type(target.module).__name__}, torch.compile(backend="moeflex")'
    with torch.no_grad():
        checks = [_whole(target.module, subject, inputs, request, progress)]
        blocks, notes = _blocks(target, inputs, request, progress)
    return VerifyReport(
        subject=title,
        against=f"{type(target.module).__name__} in eager mode, and in fp32",
        checks=(*checks, *blocks),
        notes=notes,
    )


def _artifact(text: str, progress: Callable[[str], None]) -> Artifact | None:
    if not text.endswith(SUFFIX):
        return None
    progress(f"loading {text}")
    return load(text)


def _target(request: Request, text: str) -> Target:
    options = TargetOptions(
        num_tokens=max(2, *request.tokens),
        experts_implementation=request.experts_implementation,
        dtype=request.dtype,
        with_weights=True,
    )
    return load_cpu_target(text, options, "moeflex verify compares")


def _take_weights(module: nn.Module, artifact: Artifact) -> None:
    """The artifact's weights into the model, so that both compute the same."""
    found = dict(artifact.weights)
    for constant in artifact.manifest.constants:
        found.update(dict.fromkeys(constant.aliases, found[constant.source]))
    known = {n for n, _ in (*module.named_parameters(), *module.named_buffers())}
    try:
        module.load_state_dict({n: t for n, t in found.items() if n in known}, strict=False)
    except RuntimeError as error:
        raise InspectError(
            f"{type(module).__name__} does not take the weights of {artifact.path}: {error}"
        ) from error


def _called_by_name(artifact: Artifact, target: Target) -> Model:
    """An artifact takes the tensors of a call by the names of the forward's arguments."""
    import inspect

    signature = inspect.signature(target.module.forward)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        return artifact(**{n: v for n, v in bound.items() if isinstance(v, Tensor)})

    return call


def tensors_of(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a result with their names, in order."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from tensors_of(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for number, entry in enumerate(value):
            yield from tensors_of(entry, f"{name}[{number}]")


def _wide(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow else value


class _Worst:
    """Keeps the worst of several comparisons."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.num_inputs = 0
        self.check: Check | None = None

    def see(self, deviation: Deviation, tokens: int, seed: int, output: str = "") -> None:
        if self.check is None or deviation.share > self.check.worst.share:
            self.check = Check(
                what=self.what,
                num_inputs=0,
                tokens=tokens,
                seed=seed,
                output=output,
                worst=deviation,
            )

    def done(self) -> Check:
        assert self.check is not None
        return dataclasses.replace(self.check, num_inputs=self.num_inputs)


def _whole(
    module: nn.Module,
    subject: Model,
    inputs: RandomInputs,
    request: Request,
    progress: Callable[[str], None],
) -> Check:
    exact = copy.deepcopy(module).float()
    half = any(p.dtype in (torch.bfloat16, torch.float16) for p in module.parameters())
    worst = _Worst("whole model")
    for tokens, seed in request.cases:
        progress(f"whole model: {tokens} tokens, input {seed}")
        args, kwargs = inputs.make(tokens, seed)
        ours = dict(tensors_of(subject(*args, **kwargs)))
        eager = dict(tensors_of(module(*args, **kwargs)))
        wide_args = [_wide(value) for value in args]
        wide = dict(tensors_of(exact(*wide_args, **{n: _wide(v) for n, v in kwargs.items()})))
        if len(ours) == 1 == len(eager):
            ours = dict(zip(eager, ours.values(), strict=True))  # a lone tensor has no name
        if ours.keys() != eager.keys():
            raise InspectError(f"the results are {sorted(ours)}; eager gives {sorted(eager)}")
        for name, value in ours.items():
            share = MOST_ROWS if half else 1.0
            deviation = compare(value, eager[name], wide[name], share=share)
            worst.see(deviation, tokens, seed, name if len(ours) > 1 else "")
        worst.num_inputs += 1
    return worst.done()


def _blocks(
    target: Target, inputs: RandomInputs, request: Request, progress: Callable[[str], None]
) -> tuple[list[Check], tuple[str, ...]]:
    """Each kernel beside the reference, on the inputs that it gets inside of the model."""
    progress("exporting")
    counts = (*request.tokens, inputs.count)
    program = ahead.export(
        target,
        ahead.Request(
            model=request.subject,
            output="",
            tokens=(min(counts), max(counts)),
            axis=inputs.axis,
        ),
    )
    progress("finding and proving MoE blocks")
    chosen = options_module.resolve(
        {"absorb_router": "never"}, None, settings.get(), pipeline.STAGES
    )
    report, _ = ahead.edit_program(program, chosen, Device(type="cpu"))
    cpu_kernels.finish()
    compared = _Compared(program.module(), _names(report))
    for tokens, seed in request.cases:
        progress(f"blocks: {tokens} tokens, input {seed}")
        args, kwargs = inputs.make(tokens, seed)
        compared.run_case(args, kwargs, tokens, seed)
    notes = [f"{r.name or r.node} is left to Inductor: {r.reason}" for r in report.refused]
    if not compared.worst:
        notes.append("no MoE block runs as an op; only the whole model was compared")
    return [worst.done() for worst in compared.worst.values()], tuple(notes)


def _names(report: GraphReport) -> list[str]:
    placed = zip(report.regions, report.placements, strict=True)
    return [region.name or "MoE block" for region, title in placed if title == "cpu"]


class _Compared(fx.Interpreter):
    """Runs a graph on what the reference gives, and compares the kernel with it at every op."""

    def __init__(self, module: fx.GraphModule, names: Sequence[str]) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.names = list(names)
        self.worst: dict[int, _Worst] = {}
        self.case = (0, 0)
        self.place = 0

    def run_case(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], tokens: int, seed: int
    ) -> None:
        self.case, self.place = (tokens, seed), 0
        self.run(*pytree.tree_leaves((args, dict(kwargs))), enable_io_processing=False)
        for worst in self.worst.values():
            worst.num_inputs += 1

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is not torch.ops.moeflex.moe_layer.default:
            return super().call_function(target, args, kwargs)
        x, router, experts, key = args
        plan = op.read_plan(key)
        ours = super().call_function(target, args, kwargs)
        eager = reference.moe_layer(plan, x, router, experts)
        wide = dataclasses.replace(plan, out_dtype="fp32" if x.dtype != torch.float64 else "fp64")
        exact = reference.moe_layer(
            wide, _wide(x), [_wide(t) for t in router], [_wide(t) for t in experts]
        )
        at = self.place
        self.place += 1
        name = self.names[at] if at < len(self.names) else f"block {at}"
        worst = self.worst.setdefault(at, _Worst(name))
        worst.see(compare(ours, eager, exact), *self.case)
        return eager


def _two_artifacts(
    request: Request, first: Artifact | None, progress: Callable[[str], None]
) -> VerifyReport:
    """Two artifacts on the same inputs, each against the other in the dtype of the results."""
    if first is None:
        raise OptionError(
            f"an artifact is compared with a model the other way round: moeflex verify {request.against} "
            f"{request.subject}"
        )
    progress(f"loading {request.against}")
    second = load(request.against)
    if first.manifest.inputs != second.manifest.inputs:
        raise OptionError(f"{first!r} and {second!r} take other inputs; they cannot be compared")
    progress(f"building {first.manifest.source}, for its inputs")
    target = _target(request, first.manifest.source)
    inputs = RandomInputs(target, request.axis)
    worst = _Worst("whole model")
    for tokens, seed in request.cases:
        progress(f"{tokens} tokens, input {seed}")
        args, kwargs = inputs.make(tokens, seed)
        pair = [
            dict(tensors_of(_called_by_name(a, target)(*args, **kwargs))) for a in (first, second)
        ]
        for name, value in pair[0].items():
            other = pair[1][name]
            worst.see(compare(value, other, _wide(other)), tokens, seed, name)
        worst.num_inputs += 1
    return VerifyReport(
        subject=f"artifact {request.subject}",
        against=f"artifact {request.against}",
        checks=(worst.done(),),
        notes=("two artifacts are compared with each other, not with eager",),
    )
