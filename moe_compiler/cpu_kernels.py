"""From a plan to a CPU kernel: where the text of `codegen` meets the compiler of `runtime`."""

from __future__ import annotations

from collections.abc import Sequence

from moe_compiler.codegen import cpu as codegen
from moe_compiler.ir import CpuKernel, Isa, MoEPlan
from moe_compiler.runtime import cpu_target


def unsupported(plan: MoEPlan, x_dtype: str, weight_dtypes: Sequence[str]) -> str | None:
    """Why the CPU kernel cannot serve this plan; None when it can.

    Args:
        plan: the plan.
        x_dtype: "bf16" | "fp16" | "fp32" | "fp64".
        weight_dtypes: one a tensor role, or one a tensor, or a single one for all.
    """
    return codegen.unsupported(plan, x_dtype, weight_dtypes)


def prepare(plan: MoEPlan, x_dtype: str, weight_dtypes: Sequence[str]) -> None:
    """Start to build what `plan` needs on these dtypes; `cpu_target.wait` joins.

    Raises:
        ToolchainError: there is no compiler.
        OptionError: `MOEFLEX_CPU_ISA` names an instruction set that cannot run here.
        PlanError: `weight_dtypes` does not fit the plan.
    """
    cpu_target.prepare(_kernel(plan, x_dtype, weight_dtypes))


def built(plan: MoEPlan, x_dtype: str, weight_dtypes: Sequence[str]) -> cpu_target.BuiltKernel:
    """The kernel of a plan that was prepared, once it is built; same arguments as `prepare`.

    Raises:
        BuildError: its build failed.
    """
    return cpu_target.built(_kernel(plan, x_dtype, weight_dtypes))


def _kernel(plan: MoEPlan, x_dtype: str, weight_dtypes: Sequence[str]) -> CpuKernel:
    isa, template = Isa(cpu_target.isa()), cpu_target.kernel_template()
    return codegen.make_kernel(plan, x_dtype, weight_dtypes, isa, template)


def finish() -> None:
    """Wait for the builds and let the built library serve the op.

    Raises:
        BuildError: a build failed; the message names its log.
    """
    from moe_compiler.runtime import op

    cpu_target.wait()
    op.load_library("CPU", cpu_target.load_op_library)
