"""Load and run an artifact: `moe_compiler.load("model.mflx")`.

What is needed is torch and this package, no compiler and nothing of the model's own code. A call runs the compiled
graph, whose MoE blocks are `moeflex::moe_layer` from the artifact's own library, all in C++.

An artifact is a program: whoever made it decides what it does on this machine. What is checked is that the file is
whole and as it was written, and that it fits here; `sha256=` pins it to one that is trusted.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from moe_compiler.artifact import (
    CALLS,
    CODE,
    MEMBERS,
    OP_LIBRARY,
    TOKENS,
    WEIGHTS,
    Constant,
    Manifest,
    TensorSpec,
    read_manifest,
)
from moe_compiler.errors import ArtifactError, BuildError
from moe_compiler.runtime import aoti_runner, cpu_target, op, tensor_file, toolchain
from moe_compiler.runtime.container import Archive, Member


def open_archive(path: str | os.PathLike[str], sha256: str = "") -> tuple[Archive, Manifest]:
    """Open an artifact and check its manifest and layout; its members are checked when they are read.

    Args:
        path: the file.
        sha256: what the artifact has to be, as `moeflex compile` printed it; "" for any.

    Raises:
        ArtifactError: it is no artifact, not whole, or not the one that was asked for.
    """
    archive = Archive(path)
    try:
        if sha256 and archive.sha256 != sha256.strip().lower():
            raise ArtifactError(
                f"{path} is another artifact than the one that was asked for: its SHA-256 is {archive.sha256}, "
                f"wanted is {sha256}"
            )
        manifest = read_manifest(archive.manifest, str(path))
        archive.check_layout(
            [
                Member(name=m.name, num_bytes=m.num_bytes, sha256=m.sha256, crc32=m.crc32)
                for m in manifest.members
            ]
        )
        _check_members(manifest, str(path))
    except BaseException:
        archive.close()
        raise
    return archive, manifest


def _check_members(manifest: Manifest, path: str) -> None:
    names = {member.name for member in manifest.members}
    kernels = {name for name in names if name.startswith("kernels/") and name.endswith(".so")}
    strange = names - set(MEMBERS) - kernels
    missing = {kernel.member for kernel in manifest.kernels} - names
    missing |= {CODE} - names
    if manifest.kernels:
        missing |= {OP_LIBRARY} - names
    if manifest.weights.where == "inside":
        missing |= {WEIGHTS} - names
    elif manifest.weights.where != "outside":
        raise ArtifactError(f"{path}: its weights are said to be {manifest.weights.where!r}")
    if strange or missing:
        raise ArtifactError(
            f"{path}: the manifest's members do not belong together (missing: {sorted(missing)}, unknown: "
            f"{sorted(strange)})"
        )
    specs: tuple[TensorSpec | Constant, ...]
    specs = (*manifest.inputs, *manifest.outputs, *manifest.constants)
    for spec in specs:
        if not isinstance(getattr(torch, spec.dtype, None), torch.dtype):
            raise ArtifactError(
                f"{path}: {spec.name} is of no dtype that torch knows: {spec.dtype!r}"
            )


def check_machine(manifest: Manifest, path: str) -> None:
    """Check that an artifact can run here.

    Raises:
        ArtifactError: another torch, operating system or CPU is needed.
    """
    wanted = manifest.requirements
    if manifest.target != "cpu":
        raise ArtifactError(
            f"{path} is for {manifest.target}; this moeflex loads artifacts for cpu"
        )
    system = f"{sys.platform} {platform.machine().lower()}"
    if wanted.system != system:
        raise ArtifactError(
            f"{path} was compiled for {wanted.system} and this is {system}; compile it on such a machine"
        )
    if _minor(wanted.torch) != _minor(str(torch.__version__)):
        raise ArtifactError(
            f"{path} was compiled with torch {wanted.torch} and this is torch {torch.__version__}; install torch "
            f"{_minor(wanted.torch)}, or compile it again with this one"
        )
    missing = sorted(set(wanted.cpu_features) - toolchain.cpu_features())
    if missing:
        raise ArtifactError(
            f"{path} needs a CPU with {', '.join(missing)}, which this one lacks; compile it again with "
            "--cpu-isa avx2 (or avx512), or on this machine"
        )


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def load(
    path: str | os.PathLike[str],
    *,
    weights: str | os.PathLike[str] | Mapping[str, torch.Tensor] | None = None,
    sha256: str = "",
    check_weights: bool = True,
    num_runners: int = 1,
) -> Artifact:
    """Load an artifact that `moeflex compile` made.

    The file holds machine code: load only what comes from somebody you trust, or say by `sha256` what it has to be.

    Args:
        path: the file.
        weights: where the weights are, when they are not in the artifact or others shall be used: a safetensors file or
            tensors by the names of the model's `state_dict`. By default those that came with the artifact.
        sha256: what the artifact has to be, as `moeflex compile` printed it; "" for any.
        check_weights: compute the digest of the weights too, which reads all of them; False reads a page when it is
            first used.
        num_runners: calls that may run at the same time; more of them wait.

    Raises:
        ArtifactError: the file is damaged, was changed, is no artifact, or does not fit this machine.
    """
    archive, manifest = open_archive(path, sha256)
    with contextlib.closing(archive):
        check_machine(manifest, str(path))
        for member in manifest.members:
            if member.name != WEIGHTS:
                archive.check(member.name)
        tensors = _first_weights(archive, manifest, weights, check_weights)
        with _unpacked(archive, manifest) as folder:
            runner = _load_code(manifest, folder, num_runners)
    loaded = Artifact(str(path), manifest, runner)
    loaded.load_weights(tensors)
    return loaded


@contextlib.contextmanager
def _unpacked(archive: Archive, manifest: Manifest) -> Iterator[Path]:
    """The checked libraries as files of a folder that only this user can read, as long as the block runs."""
    folder = Path(tempfile.mkdtemp(prefix="moeflex-"))
    try:
        for member in manifest.members:
            if member.name == WEIGHTS:
                continue
            file = folder / member.name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(archive.read(member.name))
        yield folder
    except OSError as error:
        raise ArtifactError(
            f"{archive.path} cannot be unpacked to {folder}: {error.strerror}; set TMPDIR to a folder with room"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _load_code(manifest: Manifest, folder: Path, num_runners: int) -> Any:
    kernels = []
    for kernel in manifest.kernels:
        try:
            spec = bytes.fromhex(kernel.spec)
        except ValueError as error:
            raise ArtifactError(f"the table entry of {kernel.member} is unreadable") from error
        path = str(folder / kernel.member)
        kernels.append(cpu_target.BuiltKernel(plan_key=kernel.plan, spec=spec, path=path))
    try:
        if kernels:
            op.load_library("CPU", lambda: cpu_target.use_library(str(folder / OP_LIBRARY)))
            cpu_target.register(kernels)
    except BuildError as error:
        raise ArtifactError(
            f"the kernels of the artifact cannot be loaded: {error} Where programs may not run from "
            f"{tempfile.gettempdir()}, set TMPDIR to a folder that allows it."
        ) from error
    assert CALLS.removesuffix(".json") == CODE.removesuffix(".so")  # the runner looks for it there
    return aoti_runner.open_library(str(folder / CODE), num_runners)


def _first_weights(
    archive: Archive,
    manifest: Manifest,
    given: str | os.PathLike[str] | Mapping[str, torch.Tensor] | None,
    check: bool,
) -> Mapping[str, torch.Tensor]:
    if isinstance(given, Mapping):
        return given
    if given is not None:
        return read_weights(given)
    wanted = manifest.weights
    if wanted.where == "inside":
        if check:
            archive.check(WEIGHTS)
        size = next(m.num_bytes for m in manifest.members if m.name == WEIGHTS)
        handle, offset = archive.file.fileno(), archive.offset(WEIGHTS)
        return tensor_file.map_tensors(handle, offset, size, archive.path)
    if Path(wanted.file).name != wanted.file:
        raise ArtifactError(f"{archive.path}: {wanted.file!r} is no name of a file beside it")
    beside = Path(archive.path).parent / wanted.file
    if not beside.is_file():
        raise ArtifactError(
            f"{archive.path} has its weights outside, in {wanted.file}, and there is none beside it; pass "
            "weights=PATH"
        )
    return read_weights(beside, sha256=wanted.sha256 if check else "", num_bytes=wanted.num_bytes)


def read_weights(
    path: str | os.PathLike[str], *, sha256: str = "", num_bytes: int = -1
) -> dict[str, torch.Tensor]:
    """Map a safetensors file.

    Args:
        path: the file.
        sha256: what it has to be; "" for any.
        num_bytes: what its size has to be; -1 for any.

    Raises:
        ArtifactError: it cannot be read, or is another one.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if num_bytes not in (-1, size):
                raise ArtifactError(
                    f"{path} has {size} bytes and the artifact's weights have {num_bytes}: it is truncated, or the "
                    "file of another artifact"
                )
            if size == 0:
                raise ArtifactError(f"{path} is empty")
            if sha256 and tensor_file.digest(file) != sha256:
                raise ArtifactError(
                    f"{path} is damaged or was changed: its SHA-256 is not the one in the artifact. To use other "
                    "weights on purpose, pass them as weights=PATH."
                )
            return tensor_file.map_tensors(file.fileno(), 0, size, str(path))
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error


class Artifact:
    """A loaded artifact; call it as the model was called.

    Attributes:
        path: where it came from.
        manifest: what it says of itself.
    """

    def __init__(self, path: str, manifest: Manifest, runner: Any) -> None:
        self.path = path
        self.manifest = manifest
        self._runner = runner
        self._weights: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._dtypes = [getattr(torch, spec.dtype) for spec in manifest.inputs]

    def __repr__(self) -> str:
        inputs = ", ".join(f"{s.name} {_shape(s)} {s.dtype}" for s in self.manifest.inputs)
        return f"Artifact({self.path!r}: {self.manifest.model}, {inputs})"

    def __call__(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        """Run the model.

        Args:
            args: tensors in the order of `manifest.inputs`.
            kwargs: further ones by name.

        Returns:
            A tensor, a tuple or a dict of tensors, as `manifest.result` says; without gradients.

        Raises:
            ArtifactError: the tensors are not those of `manifest.inputs`.
        """
        inputs = self._bind(args, kwargs)
        # What follows is C++: nothing of torch's dispatcher may look for a gradient in Python.
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            found = self._runner.run(inputs)
        if self.manifest.result == "tensor":
            return found[0]
        if self.manifest.result == "dict":
            names = (spec.name for spec in self.manifest.outputs)
            return dict(zip(names, found, strict=True))
        return tuple(found)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        wanted = self.manifest.inputs
        if len(args) > len(wanted):
            raise ArtifactError(f"{self!r} takes {len(wanted)} tensors; got {len(args)}")
        given = {spec.name: value for spec, value in zip(wanted, args, strict=False)}
        twice = given.keys() & kwargs.keys()
        given |= kwargs
        unknown = given.keys() - {spec.name for spec in wanted}
        missing = [spec.name for spec in wanted if spec.name not in given]
        if twice or unknown or missing:
            raise ArtifactError(
                f"{self!r} was called with other tensors: unknown {sorted(unknown)}, given twice {sorted(twice)}, "
                f"missing {missing}"
            )
        tokens: list[int] = []
        return [
            self._check(spec, dtype, given[spec.name], tokens)
            for spec, dtype in zip(wanted, self._dtypes, strict=True)
        ]

    def _check(
        self, spec: TensorSpec, dtype: torch.dtype, value: Any, tokens: list[int]
    ) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise ArtifactError(f"{spec.name} is a {type(value).__name__}; a tensor is needed")
        fits = value.dim() == len(spec.shape) and all(
            size in (wanted, TOKENS) or wanted == TOKENS
            for size, wanted in zip(value.shape, spec.shape, strict=True)
        )
        if not fits or value.dtype != dtype or value.device.type != "cpu":
            raise ArtifactError(
                f"{spec.name} must be {_shape(spec)} {spec.dtype} on the CPU; got {list(value.shape)} "
                f"{str(value.dtype).removeprefix('torch.')} on {value.device}"
            )
        tokens += [
            size for size, wanted in zip(value.shape, spec.shape, strict=True) if wanted == TOKENS
        ]
        first, last = self.manifest.tokens
        if tokens and (min(tokens) < first or max(tokens) > last or min(tokens) != max(tokens)):
            raise ArtifactError(
                f"{spec.name} {list(value.shape)}: one token count from {first} to {last} is needed; got "
                f"{sorted(set(tokens))}. Compile again with another --tokens."
            )
        return value.contiguous()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights that the next call reads, by the names of the weights file; a change in place is seen."""
        return {c.source: self._weights[c.name] for c in self.manifest.constants}

    def load_weights(self, weights: str | os.PathLike[str] | Mapping[str, torch.Tensor]) -> None:
        """Replace weights; nothing is copied, the next call reads the tensors that are given here.

        Args:
            weights: a safetensors file, or tensors by the names of the model's `state_dict`. What is not named keeps
                its value.

        Raises:
            ArtifactError: a name is unknown, a tensor has another shape or dtype, or one was never given. Nothing is
                changed then.
        """
        tensors = weights if isinstance(weights, Mapping) else read_weights(weights)
        with self._lock:
            found = dict(self._weights)
            known: set[str] = set()
            for constant in self.manifest.constants:
                names = (constant.source, *constant.aliases)
                known.update(names)
                name = next((n for n in names if n in tensors), None)
                if name is not None:
                    found[constant.name] = _fitting(constant, tensors[name])
            unknown = sorted(set(tensors) - known)
            missing = [c.source for c in self.manifest.constants if c.name not in found]
            if unknown or missing:
                raise ArtifactError(
                    f"the weights do not fit {self.path}: unknown {unknown[:5]}, missing {missing[:5]} "
                    f"({len(unknown)} and {len(missing)} in all)"
                )
            if found:
                self._update(found)
            self._weights = found

    def _update(self, found: dict[str, torch.Tensor]) -> None:
        try:
            self._runner.update_constant_buffer(found, False, True, True)
        except RuntimeError as error:
            raise ArtifactError(
                f"{self.path}: the compiled graph reads other weights than the manifest names: {error}"
            ) from error


def _fitting(constant: Constant, tensor: torch.Tensor) -> torch.Tensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tuple(tensor.shape) != constant.shape or dtype != constant.dtype:
        raise ArtifactError(
            f"the weight {constant.source} must be {list(constant.shape)} {constant.dtype}; got "
            f"{list(tensor.shape)} {dtype}"
        )
    return tensor.detach().contiguous()


def _shape(spec: TensorSpec) -> str:
    return "[" + ", ".join("T" if size == TOKENS else str(size) for size in spec.shape) + "]"
