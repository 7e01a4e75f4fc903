"""The CPU kernel of one MoE layer: which types and constants, as source text.

`choose_config` picks a `CpuConfig` from the plan, the dtypes and the instruction set; `render` writes the translation
unit that names those choices. Everything with a branch or a loop is C++ under `templates/cpu`.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Sequence

from moe_compiler.codegen.layer_codes import layer_entries
from moe_compiler.errors import PlanError
from moe_compiler.ir import (
    ActivationSpec,
    CpuKernel,
    ExpertSpec,
    Isa,
    MoEPlan,
    Name,
    Score,
    WeightPosition,
)


class Compute(Name):
    """What the multiply-adds take; sums are fp32, or fp64 for F64."""

    BF16 = "KindBF16"  # pairs of bf16 into fp32
    F32 = "KindF32"
    F64 = "KindF64"


_TYPES = {"bf16": "moeflex::bf16", "fp16": "moeflex::fp16", "fp32": "float", "fp64": "double"}
_AVX512 = (Isa.AVX512, Isa.AVX512_BF16, Isa.AMX_BF16)
_ELEMENT = {Compute.BF16: "bf16", Compute.F32: "fp32", Compute.F64: "fp64"}
# Up to this many rows an expert's weights are streamed through dot products; above, they are packed into panels, or
# taken by AMX tiles where they lie (op alone, two threads, Zen 4 and Xeon, T = 8 to 512).
_DIRECT_ROWS = {
    Compute.BF16: {Isa.AVX512_BF16: 32, Isa.AMX_BF16: 3},
    Compute.F32: {Isa.SCALAR: 16, Isa.AVX2: 16, **dict.fromkeys(_AVX512, 32)},
    Compute.F64: {},
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CpuConfig:
    """All compile-time choices of one layer kernel; sizes are run-time arguments, so that layers share kernels.

    Attributes:
        isa: instruction set.
        compute: what the multiply-adds take.
        x_dtype, w13_dtype, w2_dtype, out_dtype: "bf16" | "fp16" | "fp32" | "fp64".
        gated: there is an up projection next to the gate.
        weight_position: where the combine weight enters.
        activation: the activation.
        round_gemms: both GEMM results, and the activation, are rounded to the dtype of the weights.
    """

    isa: Isa
    compute: Compute
    x_dtype: str
    w13_dtype: str
    w2_dtype: str
    out_dtype: str
    gated: bool
    weight_position: WeightPosition
    activation: ActivationSpec
    round_gemms: bool = False

    @property
    def name(self) -> str:
        """Short name, for people and for the build cache."""
        act = self.activation.kind.value
        return f"cpu-moe-{self.x_dtype}-{self.w13_dtype}-{act}-{self.isa.value}"


def role_dtypes(spec: ExpertSpec, weight_dtypes: Sequence[str]) -> dict[str, str]:
    """The dtype of each tensor role.

    Args:
        spec: the experts.
        weight_dtypes: one a role, or one a tensor (list storage), or a single one for all.

    Raises:
        PlanError: the number of dtypes fits none of these, or the tensors of a role differ.
    """
    roles, given = spec.tensor_roles, tuple(weight_dtypes)
    if len(given) == 1:
        return dict.fromkeys(roles, given[0])
    if len(given) == len(roles):
        return dict(zip(roles, given, strict=True))
    if len(given) != spec.num_tensors:
        raise PlanError(
            f"the experts have {len(roles)} roles ({', '.join(roles)}) in {spec.num_tensors} tensors; "
            f"got {len(given)} dtypes"
        )
    count = spec.num_experts
    found = {}
    for i, role in enumerate(roles):
        dtypes = set(given[i * count : (i + 1) * count])
        if len(dtypes) != 1:
            raise PlanError(
                f"the tensors of role {role!r} must share one dtype; got {', '.join(sorted(dtypes))}"
            )
        found[role] = dtypes.pop()
    return found


def unsupported(plan: MoEPlan, x_dtype: str, weight_dtypes: Sequence[str]) -> str | None:
    """Why the CPU kernel cannot compute this plan with these dtypes; None when it can."""
    if plan.router.score is not Score.EXTERNAL:
        return "the CPU kernel takes ids and weights from the graph; this plan holds a router"
    try:
        roles = role_dtypes(plan.experts, weight_dtypes)
    except PlanError as error:
        return str(error)
    dtypes = {"x": x_dtype, "the result": plan.out_dtype or x_dtype, **roles}
    for what, dtype in dtypes.items():
        if dtype not in _TYPES:
            return f"the CPU kernel computes in {', '.join(_TYPES)}; {what} is {dtype}"
    sizes = (plan.experts.num_experts, plan.experts.hidden, plan.experts.intermediate)
    return None if min(sizes) > 0 else f"the layer is empty: E, H, I = {sizes}"


def choose_config(plan: MoEPlan, x_dtype: str, weight_dtypes: Sequence[str], isa: Isa) -> CpuConfig:
    """Pick the kernel of `plan` for these dtypes on `isa`.

    Raises:
        PlanError: see `role_dtypes`.
    """
    spec = plan.experts
    roles = role_dtypes(spec, weight_dtypes)
    first, second = roles[spec.tensor_roles[0]], roles["w2"]
    compute = _compute(x_dtype, first, second, isa)
    return CpuConfig(
        isa=isa,
        compute=compute,
        x_dtype=x_dtype,
        w13_dtype=first,
        w2_dtype=second,
        out_dtype=plan.out_dtype or x_dtype,
        gated=spec.gated,
        weight_position=spec.weight_position,
        activation=spec.activation,
        round_gemms=plan.round_gemms,
    )


def _compute(x_dtype: str, first: str, second: str, isa: Isa) -> Compute:
    if "fp64" in (x_dtype, first, second):
        return Compute.F64
    if isa in (Isa.AVX512_BF16, Isa.AMX_BF16) and x_dtype == first == second == "bf16":
        return Compute.BF16
    return Compute.F32


def direct_rows(plan: MoEPlan, config: CpuConfig) -> int:
    """Experts with up to this many rows stream their weights where they lie; 0 keeps to batch-invariant panels."""
    return 0 if plan.batch_invariant else _DIRECT_ROWS[config.compute].get(config.isa, 0)


def render(config: CpuConfig, template: str) -> str:
    """The C++ source of `config`.

    Args:
        config: the choices.
        template: text of `templates/cpu/kernel.cpp.in`.
    """
    act = config.activation
    limits = ("alpha", "gate_min", "gate_max", "up_min", "up_max", "up_shift")
    return string.Template(template).substitute(
        summary=f"{config.name}, {act.name}",
        kind=config.compute.value,
        x_type=_TYPES[config.x_dtype],
        w13_type=_TYPES[config.w13_dtype],
        w2_type=_TYPES[config.w2_dtype],
        out_type=_TYPES[config.out_dtype],
        x_is_element=_bool(config.x_dtype == _ELEMENT[config.compute]),
        gated=_bool(config.gated),
        round_gemms=_bool(config.round_gemms),
        position=config.weight_position.value,
        activation=act.kind.value,
        **{name: _number(getattr(act, name)) for name in limits},
    )


_ABI = 1
_DTYPE_CODES = {"bf16": 0, "fp16": 1, "fp32": 2, "fp64": 3}


def make_kernel(
    plan: MoEPlan, x_dtype: str, weight_dtypes: Sequence[str], isa: Isa, template: str
) -> CpuKernel:
    """The kernel of `plan` for these dtypes on `isa`, rendered.

    Raises:
        PlanError: see `role_dtypes`.
    """
    spec = plan.experts
    config = choose_config(plan, x_dtype, weight_dtypes, isa)
    dtypes = role_dtypes(spec, weight_dtypes)
    # `MoeflexLayerSpec` of templates/cpu/op_table.h
    layer = {
        "abi": _ABI,
        **layer_entries(plan),
        "stacked": spec.stacked,
        "x_dtype": _DTYPE_CODES[x_dtype],
        "out_dtype": _DTYPE_CODES[plan.out_dtype or x_dtype],
        "direct_rows": direct_rows(plan, config),
        "isa": list(Isa).index(isa),
        "num_roles": len(spec.tensor_roles),
    }
    return CpuKernel(
        name=config.name,
        source=render(config, template),
        isa=isa,
        plan_key=plan.key,
        layer=tuple((name, int(entry)) for name, entry in layer.items()),
        role_dtypes=tuple(_DTYPE_CODES[dtypes[role]] for role in spec.tensor_roles),
    )


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _number(value: float) -> str:
    if value in (float("inf"), float("-inf")):
        return "INFINITY" if value > 0 else "-INFINITY"
    return repr(float(value))
