"""The `torch.compile` backend, and the map of the project.

```
torch.compile(model, backend="moeflex")
    capture    runtime/capture.py        a model's MoE block arrives in one graph
    options    options.py, settings.py   checked and frozen
    match      passes/match_moe.py       FX graph -> MoERegion (ir.py), proven with reference.py
    plan       placement.py, targets.py  MoERegion -> MoEPlan and its target
    build      cpu_kernels, cuda_kernels codegen/, templates/ -> source -> binary, in background
    replace    passes/replace.py         moeflex::moe_layer (runtime/op.py) goes into the graph
    inductor   torch._inductor           compiles the rest
    report     report.py                 what was done, for `moeflex inspect`, dumps and logs
```

`pipeline.run` calls the stages, one after the other, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from moe_compiler import options as options_module
from moe_compiler import pipeline, settings
from moe_compiler.runtime import capture


def moeflex(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph: MoE blocks by moeflex, everything else by Inductor.

    Args:
        gm: the graph from dynamo.
        example_inputs: its inputs.
        mode: Inductor's mode, as `torch.compile(mode=...)` takes it.
        options: the fields of `moe_compiler.options.Options`, and keys of Inductor's configuration.

    Returns:
        The compiled callable.

    Raises:
        OptionError: an unknown option or an unusable value.
        NoMatchError: under `strict`, when a candidate was left alone.
        BuildError: under `strict`, when a build failed.
    """
    _install_capture()
    resolved = options_module.resolve(options, mode, settings.get(), pipeline.STAGES)
    return pipeline.run(gm, example_inputs, resolved)


def _install_capture() -> None:
    """Let whole MoE blocks arrive in one graph, in every trace made for this backend."""
    if "capture" not in settings.get().disable and "all" not in settings.get().disable:
        capture.install(moeflex)


def _reset() -> None:
    """What `torch._dynamo.reset()` asks of a backend: forget the reports."""
    pipeline.clear()
    _install_capture()


moeflex.reset = _reset  # type: ignore[attr-defined]

# The first trace happens before the first call of the backend.
_install_capture()
