"""The CUDA kernel of one MoE layer: which one, with which constants, as source text.

`choose_config` picks a `CudaConfig` from shapes alone (no GPU, no measurement in the user's first
call); `render` writes the translation unit that names those choices. Everything with a branch or a
loop is C++ under `templates/cuda`.
"""

from __future__ import annotations

import dataclasses
import math
import string

from moe_compiler.errors import UnsupportedError
from moe_compiler.ir import (
    ActivationKind,
    ActivationSpec,
    ExpertSpec,
    GateLayout,
    MoEPlan,
    Name,
    Orientation,
    WeightPosition,
)

MAX_EXPERTS = 512
MAX_TOP_K = 32
# A decode block keeps its route tables in shared memory; beyond this many routes the prefill
# kernel runs.
MAX_DECODE_ROUTES = 4096
# More rows an expert than this on average, and the prefill kernel's larger tiles win (H200, T=512, decode against
# prefill: 32 rows 315 against 336 us, 48 rows 290 against 310, 64 rows 844 against 650: then the fullest experts of a
# random routing have more rows than N).
MAX_DECODE_ROWS_PER_EXPERT = 50.0
# Summing one half of the columns beside the products of the other pays for reading the activations
# twice where experts have many rows and the rows of the down projection do not fit into L2 (H200,
# two slices against one: Qwen3-30B at T=8192, 268 MB of rows, -3.5 %; Phi-3.5 at 8192, 134 MB,
# -1.2 %; the I=192 shard at 4096, 268 MB, -2.1 %; Phi-3.5 at 2048, 33 MB, +3.0 %; Qwen3-30B at
# 2048, 128 rows an expert, +1.7 %).
MIN_ROWS_TO_SLICE = 256.0
MIN_BYTES_TO_SLICE = 100e6


class Kernel(Name):
    """Which of the kernels."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CudaConfig:
    """All compile-time choices of one layer kernel.

    Attributes:
        kernel: prefill (many tokens, which are the M operand) or decode (few; weights are).
        dtype: of x and of the expert tensors, "bf16" | "fp16".
        out_dtype: of the result, "bf16" | "fp16" | "fp32".
        weight_dtype: of the combine weights, "bf16" | "fp16" | "fp32".
        index_dtype: of the ids, "int64" | "int32".
        gated: there is an up projection next to the gate.
        interleaved: gate and up alternate along the 2I axis.
        w13_mn_major, w2_mn_major: the contraction axis is not the contiguous one.
        has_b13, has_b2: biases.
        activation: the activation.
        weight_position: where the combine weight enters.
        num_stages: depth of the shared-memory ring.
        num_tokens_per_tile: decode: N of the matrix product, 8 | 16 | 32 | 64; 0 for prefill.
        num_slabs: decode: 64-row slabs of weights a unit; 0 for prefill.
        block_k: contraction elements a stage.
        max_routes: decode only: largest T * K that a launch may have; 0 for prefill (no limit).
        num_slices: prefill: the down projection runs in this many slices of columns; 0 for decode.
        watchdog: waits give up after two seconds and leave a diagnostic (for tests; slower).
    """

    kernel: Kernel
    dtype: str
    out_dtype: str
    weight_dtype: str = "fp32"
    index_dtype: str = "int64"
    gated: bool
    interleaved: bool = False
    w13_mn_major: bool = False
    w2_mn_major: bool = False
    has_b13: bool = False
    has_b2: bool = False
    activation: ActivationSpec
    weight_position: WeightPosition = WeightPosition.OUTPUT
    num_stages: int
    num_tokens_per_tile: int = 0
    num_slabs: int = 0
    block_k: int
    max_routes: int = 0
    num_slices: int = 0
    watchdog: bool = False

    @property
    def paired(self) -> bool:
        """Gate and up are neighbours along a contiguous 2I axis (gpt-oss): loaded as one matrix."""
        return self.interleaved and self.w13_mn_major

    @property
    def entry(self) -> str:
        """Name of the kernel function in the cubin."""
        return f"moeflex_{self.kernel}_layer"

    @property
    def name(self) -> str:
        """Short name for people and for the build cache."""
        tile = (
            f"n{self.num_tokens_per_tile}x{self.num_slabs}"
            if self.kernel is Kernel.DECODE
            else "128x256"
        )
        major = ("m" if self.w13_mn_major else "k") + ("m" if self.w2_mn_major else "k")
        return f"{self.kernel}-{tile}-{self.dtype}-{major}-{self.activation.kind}"

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return 352 if self.kernel is Kernel.DECODE else 384

    @property
    def block_m(self) -> int:
        """Prefill: rows a tile. Decode: weight rows a unit."""
        return 128 if self.kernel is Kernel.PREFILL else 64 * self.num_slabs

    @property
    def max_tiles(self) -> int:
        """Decode only: entries of the tile table."""
        if self.kernel is Kernel.PREFILL:
            return 0
        return self.max_routes // self.num_tokens_per_tile + min(MAX_EXPERTS, self.max_routes)


def _check_supported(experts: ExpertSpec, top_k: int, dtype: str, out_dtype: str) -> None:
    def refuse(what: str, came: str) -> None:
        raise UnsupportedError(
            f"the sm_90a layer kernel needs {what}; got {came}; use another lowering for this layer"
        )

    if dtype not in ("bf16", "fp16"):
        refuse("bf16 or fp16 activations and weights", dtype)
    if out_dtype not in ("bf16", "fp16", "fp32"):
        refuse("a bf16, fp16 or fp32 result", out_dtype)
    if experts.hidden % 8 or experts.intermediate % 8:
        refuse(
            "H and I that are multiples of 8 (16-byte rows)",
            f"H={experts.hidden}, I={experts.intermediate}",
        )
    if experts.num_experts > MAX_EXPERTS:
        refuse(f"at most {MAX_EXPERTS} experts", f"E={experts.num_experts}")
    if top_k > MAX_TOP_K:
        refuse(f"at most {MAX_TOP_K} experts a token", f"K={top_k}")
    if not experts.stacked:
        refuse("expert tensors stacked along E", "one tensor an expert")


def _decode_tile(num_routes: int, num_experts: int) -> tuple[int, int, int]:
    """(N, slabs, stages): N is the smallest class above the rows that the fullest expert of a random routing gets."""
    rows = num_routes / num_experts
    fullest = rows + 2.5 * math.sqrt(rows)
    if fullest <= 8:
        return (8, 1, 12) if num_routes <= 64 else (8, 2, 6)
    if fullest <= 16:
        return 16, 2, 5
    if fullest <= 32:
        return 32, 2, 5
    return 64, 2, 4


def _num_slices(experts: ExpertSpec, num_routes: int) -> int:
    """Column slices of the down projection of a prefill kernel."""
    # Two multiply loops (mixed orientations) leave no registers for warps that sum beside them.
    if experts.w13_orientation is not experts.w2_orientation:
        return 1
    many_rows = num_routes / experts.num_experts >= MIN_ROWS_TO_SLICE
    return 2 if many_rows and 2 * num_routes * experts.hidden >= MIN_BYTES_TO_SLICE else 1


def choose_config(
    plan: MoEPlan,
    tokens: int,
    dtype: str,
    *,
    weight_dtype: str = "fp32",
    index_dtype: str = "int64",
    watchdog: bool = False,
) -> CudaConfig:
    """The kernel for `tokens` tokens of `plan`.

    Args:
        plan: the plan.
        tokens: T, at least 1.
        dtype: of x and of the expert tensors.
        weight_dtype: of the combine weights.
        index_dtype: of the ids.
        watchdog: build with spin limits.

    Raises:
        UnsupportedError: this version has no kernel for the plan.
    """
    experts, top_k = plan.experts, plan.router.top_k
    out_dtype = plan.out_dtype or dtype
    _check_supported(experts, top_k, dtype, out_dtype)
    num_routes = tokens * top_k
    gated = experts.gated
    w13_mn_major = experts.w13_orientation is Orientation.IN_OUT
    interleaved = experts.gate_layout in (GateLayout.INTERLEAVED, GateLayout.INTERLEAVED_UP_FIRST)
    rows = num_routes / experts.num_experts
    decode = num_routes <= MAX_DECODE_ROUTES and rows <= MAX_DECODE_ROWS_PER_EXPERT
    if decode and not plan.batch_invariant:
        num_tokens, num_slabs, num_stages = _decode_tile(num_routes, experts.num_experts)
        if num_slabs == 1 and gated and w13_mn_major and not interleaved:
            num_slabs, num_stages = 2, 6
        tile = {
            "kernel": Kernel.DECODE,
            "num_tokens_per_tile": num_tokens,
            "num_slabs": num_slabs,
            "num_stages": num_stages,
            "block_k": 128,
            "max_routes": {8: 1024, 16: 2048, 32: 4096, 64: 4096}[num_tokens],
        }
        if num_routes > int(str(tile["max_routes"])):
            tile.update(num_tokens_per_tile=32, num_slabs=2, num_stages=5, max_routes=4096)
    else:
        tile = {
            "kernel": Kernel.PREFILL,
            "num_stages": 4,
            "block_k": 64,
            "num_slices": _num_slices(experts, num_routes),
        }
    return CudaConfig(
        dtype=dtype,
        out_dtype=out_dtype,
        weight_dtype=weight_dtype,
        index_dtype=index_dtype,
        gated=gated,
        interleaved=interleaved,
        w13_mn_major=w13_mn_major,
        w2_mn_major=experts.w2_orientation is Orientation.IN_OUT,
        has_b13=experts.has_b13,
        has_b2=experts.has_b2,
        activation=experts.activation,
        weight_position=experts.weight_position,
        watchdog=watchdog,
        **tile,  # type: ignore[arg-type]
    )


_ELEMENT = {"bf16": "Bf16", "fp16": "Fp16", "fp32": "Fp32"}
_INDEX = {"int64": "long long", "int32": "int"}
_ACTIVATION = {
    ActivationKind.SILU: "kSilu",
    ActivationKind.GELU: "kGelu",
    ActivationKind.GELU_TANH: "kGeluTanh",
    ActivationKind.RELU: "kRelu",
    ActivationKind.RELU2: "kRelu2",
    ActivationKind.SIGMOID: "kSigmoid",
    ActivationKind.IDENTITY: "kIdentity",
}
_POSITION = {
    WeightPosition.OUTPUT: "kOutput",
    WeightPosition.HIDDEN: "kHidden",
    WeightPosition.INPUT: "kInput",
}


def _float(value: float) -> str:
    """A C++ float; infinities become the largest finite values (the clamp is then off anyway)."""
    return f"{max(min(value, 3.4e38), -3.4e38)!r}f"


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _members(config: CudaConfig) -> dict[str, str]:
    """Constant name -> C++ declaration without the name's value; in the order of the file."""
    activation = config.activation
    clamp_gate = not (math.isinf(activation.gate_min) and math.isinf(activation.gate_max))
    clamp_up = not (math.isinf(activation.up_min) and math.isinf(activation.up_max))
    members = {
        "bool kGated": _bool(config.gated),
        "bool kPaired": _bool(config.paired),
        "bool kW13MnMajor": _bool(config.w13_mn_major),
        "bool kW2MnMajor": _bool(config.w2_mn_major),
        "bool kBias13": _bool(config.has_b13),
        "int kBias13Stride": "2" if config.interleaved else "1",
        "bool kBias2": _bool(config.has_b2),
        "Activation kActivation": f"Activation::{_ACTIVATION[activation.kind]}",
        "float kAlpha": _float(activation.alpha),
        "bool kClampGate": _bool(clamp_gate),
        "float kGateMin": _float(activation.gate_min),
        "float kGateMax": _float(activation.gate_max),
        "bool kClampUp": _bool(clamp_up),
        "float kUpMin": _float(activation.up_min),
        "float kUpMax": _float(activation.up_max),
        "float kUpShift": _float(activation.up_shift),
        "WeightPosition kWeightPosition": f"WeightPosition::{_POSITION[config.weight_position]}",
        "int kStages": str(config.num_stages),
        "int kBlockK": str(config.block_k),
    }
    if config.kernel is Kernel.DECODE:
        members["int kTokens"] = str(config.num_tokens_per_tile)
        members["int kSlabs"] = str(config.num_slabs)
        members["int kMaxRoutes"] = str(config.max_routes)
        return members
    # The three warpgroups have 3 * 168 registers a thread at entry: setmaxnreg can hand out no more.
    load = 72 if config.num_slices > 1 else 56
    members["int kSlices"] = str(config.num_slices)
    members["int kLoadRegisters"] = str(load)
    members["int kMathRegisters"] = str((3 * 168 - load) // 2)
    return members


_MAPS = {
    Kernel.PREFILL: ("gate", "up", "down", "h", "h_store", "y_store"),
    Kernel.DECODE: ("gate", "up", "down"),
}


def render(config: CudaConfig, template: str) -> str:
    """The CUDA source of `config`.

    Args:
        config: the choices.
        template: text of `templates/cuda/layer.cu.tmpl`.
    """
    types = {
        "Element": _ELEMENT[config.dtype],
        "Out": _ELEMENT[config.out_dtype],
        "Weight": _ELEMENT[config.weight_dtype],
        "Index": _INDEX[config.index_dtype],
    }
    lines = [f"  using {name} = {value};" for name, value in types.items()]
    lines += [f"  static constexpr {name} = {value};" for name, value in _members(config).items()]
    maps = _MAPS[config.kernel]
    parameters = [f"const __grid_constant__ moeflex::TensorMap {name}" for name in maps]
    return string.Template(template).substitute(
        title=config.name,
        defines="#define MOEFLEX_WATCHDOG 1\n" if config.watchdog else "",
        header=f"{config.kernel}.cuh",
        members="\n".join(lines),
        num_threads=config.num_threads,
        entry=config.entry,
        parameters=", ".join([*parameters, "const __grid_constant__ moeflex::LayerArgs args"]),
        kernel=config.kernel.capitalize(),
        arguments=", ".join(f"&{name}" for name in maps),
    )
