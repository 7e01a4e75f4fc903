"""Loading a checkpoint into a model that has no memory yet: straight into the arena of every rank.

```
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
moe_compiler.load_checkpoint(model, folder)
model = torch.compile(model, backend="moeflex", options={"group": "world"})
```

Over a process group, the values are read at the model's first call, when the arena is there: of every
expert, each rank reads what it will hold. Without one they are read at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_compiler.errors import CheckpointError
from moe_compiler.layouts import LayoutModel, model_of_parameter
from moe_compiler.runtime.checkpoint import Checkpoint, ParameterSource
from moe_compiler.runtime.checkpoint_names import find_sources
from moe_compiler.runtime.reading import Reading
from moe_compiler.runtime.stand_in import mark_source, stand_in


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What `load_checkpoint` found.

    Attributes:
        num_parameters: parameters and buffers that the checkpoint gives.
        num_bytes: their bytes in the model.
        deferred: whether parameters are read at the model's first call over its group.
        unused: stored tensors that the model has no place for.
        cast: parameters whose stored dtype is another one; they are rounded to the model's.
        seconds: wall time of this call.
    """

    num_parameters: int
    num_bytes: int
    deferred: bool
    unused: tuple[str, ...]
    cast: tuple[str, ...]
    seconds: float


def load_checkpoint(
    model: nn.Module, folder: str | PathLike[str], *, progress: bool = True
) -> LoadReport:
    """Give a model the values of a checkpoint folder in Hugging Face's form (safetensors).

    A model on the meta device gets them where it will run, see above; until its first call, expert and
    other parameters read as NaN then. A model that runs over a group gets them in place, in the active layout;
    after a torn switch it serves its first layout again. Any other model gets them in place. Over a group,
    every rank calls this.

    Args:
        model: the model, compiled or not.
        folder: of `model.safetensors`, or `model.safetensors.index.json` and its files.
        progress: show a progress bar on the first rank's terminal.

    Raises:
        CheckpointError: the folder cannot be read, a tensor is missing, or a shape or dtype does not fit.
    """
    start = time.perf_counter()
    model = getattr(model, "_orig_mod", model)
    checkpoint = Checkpoint(folder)
    wanted = _state(model)
    sources, unused = find_sources(model, checkpoint, wanted)
    _check_complete(model, checkpoint, wanted, sources)
    running = next((m for p in model.parameters() if (m := model_of_parameter(p))), None)
    deferred = (
        running is None and dist.is_initialized() and any(p.is_meta for p in model.parameters())
    )
    with Reading(sources.values() if not deferred else (), progress) as reading, torch.no_grad():
        if running is not None:
            _write_running(model, running, sources, reading)
        else:
            _give_memory(model, sources, reading, deferred)
    return LoadReport(
        num_parameters=len(sources),
        num_bytes=sum(source.num_bytes for source in sources.values()),
        deferred=deferred,
        unused=tuple(unused),
        cast=tuple(n for n, s in sources.items() if any(t.dtype != s.dtype for t in s.tensors)),
        seconds=time.perf_counter() - start,
    )


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by every name that they have."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = buffer
    return found


def _check_complete(
    model: nn.Module,
    checkpoint: Checkpoint,
    wanted: dict[str, Tensor],
    sources: dict[str, ParameterSource],
) -> None:
    # A tied parameter has several names, and is stored under one.
    given = {id(wanted[name]) for name in sources}
    missing = [name for name, tensor in wanted.items() if id(tensor) not in given]
    if missing:
        raise CheckpointError(
            f"{checkpoint.folder} lacks {len(missing)} of the {len(wanted)} tensors of {type(model).__name__}: "
            + ", ".join(missing[:5])
            + f". It has {len(checkpoint.tensors)} tensors, as {list(checkpoint.tensors)[:3]}; is it the "
            "checkpoint of this model?"
        )


def _write_running(
    model: nn.Module, running: LayoutModel, sources: dict[str, ParameterSource], reading: Reading
) -> None:
    """In place: experts in the active layout, all else as it lies."""
    running.renew_if_torn()
    left = {id(tensor): sources[name] for name, tensor in _state(model).items() if name in sources}
    for index, (_, parameters) in enumerate(running.experts):
        running.read_experts(index, [left.pop(id(p)) for p in parameters], reading)
    for name, tensor in _state(model).items():
        source = left.pop(id(tensor), None)
        if source is not None:
            with reading.of(name, source.num_bytes):
                source.read(tensor.data)


def _give_memory(
    model: nn.Module, sources: dict[str, ParameterSource], reading: Reading, deferred: bool
) -> None:
    """Every module's parameters and buffers get memory, or stand-ins that know their source."""
    by_tensor = {id(t): (n, sources[n]) for n, t in _state(model).items() if n in sources}
    new: dict[int, Any] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in list(table.items()):
                if tensor is None or id(tensor) not in by_tensor:
                    continue
                if id(tensor) not in new:
                    later = deferred and isinstance(tensor, nn.Parameter)
                    new[id(tensor)] = _read(tensor, *by_tensor[id(tensor)], reading, later)
                table[name] = new[id(tensor)]
    _restore_buffers(model)


def _read(
    tensor: Tensor, name: str, source: ParameterSource, reading: Reading, later: bool
) -> Tensor:
    if not tensor.is_meta:
        with reading.of(name, source.num_bytes):
            source.read(tensor.data)
        return tensor
    if later:
        found = stand_in(tensor.shape, tensor.dtype)
    else:
        found = torch.empty(tensor.shape, dtype=tensor.dtype)
        with reading.of(name, source.num_bytes):
            source.read(found)
    if isinstance(tensor, nn.Parameter):
        kept = nn.Parameter(found, requires_grad=tensor.requires_grad)
        kept.__dict__.update(tensor.__dict__)
        if later:
            mark_source(kept, source)
        return kept
    return found


def _restore_buffers(model: nn.Module) -> None:
    """Buffers that no checkpoint stores (rotary frequencies): as the model's own initialisation makes them."""
    initialise = getattr(model, "_init_weights", None)
    for path, module in model.named_modules():
        names = [n for n, b in module._buffers.items() if b is not None and b.is_meta]
        if not names:
            continue
        if initialise is None:
            raise CheckpointError(
                f"the buffers {names} of '{path}' lie on the meta device and in no checkpoint. Build the model with "
                "buffers on the CPU (parameters alone on the meta device), or make them persistent"
            )
        for name in names:
            buffer = module._buffers[name]
            assert buffer is not None
            # Marked by NaN: what the initialisation leaves out is found.
            fill = float("nan") if buffer.is_floating_point() else 0
            module._buffers[name] = torch.full(buffer.shape, fill, dtype=buffer.dtype)
        with _kept_parameters(module):
            initialise(module)
        lost = [n for n in names if (b := module._buffers[n]) is not None and bool(b.isnan().any())]
        if lost:
            raise CheckpointError(
                f"the buffers {lost} of '{path}' lie on the meta device, in no checkpoint, and "
                f"{type(model).__name__}._init_weights does not fill them; build the model with them on the CPU"
            )


@contextlib.contextmanager
def _kept_parameters(module: nn.Module) -> Iterator[None]:
    """The module without its parameters, so that an initialisation cannot overwrite them."""
    kept = dict(module._parameters)
    try:
        for name in kept:
            module._parameters[name] = None
        yield
    finally:
        module._parameters.update(kept)
