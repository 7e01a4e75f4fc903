"""One model over a process group in two layouts: compiled once a layout, switched live.

```
torch.compile(model, backend="moeflex", options={"group": "world", "layouts": ("ep", "tp"), "initial": "ep"})
moe_compiler.layout(model)          -> "ep"
moe_compiler.switch(model, "tp")    -> SwitchReport; every rank calls it between two steps
moe_compiler.refit(model, {...})    new values, in place, in the active layout
moe_compiler.load_checkpoint(...)   from files straight into the arenas (`loading`)
```

The first call of a model plans the arena and moves the weights into it (`layout_graphs`). EP: every rank calls the
model with requests of its own. TP: all ranks call it with the same batch. Inference only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from moe_compiler.errors import LayoutError
from moe_compiler.expert_blocks import Layout
from moe_compiler.passes.expert_layers import ExpertLayer
from moe_compiler.reference import expert_tensors
from moe_compiler.runtime.checkpoint import ParameterSource
from moe_compiler.runtime.reading import Reading
from moe_compiler.runtime.stand_in import forget_source, pending_source, stand_in
from moe_compiler.runtime.switch import LayoutStore, SwitchReport

_MARK = "_moeflex_layouts"


class LayoutModel:
    """The weights of one model on one rank.

    Args:
        store: the arena and what of it serves the active layout.
    """

    def __init__(self, store: LayoutStore) -> None:
        self.store = store
        self.experts: list[tuple[ExpertLayer, tuple[nn.Parameter, ...]]] = []
        self._versions: list[tuple[nn.Parameter, int, int]] = []

    def take_experts(
        self, layer: ExpertLayer, parameters: tuple[nn.Parameter, ...], reading: Reading
    ) -> None:
        """Write a layer into the arena; its parameters keep their shape and no memory."""
        index = len(self.experts)
        self.experts.append((layer, parameters))
        sources = [pending_source(p) for p in parameters]
        if all(sources):
            self.read_experts(index, [s for s in sources if s is not None], reading)
        else:
            self._write(index, [p.detach() for p in parameters])
        for parameter in dict.fromkeys(parameters):
            if pending_source(parameter) is None:
                parameter.data = stand_in(parameter.shape, parameter.dtype)
            forget_source(parameter)
            setattr(parameter, _MARK, self)
            self._versions.append((parameter, parameter._version, parameter.data_ptr()))

    def index_of(self, first: nn.Parameter) -> int:
        """The arena's index of the layer whose first expert tensor this is.

        Raises:
            LayoutError: the layer is not in the arena.
        """
        for index, (_, parameters) in enumerate(self.experts):
            if parameters[0] is first:
                return index
        raise LayoutError(
            "an MoE layer arrived in a later graph than the arena was planned for; the whole model has to "
            "come as one graph (torch.compile(..., fullgraph=True) shows where it breaks)"
        )

    def check_untouched(self) -> None:
        """Refuse to run on after somebody wrote to a parameter whose values live in the arena.

        Raises:
            LayoutError: an expert parameter was written to, or got other memory.
        """
        for parameter, version, pointer in self._versions:
            if parameter._version != version or parameter.data_ptr() != pointer:
                raise LayoutError(
                    f"an expert parameter of shape {tuple(parameter.shape)} was written to directly; its values "
                    "live in the arena of every rank. Write them with moe_compiler.refit(model, {name: values})"
                )

    def refit(self, index: int, tensors: Sequence[Tensor]) -> None:
        """New values for all experts of a layer, in the active layout."""
        self._write(index, tensors)

    def read_experts(
        self, index: int, sources: Sequence[ParameterSource], reading: Reading
    ) -> None:
        """Read a layer from files, one expert at a time, in the active layout."""
        layer = self.experts[index][0]
        spec, roles = layer.plan.experts, layer.plan.experts.tensor_roles
        count = 1 if spec.stacked else spec.num_experts
        shapes = [s.shape[1:] if spec.stacked else s.shape for s in sources[::count]]
        scratch = {
            role: torch.empty(shape, dtype=source.dtype)
            for role, shape, source in zip(roles, shapes, sources[::count], strict=True)
        }
        num_bytes = sum(source.num_bytes for source in sources)
        with reading.of(f"experts of MoE layer {index}", num_bytes):
            for expert in layer.blocks.owned_experts(self.store.layout, self.store.rank):
                for i, role in enumerate(roles):
                    if spec.stacked:
                        sources[i].read_item(expert, scratch[role])
                    else:
                        sources[i * count + expert].read(scratch[role])
                self.store.refit(index, spec, expert, scratch)

    def renew_if_torn(self) -> None:
        """Serve again after a torn switch, once all weights are written anew; every rank calls this."""
        self.store.renew_if_torn()

    def _write(self, index: int, tensors: Sequence[Tensor]) -> None:
        spec = self.experts[index][0].plan.experts
        for expert in range(spec.num_experts):
            self.store.refit(index, spec, expert, expert_tensors(spec, tensors, expert))


def switch(model: nn.Module, target: str, *, check: bool = False) -> SwitchReport:
    """Bring a model into another layout, between two steps; every rank of its group calls this.

    A layout that the model cannot have is refused: the report says why, and the old layout serves on.

    Args:
        model: the compiled model, or the one that was compiled; it ran at least once.
        target: "ep" | "tp".
        check: compare sums over all blocks before and after.

    Raises:
        LayoutError: there is no such layout, or the model was not compiled over a group.
        SwitchError: a rank did not come; the message says whether the old layout still serves.
    """
    found = _of(model)
    if target not in {str(one) for one in Layout}:
        raise LayoutError(f"a layout is one of {', '.join(Layout)}; got {target!r}")
    return found.store.switch(Layout(target), check=check)


def layout(model: nn.Module) -> str:
    """The layout that a model serves: "ep" | "tp".

    Raises:
        LayoutError: the model was not compiled over a group, or has not run yet.
        SwitchError: an earlier switch was torn.
    """
    return str(_of(model).store.layout)


def refit(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write new values of parameters in place, in the active layout; the same values on every rank.

    Args:
        model: the compiled model.
        values: full tensors by qualified name. Of one layer's experts, all tensors or none.

    Raises:
        LayoutError: a name is unknown, a shape differs, or tensors of a layer are missing.
    """
    found = _of(model)
    names = {name.removeprefix("_orig_mod."): p for name, p in model.named_parameters()}
    given: dict[int, Tensor] = {}
    for name, new in values.items():
        parameter = names.get(name)
        if parameter is None or parameter.shape != new.shape:
            what = "no parameter" if parameter is None else f"shape {tuple(parameter.shape)}"
            raise LayoutError(
                f"refit of {name!r} with shape {tuple(new.shape)}: the model has {what}"
            )
        given[id(parameter)] = new
    for index, (_, parameters) in enumerate(found.experts):
        mine = [given.pop(id(p), None) for p in parameters]
        tensors = [t for t in mine if t is not None]
        if tensors and len(tensors) < len(parameters):
            raise LayoutError(
                f"refit of MoE layer {index} needs all of its {len(parameters)} tensors"
            )
        if tensors:
            found.refit(index, tensors)
    for parameter in names.values():
        if id(parameter) in given:
            parameter.data.copy_(given[id(parameter)])


def model_of_parameter(parameter: nn.Parameter | None) -> LayoutModel | None:
    """The model in whose arena the values of an expert parameter live; None for any other parameter."""
    found = getattr(parameter, _MARK, None)
    return found if isinstance(found, LayoutModel) else None


def _of(model: nn.Module) -> LayoutModel:
    for parameter in model.parameters():
        found = model_of_parameter(parameter)
        if found is not None:
            return found
    raise LayoutError(
        "this model has no layouts: compile it with options={'group': 'world'} and call it once"
    )
