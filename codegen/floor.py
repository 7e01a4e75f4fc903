"""The time below which an MoE layer cannot run: its weights must be read and its products be computed.

```
distinct(T) = min(E, T * K)              routes spread evenly over the experts
            = E * (1 - (1 - K / E)^T)    mean, when every token draws K of E experts at random
weights_us  = distinct(T) * bytes of one expert / read speed
flop_us     = 2 * T * K * weights of one expert / matrix rate
floor_us    = max(weights_us, flop_us)
```

The experts alone are counted. Router, shared expert, activations and row padding come on top, so a kernel that reaches
this time has nothing left to gain from its experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from moe_compiler.errors import OptionError
from moe_compiler.ir import ExpertSpec
from moe_compiler.model_report import FloorPoint, Machine, Rate, TensorReport

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}

FORMULA = (
    "floor = max(distinct experts x bytes of one / read speed, 2 T K x weights of one / matrix rate); "
    "distinct = min(E, T K) when balanced, E (1 - (1 - K/E)^T) on average when random; experts only"
)

_MEASURED_READ = "measured on one H200: expert weights read at decode"
_MEASURED_GEMM = "measured on one H200: large bf16 GEMMs in short runs"
_DATASHEET = "peak of the data sheet, not measured"

H200 = Machine(
    name="h200",
    title="NVIDIA H200",
    weight_bytes_per_s=4.5e12,
    weight_source=_MEASURED_READ,
    rates=(
        Rate(dtype="bf16", flop_per_s=790e12, source=_MEASURED_GEMM),
        Rate(dtype="fp16", flop_per_s=790e12, source="taken equal to bf16"),
        Rate(dtype="fp32", flop_per_s=67e12, source=_DATASHEET),
        Rate(dtype="fp64", flop_per_s=67e12, source=_DATASHEET),
    ),
)


def _by_data_sheet(
    name: str, title: str, read_tb_per_s: float, half_tflops: float, fp32: float, fp64: float
) -> Machine:
    """A machine nobody has measured; speeds in TB/s and TFLOP/s, without sparsity."""
    rates = {"bf16": half_tflops, "fp16": half_tflops, "fp32": fp32, "fp64": fp64}
    return Machine(
        name=name,
        title=title,
        weight_bytes_per_s=read_tb_per_s * 1e12,
        weight_source=_DATASHEET,
        rates=tuple(
            Rate(dtype=dtype, flop_per_s=rate * 1e12, source=_DATASHEET)
            for dtype, rate in rates.items()
        ),
    )


A100 = _by_data_sheet("a100", "NVIDIA A100 80GB SXM", 2.039, 312, 19.5, 19.5)
L40S = _by_data_sheet("l40s", "NVIDIA L40S", 0.864, 362, 91.6, 1.4)
B200 = _by_data_sheet("b200", "NVIDIA B200", 8.0, 2250, 75, 37)

# "cpu" is measured where it runs: runtime.machine_probe
MACHINES: dict[str, Machine] = {machine.name: machine for machine in (H200, A100, L40S, B200)}


def distinct_experts(num_experts: int, top_k: int, tokens: int, *, routing: str) -> float:
    """How many of E experts are read by T tokens; a mean for "random", exact for "balanced".

    Raises:
        OptionError: `routing` is neither.
    """
    if routing == "balanced":
        return float(min(num_experts, tokens * top_k))
    if routing == "random":
        return num_experts * (1.0 - (1.0 - top_k / num_experts) ** tokens)
    raise OptionError(f"routing is 'balanced' or 'random'; got {routing!r}")


def expert_tensors(experts: ExpertSpec, dtype: str) -> tuple[TensorReport, ...]:
    """Shape and bytes of every role of `experts`, stored as `dtype`."""
    count = 1 if experts.stacked else experts.num_experts
    return tuple(
        TensorReport(
            role=role,
            shape=experts.tensor_shape(role),
            count=count,
            num_bytes=math.prod(experts.tensor_shape(role)) * count * DTYPE_BYTES[dtype],
        )
        for role in experts.tensor_roles
    )


def floor_points(
    experts: ExpertSpec, top_k: int, dtype: str, machine: Machine, tokens: Sequence[int]
) -> tuple[FloorPoint, ...]:
    """The floors of one block on `machine`, one per entry of `tokens`.

    Raises:
        OptionError: the machine has no rate for `dtype`.
    """
    num_bytes = sum(tensor.num_bytes for tensor in expert_tensors(experts, dtype))
    bytes_per_expert = num_bytes / experts.num_experts
    rate = machine.rate(dtype).flop_per_s
    return tuple(
        _floor_point(experts, top_k, bytes_per_expert, machine.weight_bytes_per_s, rate, count)
        for count in tokens
    )


def _floor_point(
    experts: ExpertSpec,
    top_k: int,
    bytes_per_expert: float,
    bytes_per_s: float,
    flop_per_s: float,
    tokens: int,
) -> FloorPoint:
    balanced = distinct_experts(experts.num_experts, top_k, tokens, routing="balanced")
    random = distinct_experts(experts.num_experts, top_k, tokens, routing="random")
    flop = 2.0 * tokens * top_k * experts.num_elements_per_expert
    flop_us = flop / flop_per_s * 1e6
    balanced_us = balanced * bytes_per_expert / bytes_per_s * 1e6
    random_us = random * bytes_per_expert / bytes_per_s * 1e6
    return FloorPoint(
        tokens=tokens,
        experts_balanced=balanced,
        experts_random=random,
        weight_bytes_balanced=balanced * bytes_per_expert,
        weight_bytes_random=random * bytes_per_expert,
        flop=flop,
        weight_balanced_us=balanced_us,
        weight_random_us=random_us,
        flop_us=flop_us,
        floor_us=max(balanced_us, flop_us),
        floor_random_us=max(random_us, flop_us),
        bound="weights" if balanced_us >= flop_us else "flop",
    )
