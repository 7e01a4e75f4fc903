"""Getting a model's MoE blocks into one graph, and saying how that was done.

`install(backend)` is called by the backend when it is loaded, with every call and on reset. From
then on a trace that dynamo makes *for this backend* differs from a trace for others in two points:

1. transformers' data-dependent expert loop is traced through its `grouped_mm` function (see
   `runtime/hf.py`);
2. `torch._dynamo.config.capture_dynamic_output_shape_ops` is on, so that a static loop over all
   experts (`torch.where` and `index_add_`) arrives as one graph. It is set when dynamo starts to
   compile a frame for this backend and restored when that compilation ends
   (`runtime/trace_hooks.py`).

No guard depends on either: dynamo keeps the compiled code of each backend apart. `taken_ways` says
what was done, `fragment_reason` names the graph break where a block still did not arrive whole.
`capture_graphs` and `capture_export` record graphs for `moeflex inspect` and for tests in the same
way.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from moe_compiler.ir import NoMatch
from moe_compiler.runtime import hf, trace_hooks

DYNAMIC_SHAPES_WAY = "dynamic output shapes captured (a loop over all experts became one graph)"


class _Thread(threading.local):
    forced: list[str] | None = None  # ways taken inside `replaced_expert_loops`, None outside


_thread = _Thread()
_ways_of_trace: weakref.WeakKeyDictionary[Any, dict[str, None]] = weakref.WeakKeyDictionary()


def install(backend: Callable[..., Any]) -> None:
    """Make every trace for `backend` capture whole MoE blocks. Idempotent, cheap, thread-safe."""
    trace_hooks.mark(backend)
    trace_hooks.watch_compilations(_install_hf)
    _install_hf()


def _install_hf() -> None:
    hf.install(_expert_loop_is_replaced)


def taken_ways(gm: fx.GraphModule | None = None) -> tuple[str, ...]:
    """What was done to capture the graph that dynamo is just handing to the backend.

    Args:
        gm: that graph; without it the second way is not looked for.
    """
    trace = trace_hooks.current_trace()
    ways = list(_ways_of_trace.get(trace, ())) if trace is not None else []
    ways += _thread.forced or []
    if gm is not None and trace_hooks.flag_is_ours() and _has_dynamic_outputs(gm):
        ways.append(DYNAMIC_SHAPES_WAY)
    return tuple(dict.fromkeys(ways))


@contextlib.contextmanager
def replaced_expert_loops() -> Iterator[list[str]]:
    """Trace transformers' expert loops through `grouped_mm` on this thread; yields the ways taken.

    For `torch.export`, which calls no backend. Eager calls inside of the block are changed as well.
    """
    _install_hf()
    outer, _thread.forced = _thread.forced, []
    try:
        yield _thread.forced
    finally:
        _thread.forced = outer


@torch.compiler.assume_constant_result
def _expert_loop_is_replaced(name: str) -> bool:
    # Under dynamo this runs once, at trace time, and its answer is burnt into the trace of one
    # backend.
    way = f"transformers' expert loop traced through its {name} function"
    if _thread.forced is not None:
        if way not in _thread.forced:
            _thread.forced.append(way)
        return True
    if not trace_hooks.tracing_for_marked():
        return False
    trace = trace_hooks.current_trace()
    if trace is not None:
        _ways_of_trace.setdefault(trace, {})[way] = None
    return True


def _has_dynamic_outputs(gm: fx.GraphModule) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return any(
        isinstance(value := node.meta.get("example_value"), torch.Tensor)
        and free_unbacked_symbols(value)
        for node in gm.graph.nodes
    )


# What picks experts for tokens, as dynamo and ATen spell it.
_ROUTING_OPS = ("topk", "one_hot", "bincount", "argmax")


def fragment_reason(gm: fx.GraphModule) -> NoMatch | None:
    """Why the MoE block that begins in `gm` does not end in it, or None.

    A graph that hands the choice of experts on (an integer or boolean made by a routing operation
    is one of its results), and that a graph break cuts off from the rest of its function or of the
    function that called it, is taken for the first fragment of a block. Call it while dynamo hands
    `gm` to the backend; for a graph of `capture_graphs` it may be called at any time.
    """
    if "capture_fragment" in gm.meta:
        kept: NoMatch | None = gm.meta["capture_fragment"]
        return kept
    node = _escaping_choice(gm)
    ended = None if node is None else trace_hooks.break_inside(gm)
    if node is None or ended is None:
        return None
    name, module_class = _module_of(node)
    stack = list(getattr(ended, "user_stack", ()))
    where = f" at {stack[-1].filename}:{stack[-1].lineno}" if stack else ""
    text = str(getattr(ended, "reason", "")).strip()
    first = text.splitlines()[0] if text else "dynamo gave no reason"
    return NoMatch(
        name=name,
        module_class=module_class,
        node=node.name,
        reason=f"graph break inside an MoE block: {first}{where}",
        detail=text,
    )


def _escaping_choice(gm: fx.GraphModule) -> fx.Node | None:
    """The first routing operation whose integer or boolean results leave the graph."""
    results = {n for n in gm.graph.find_nodes(op="output")[0].all_input_nodes if _is_choice(n)}
    routing: fx.Node
    for routing in gm.graph.nodes:
        if _op_name(routing) not in _ROUTING_OPS:
            continue
        seen, todo = {routing}, [routing]
        while todo:
            node = todo.pop()
            if node in results:
                return routing
            todo += [user for user in node.users if user not in seen]
            seen.update(node.users)
    return None


def _is_choice(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and not value.dtype.is_floating_point


def _op_name(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    if node.op == "call_function":
        packet = getattr(node.target, "overloadpacket", node.target)
        return str(getattr(packet, "__name__", ""))
    return ""


def _module_of(node: fx.Node) -> tuple[str, str]:
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return "", ""
    name, module_class = list(stack.values())[-1]
    module_class = module_class if isinstance(module_class, str) else module_class.__name__
    return str(name).removeprefix("L['self'].").removeprefix("L['self']"), module_class.split(".")[
        -1
    ]


def capture_graphs(
    target: nn.Module | Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    *,
    fullgraph: bool = False,
    grad: bool = False,
) -> list[tuple[fx.GraphModule, list[Any]]]:
    """Run `target` once under dynamo and return its graphs with their example inputs, in order.

    Args:
        target: a module (real, or on the meta device) or a function.
        args: positional arguments.
        kwargs: keyword arguments.
        dynamic: as in `torch.compile`.
        fullgraph: as in `torch.compile`.
        grad: trace with gradients enabled.

    Returns:
        One pair for each graph; the example inputs are what a backend receives.
        `gm.meta["capture_ways"]` holds what `taken_ways` said about it.
    """
    graphs: list[tuple[fx.GraphModule, list[Any]]] = []

    def record(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        gm.meta["capture_ways"] = taken_ways(gm)
        gm.meta["capture_fragment"] = fragment_reason(gm)
        graphs.append((gm, list(example_inputs)))
        return gm.forward

    install(record)
    compiled = torch.compile(target, backend=record, dynamic=dynamic, fullgraph=fullgraph)
    with torch.set_grad_enabled(grad):
        compiled(*args, **(kwargs or {}))
    return graphs


def capture_export(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> torch.export.ExportedProgram:
    """The ATen-level program of `module`, functional, without Inductor's decompositions.

    Its attribute `capture_ways` says how transformers' expert loops were captured, as `taken_ways`.
    """
    program: Any
    with torch.no_grad(), replaced_expert_loops() as ways:
        program = torch.export.export(
            module, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes
        )
        program = program.run_decompositions({})
    program.capture_ways = tuple(ways)
    exported: torch.export.ExportedProgram = program
    return exported
