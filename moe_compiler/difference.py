"""`moeflex diff`: what is different between two artifacts, from what they say of themselves.

Nothing of them is run. The weights are told apart by their digests; `moeflex verify A B` runs both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from moe_compiler.artifact import Block, Manifest

AREAS = ("model", "machine", "versions", "blocks", "kernels", "weights", "code")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that two artifacts do not agree in.

    Attributes:
        area: one of `AREAS`.
        what: the thing.
        first: in the first artifact, "" where it has none.
        second: in the second one.
    """

    area: str
    what: str
    first: str
    second: str


def differences(first: Manifest, second: Manifest) -> list[Difference]:
    """All differences of two artifacts, in the order of `AREAS`; empty for equal ones."""
    found: list[Difference] = []
    for area, of in (
        ("model", _model),
        ("machine", _machine),
        ("versions", _versions),
        ("blocks", _blocks),
        ("kernels", _kernels),
        ("weights", _weights),
        ("code", _code),
    ):
        found += _compare(area, of(first), of(second))
    return found


def _compare(
    area: str, first: Mapping[str, str], second: Mapping[str, str]
) -> Iterator[Difference]:
    for what in dict.fromkeys((*first, *second)):
        left, right = first.get(what, ""), second.get(what, "")
        if left != right:
            yield Difference(area=area, what=what, first=left, second=right)


def _shapes(specs: Any) -> str:
    texts = []
    for spec in specs:
        sizes = ", ".join("T" if size < 0 else str(size) for size in spec.shape)
        texts.append(f"{spec.name} [{sizes}] {spec.dtype}")
    return "; ".join(texts)


def _model(m: Manifest) -> dict[str, str]:
    return {
        "class": m.model,
        "source": m.source,
        "tokens": f"{m.tokens[0]} to {m.tokens[1]}",
        "inputs": _shapes(m.inputs),
        "outputs": _shapes(m.outputs),
        "result": m.result,
        **{f"note {number}": note for number, note in enumerate(m.notes, 1)},
    }


def _machine(m: Manifest) -> dict[str, str]:
    return {
        "target": m.target,
        "system": m.requirements.system,
        "kernels are written for": m.isa,
        "features of the CPU": ", ".join(m.requirements.cpu_features),
    }


def _versions(m: Manifest) -> dict[str, str]:
    return {"format": str(m.format), "moeflex": m.moeflex, **dict(m.versions)}


def _blocks(m: Manifest) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, block in enumerate(m.blocks):
        found[block.region.name or f"block {number}"] = _block(block)
    for number, refused in enumerate(m.refused):
        name = refused.name or refused.node or f"refused {number}"
        found[name] = f"left to Inductor: {refused.reason}"
    return found


def _block(block: Block) -> str:
    region = block.region
    spec, router = region.experts, region.router
    return (
        f"{router.kind}, E {spec.num_experts} K {router.top_k} H {spec.hidden} I {spec.intermediate}, "
        f"{spec.gate_layout}, {spec.activation.name}; {block.target}"
    )


def _kernels(m: Manifest) -> dict[str, str]:
    digests = {member.name: member.sha256[:16] for member in m.members}
    return {
        f"plan {kernel.plan}": f"{kernel.member.removeprefix('kernels/')} (sha256 {digests.get(kernel.member, '')}...)"
        for kernel in m.kernels
    }


def _weights(m: Manifest) -> dict[str, str]:
    found = {
        "place": m.weights.where,
        "bytes": str(m.weights.num_bytes),
        "sha256": m.weights.sha256,
        "origin": m.weights.origin,
    }
    for constant in m.constants:
        shape = ", ".join(map(str, constant.shape))
        found[f"tensor {constant.source}"] = f"[{shape}] {constant.dtype}"
    return found


def _code(m: Manifest) -> dict[str, str]:
    return {
        member.name: f"{member.num_bytes} bytes, sha256 {member.sha256[:16]}..."
        for member in m.members
        if not member.name.startswith("kernels/") and not member.name.endswith(".safetensors")
    }
