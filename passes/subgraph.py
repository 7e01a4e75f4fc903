"""A slice of an FX graph that runs by itself: in its own dtypes or fp64, at its sizes or smaller."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx.experimental.symbolic_shapes
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.node import map_aggregate, map_arg
from torch.utils._python_dispatch import _disable_current_modes

from moe_compiler.passes.cpu_spellings import NOT_ON_A_CPU, REPLACED
from moe_compiler.passes.dataflow import DataFlow
from moe_compiler.passes.nodes import (
    CASTS,
    VIEWS,
    is_float,
    is_inplace,
    op_name,
    size_hint,
    static_size,
    tensor,
    value,
)

LOW_FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32})
_CPU = torch.device("cpu")
_FLOAT_METHODS = frozenset({"float", "bfloat16", "half"})


class SliceError(Exception):
    """A slice cannot be cut or run; the text is the reason."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """The nodes between some inputs and some outputs.

    Attributes:
        flow: the data flow of the graph.
        inputs: where the slice was cut on purpose (activations, ids, weights).
        outputs: what it computes.
        weights: parameters, buffers, and tensors computed from parameters alone, which it reads.
        scalars: sizes and other non-tensor values that it reads.
        body: the nodes to execute, in graph order.
        parts: parts of a parameter are weights of their own.
    """

    flow: DataFlow
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    weights: tuple[fx.Node, ...]
    scalars: tuple[fx.Node, ...]
    body: tuple[fx.Node, ...]
    parts: bool = False

    def weight_leaf(self, node: fx.Node) -> tuple[fx.Node, bool] | None:
        """`DataFlow.weight_leaf`, for a slice that may tell parts of a parameter apart."""
        return self.flow.weight_leaf(node, parts=self.parts)

    @property
    def leaves(self) -> tuple[fx.Node, ...]:
        """Everything that has to be given a value to run the slice."""
        return self.inputs + self.weights + self.scalars

    def held(self, read: fx.Node, node: fx.Node, known: Container[fx.Node]) -> fx.Node:
        """What `node` finds under `read`: another version, where the slice was cut behind a write.

        Raises:
            SliceError: none of `known` is the tensor that it reads.
        """
        if read in known:
            return read
        version = self.flow.version_at(read, self.flow.position[node])
        shapes = [None if (t := tensor(n)) is None else tuple(t.shape) for n in (version, read)]
        if version not in known or shapes[0] is None or shapes[0] != shapes[1]:
            raise SliceError(f"'{read.name}' is written in place through a view of it")
        return version

    def _arguments(self, node: fx.Node, number: Mapping[fx.Node, int]) -> str:
        def numbered(read: fx.Node) -> str:
            return f"%{number[self.held(read, node, number)]}"

        return str(map_arg((node.args, node.kwargs), numbered))

    def signature(self) -> str:
        """Text that is equal for slices that compute the same function (up to names of nodes)."""
        number = {node: i for i, node in enumerate(itertools.chain(self.leaves, self.body))}
        lines = [_leaf_signature(node) for node in self.leaves]
        lines += [f"autocast {self.flow.autocast_at(node)}" for node in self.body[:1]]
        for node in self.body:
            lines.append(f"{node.op} {_target_name(node)} {self._arguments(node, number)}")
        lines.append(f"return {[number[n] for n in self.outputs]}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _target_name(node: fx.Node) -> str:
    """The operator, told from its namesakes in other modules, equal in every process."""
    if node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return f"{getattr(node.target, '__module__', '')}.{op_name(node)}"


def _leaf_signature(node: fx.Node) -> str:
    found = value(node)
    if isinstance(found, Tensor):
        sizes = ["s" if (fixed := static_size(s)) is None else str(fixed) for s in found.shape]
        return f"tensor {found.dtype} {sizes}"
    if isinstance(found, torch.SymFloat):
        return f"value {float(found)!r}"
    return "symbol" if isinstance(found, torch.SymInt) else f"value {found!r}"


def float_scalars(part: Slice) -> tuple[float, ...]:
    """Values of the floats that a slice reads as inputs."""
    found = (value(n) for n in part.scalars)
    return tuple(float(v) for v in found if isinstance(v, (float, torch.SymFloat)))


def cut(
    flow: DataFlow,
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    *,
    parts: bool = False,
    limit: int = 20_000,
) -> Slice:
    """Cut the slice that computes `outputs` from `inputs`; `parts` as in `DataFlow.is_part`.

    Raises:
        SliceError: the outputs need an activation that is none of `inputs`; the text names it.
    """
    stop = set(inputs)
    seen: set[fx.Node] = set()
    weights: list[fx.Node] = []
    scalars: list[fx.Node] = []
    first = min((flow.position[n] for n in inputs), default=0)
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node in seen or node in stop:
            continue
        seen.add(node)
        if len(seen) > limit:
            raise SliceError(f"more than {limit} nodes")
        # what lies before every input and is data cannot come from them: the search ends at once
        outside = flow.position[node] < first and not flow.constant[node]
        kind = "foreign" if outside else _leaf_kind(flow, node, parts)
        if kind == "weight":
            weights.append(node)
        elif kind == "scalar":
            scalars.append(node)
        elif kind == "foreign":
            raise SliceError(
                f"it also reads {_describe(node)}, which is computed outside of the block"
            )
        elif isinstance(node.target, torch._ops.HigherOrderOperator) or node.op == "call_module":
            raise SliceError(
                f"it calls '{op_name(node)}', whose gradient or effect is the model's own"
            )
        else:
            stack.extend(flow.inputs[node])
    leaves = {*weights, *scalars}
    order = flow.position.__getitem__
    return Slice(
        flow=flow,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        weights=tuple(sorted(weights, key=order)),
        scalars=tuple(sorted(scalars, key=order)),
        body=tuple(sorted(seen - leaves, key=order)),
        parts=parts,
    )


def _describe(node: fx.Node) -> str:
    found = tensor(node)
    return f"'{node.name}' {tuple(found.shape)}" if found is not None else f"'{node.name}'"


def _is_known_size(node: fx.Node) -> bool:
    """Whether a node reads a size, known before the run, off any tensor (as ATen graphs do)."""
    found = value(node)
    sized = isinstance(found, torch.SymInt) and op_name(node) in ("sym_size", "sym_numel")
    return sized and not torch.fx.experimental.symbolic_shapes.free_unbacked_symbols(found)


def _leaf_kind(flow: DataFlow, node: fx.Node, parts: bool) -> str:
    if node in flow.parameters or flow.is_part(node, parts):
        return "weight"
    if isinstance(value(node), torch.SymFloat) and _scalar_source(flow, node):
        return "scalar"
    if node.op in ("placeholder", "get_attr"):
        found = value(node)
        if isinstance(found, Tensor):
            return "foreign"
        return "scalar"
    scalar = isinstance(value(node), (torch.SymInt, torch.SymFloat, int, float, bool))
    if scalar and flow.constant[node] and not any(tensor(a) is not None for a in flow.inputs[node]):
        return "body"
    if _is_known_size(node):
        return "scalar"
    if (
        flow.constant[node]
        and is_float(node)
        and flow.uses_parameters(node)
        and op_name(node) not in VIEWS | CASTS | {"getitem"}
    ):
        return "weight"
    return "body"


def _scalar_source(flow: DataFlow, node: fx.Node) -> bool:
    """Whether a number is a Python float of the model, passed in by Dynamo as a 0-d tensor."""
    return node.op == "placeholder" or all(
        a.op == "placeholder" and (t := tensor(a)) is not None and t.ndim == 0
        for a in flow.inputs[node]
    )


# ---- running


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Concrete sizes under which a slice is run.

    Attributes:
        symbols: symbol name -> size.
        literals: static size in the graph -> size in the run (empty: as they are).
    """

    symbols: Mapping[str, int] = dataclasses.field(default_factory=dict)
    literals: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def of(self, size: Any) -> int:
        """The size in the run."""
        fixed = static_size(size)
        if fixed is not None:
            return self.literals.get(fixed, fixed)
        if isinstance(size, torch.SymInt):
            expression = size.node.expr
            replaced = expression.subs(
                {s: self.symbols[s.name] for s in expression.free_symbols if s.name in self.symbols}
            )
            if not replaced.is_number:
                hint = size_hint(size)
                if hint is None:
                    raise SliceError(f"the size {size} is not known before the model runs")
                return hint
            return int(replaced)
        raise AssertionError(f"a size is an int or a SymInt: {size!r}")

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The shape of a tensor node in the run."""
        found = tensor(node)
        assert found is not None
        return tuple(self.of(s) for s in found.shape)


def free_symbols(nodes: Iterable[fx.Node]) -> set[str]:
    """Names of the size symbols in the shapes (or values) of these nodes."""
    names: set[str] = set()
    for node in nodes:
        found = value(node)
        sizes: Iterable[object] = found.shape if isinstance(found, Tensor) else (found,)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                names.update(s.name for s in size.node.expr.free_symbols)
    return names


class Runner:
    """Executes a slice.

    Args:
        part: the slice.
        sizes: sizes of the run.
    """

    def __init__(self, part: Slice, sizes: Sizes) -> None:
        self.part = part
        self.sizes = sizes
        self._last_use: dict[fx.Node, list[fx.Node]] = {}
        last: dict[fx.Node, fx.Node] = {}
        for node in part.body:
            for read in node.all_input_nodes:
                last[read] = node
        self.autocast = part.flow.autocast_at(part.body[0]) if part.body else None
        kept = set(part.outputs)
        for read, user in last.items():
            if read not in kept:
                self._last_use.setdefault(user, []).append(read)

    def __call__(self, values: Mapping[fx.Node, Tensor], *, precise: bool) -> list[Tensor]:
        """Run the slice.

        Args:
            values: one tensor for each of `part.inputs` and `part.weights`; they are not written
                to.
            precise: every float dtype in the slice is replaced by fp64. The values have to be fp64
                then.

        Raises:
            SliceError: an operator failed; the text names it.
        """
        with _plain_execution(precise, None if precise else self.autocast):
            return self._run(values, precise)

    def _run(self, values: Mapping[fx.Node, Tensor], precise: bool) -> list[Tensor]:
        environment: dict[fx.Node, Any] = {
            n: v.clone() if n in self._written else v for n, v in values.items()
        }
        for node in self.part.scalars:
            environment[node] = self._scalar(node)
        for node in self.part.body:
            try:
                environment[node] = self._execute(node, environment, precise)
            except SliceError:
                raise
            except Exception as error:
                raise SliceError(
                    f"'{node.name}' ({op_name(node)}) failed: {_first_line(error)}"
                ) from error
            for read in self._last_use.get(node, ()):
                environment.pop(read, None)
        return [environment[n] for n in self.part.outputs]

    @functools.cached_property
    def _written(self) -> set[fx.Node]:
        flow = self.part.flow
        storages = {flow.storage(n) for n in self.part.body if is_inplace(n)}
        return {n for n in self.part.inputs + self.part.weights if flow.storage(n) in storages}

    def _scalar(self, node: fx.Node) -> Any:
        found = value(node)
        if isinstance(found, torch.SymInt):
            return self.sizes.of(found)
        if isinstance(found, torch.SymFloat):
            # reading it guards on it: the model is compiled again when the number changes
            return float(found)
        if isinstance(found, (int, float, bool)):
            return found
        raise SliceError(f"the value of '{node.name}' is not known before the model runs")

    def _execute(self, node: fx.Node, environment: Mapping[fx.Node, Any], precise: bool) -> Any:
        def bind(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                return environment[self.part.held(argument, node, environment)]
            # bool is an int; it is never a size
            if type(argument) is int:
                return self.sizes.literals.get(argument, argument)
            if precise and isinstance(argument, torch.dtype) and argument in LOW_FLOATS:
                return torch.float64
            # the slice runs on the CPU, wherever the model is
            return _CPU if isinstance(argument, torch.device) else argument

        bound: Any = map_aggregate((node.args, node.kwargs), bind)
        args, kwargs = bound
        name = op_name(node)
        if name in REPLACED and (precise or name in NOT_ON_A_CPU):
            return REPLACED[name](*args, **kwargs)
        if precise and node.op == "call_method" and name in _FLOAT_METHODS:
            return args[0].double()
        if node.op == "call_method":
            return getattr(args[0], name)(*args[1:], **kwargs)
        assert node.op == "call_function"
        assert callable(node.target)
        return node.target(*args, **kwargs)


@contextlib.contextmanager
def _plain_execution(precise: bool, autocast: torch.dtype | None) -> Iterator[None]:
    """No fake tensors, modes or gradients; CPU; factories make fp64 when `precise`.

    Autocast is as given, whatever it is around the compilation.
    """
    default = torch.get_default_dtype()
    with (
        unset_fake_temporarily(),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None),
        torch.device("cpu"),
    ):
        torch.set_default_dtype(torch.float64 if precise else default)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
