"""`round_gemms`: the kernel rounds where a graph that casts its GEMM operands down rounds."""

from __future__ import annotations

import pytest
import torch

from moe_compiler import cpu_kernels
from moe_compiler.ir import (
    ActivationKind,
    ActivationSpec,
    ExpertSpec,
    GateLayout,
    MoEPlan,
    RouterSpec,
    Score,
)
from moe_compiler.reference import moe_layer
from moe_compiler.runtime import cpu_target, op

pytestmark = pytest.mark.skipif(cpu_target.unavailable() is not None, reason="needs a C++ compiler")


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512", "avx512_bf16", "amx_bf16"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("tokens", [3, 70])
def test_results_are_rounded_like_the_graph_rounds(
    isa: str, dtype: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa not in cpu_target.runnable_isas():
        pytest.skip(f"this machine does not run {isa}")
    monkeypatch.setenv("MOEFLEX_CPU_ISA", isa)
    spec = ExpertSpec(
        num_experts=4,
        hidden=48,
        intermediate=40,
        gate_layout=GateLayout.CONCAT,
        activation=ActivationSpec(kind=ActivationKind.SILU),
    )
    router = RouterSpec(score=Score.EXTERNAL, top_k=1)
    rounding = MoEPlan(router=router, experts=spec, out_dtype="fp32", round_gemms=True)
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    x = torch.randn(tokens, 48).to(narrow)
    ids = torch.randint(0, 4, (tokens, 1))
    weights = torch.ones(tokens, 1)
    experts = [torch.randn(spec.tensor_shape(role)).to(narrow) for role in spec.tensor_roles]

    cpu_kernels.prepare(rounding, dtype, [dtype])
    op.load_library("CPU", cpu_target.load_op_library)
    cpu_target.wait()
    ours = torch.ops.moeflex.moe_layer(x, [ids, weights], experts, rounding.key)
    expected = moe_layer(rounding, x, [ids, weights], experts)

    # with one route of weight 1 the result is the rounded GEMM result itself
    assert torch.equal(ours, ours.to(narrow).float())
    # a sum in another order may fall on the other side of a rounding, seldom
    assert (ours != expected).float().mean() < 0.1
    torch.testing.assert_close(ours, expected, rtol=2e-2, atol=5e-2)
