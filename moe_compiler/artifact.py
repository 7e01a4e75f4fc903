"""What an artifact says of itself: the manifest of a `.mflx` file, as data.

`MEMBERS` says what the files of an artifact are for. Nothing in a manifest is executed; it is JSON, decoded into these
classes and checked against them.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from moe_compiler import codec
from moe_compiler.errors import ArtifactError
from moe_compiler.ir import MoERegion, NoMatch

FORMAT = 1
TOKENS = -1
"""Stands for the token count in a shape."""

CODE = "model.so"
CALLS = "model.json"
OP_LIBRARY = "op.so"
WEIGHTS = "weights.safetensors"
MEMBERS = {
    CODE: "the graph without its MoE blocks, compiled by AOTInductor",
    CALLS: "which operators the graph calls, for AOTInductor's runtime",
    OP_LIBRARY: "moeflex::moe_layer: binds tensors to kernels",
    "kernels/*.so": "one kernel for each kind of MoE block",
    WEIGHTS: "weights and buffers, where they are inside",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor that goes in or comes out.

    Attributes:
        name: of the forward's argument, or of the result.
        dtype: as torch names it, without "torch.".
        shape: sizes; `TOKENS` where the size is the token count, other negative numbers where a result's size depends
            on it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A weight or buffer that the compiled graph reads.

    Attributes:
        name: in the compiled graph.
        source: in the weights file, and in the model's `state_dict` where it is in there.
        aliases: other names of the same tensor in the model's `state_dict`.
        dtype: as torch names it, without "torch.".
        shape: its sizes.
    """

    name: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel and the plan that it computes.

    Attributes:
        member: its library.
        plan: key of the plan.
        spec: its entry in the op library's table, as hex digits.
    """

    member: str
    plan: str
    spec: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A MoE block of the model and what computes it."""

    region: MoERegion
    target: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """What a machine must have to run the artifact.

    Attributes:
        torch: version it was built with; major and minor must agree.
        system: operating system and machine, e.g. "linux x86_64".
        cpu_features: names as Linux spells them.
    """

    torch: str
    system: str
    cpu_features: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Where the weights are.

    Attributes:
        where: "inside" | "outside".
        file: name of the member, or of the file beside the artifact.
        num_bytes: its size.
        sha256: of its content.
        origin: where they came from, in words.
    """

    where: str
    file: str
    num_bytes: int
    sha256: str
    origin: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemberEntry:
    """`runtime.container.Member`, as it is written down."""

    name: str
    num_bytes: int
    sha256: str
    crc32: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The first member of an artifact.

    Attributes:
        format: number of this format; a reader knows up to `FORMAT`.
        moeflex: version that wrote it.
        target: "cpu" | "sm_90a".
        model: class of the model.
        source: what was compiled, as it was named.
        tokens: smallest and largest token count.
        inputs: tensors of a call, in order.
        outputs: tensors of a result, in order.
        result: "tensor" | "tuple" | "dict": what a call returns.
        requirements: what the machine must have.
        members: the other files, in order.
        kernels: what the op library is told.
        constants: what the compiled graph reads.
        weights: where those are.
        blocks: the MoE blocks that run as `moeflex::moe_layer`, or were left to Inductor.
        refused: candidates that were left alone.
        isa: instruction set of the kernels.
        notes: how the model was captured, one sentence each.
        versions: pairs (package, version) of the machine that built it.
    """

    format: int
    moeflex: str
    target: str
    model: str
    source: str
    tokens: tuple[int, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    result: str
    requirements: Requirements
    members: tuple[MemberEntry, ...]
    kernels: tuple[Kernel, ...]
    constants: tuple[Constant, ...]
    weights: Weights
    blocks: tuple[Block, ...] = ()
    refused: tuple[NoMatch, ...] = ()
    isa: str = ""
    notes: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> bytes:
        """As it is stored."""
        return (json.dumps(codec.encode(self), indent=1, allow_nan=False) + "\n").encode()


def read_manifest(content: bytes, where: str) -> Manifest:
    """Decode a manifest.

    Args:
        content: the member.
        where: the artifact's path, for messages.

    Raises:
        ArtifactError: it is not a manifest, or one of a newer format.
    """
    try:
        fields = json.loads(content)
        number = fields["format"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ArtifactError(
            f"{where} has no readable manifest ({error}); it is damaged, or no moeflex artifact"
        ) from error
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ArtifactError(f"{where}: the manifest's format is {number!r}; a number is needed")
    if number > FORMAT:
        raise ArtifactError(
            f"{where} has format {number}, written by moeflex {fields.get('moeflex', 'of another version')}; this "
            f"moeflex reads up to {FORMAT}. Update moeflex, or compile the model again with this one."
        )
    try:
        manifest = codec.decode(Manifest, fields)
        _check_types(manifest)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise ArtifactError(
            f"{where}: the manifest does not say what format {FORMAT} says ({error}); the file was changed, or "
            "written by a moeflex in development. Compile the model again."
        ) from error
    return manifest


def _check_types(value: Any) -> None:
    """Raise TypeError where a field of a dataclass is not of the simple type that it is annotated with."""
    if isinstance(value, tuple):
        for entry in value:
            _check_types(entry)
        return
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return
    for field in dataclasses.fields(value):
        found, wanted = getattr(value, field.name), _SIMPLE.get(str(field.type))
        if wanted is not None and (
            not isinstance(found, wanted) or isinstance(found, bool) != (wanted is bool)
        ):
            raise TypeError(f"{type(value).__name__}.{field.name} is {found!r}")
        if str(field.type).startswith("tuple[int") and not all(type(n) is int for n in found):
            raise TypeError(f"{type(value).__name__}.{field.name} is {found!r}")
        _check_types(found)


_SIMPLE: dict[str, type] = {"int": int, "str": str, "bool": bool}
