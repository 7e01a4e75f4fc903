"""Compile the Triton kernels of layers and routers for GPUs that are not here.

    python -m tests.runtime.triton_ahead         # one JSON line a kernel; without TRITON_INTERPRET

A launch is recorded instead of run, on meta tensors, so that what is compiled is what a user's call
would compile: the same constants, the same argument types, strides of 1 and multiples of 16 known.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_compiler.codegen import triton as codegen
from moe_compiler.ir import MoEPlan, RouterSpec
from moe_compiler.reference import DTYPES
from moe_compiler.runtime import triton_layer, triton_router
from tests.runtime import triton_cases

CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0))
# A copy of 16 bytes into shared memory that the threads do not wait for.
_COPY = re.compile(r"cp\.async\.cg\.shared\.global [^;]*, 0x10")
_LETTERS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclasses.dataclass(frozen=True)
class Launch:
    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]


class _Recorder:
    def __init__(self, launches: list[Launch], kernel: Any) -> None:
        self._launches, self._kernel = launches, kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        assert all(size > 0 for size in grid)
        return lambda *args, **constants: self._launches.append(
            Launch(self._kernel, args, constants)
        )


def record(run: Callable[[], Any]) -> list[Launch]:
    """The Triton launches of `run`, which are not made."""
    launches: list[Launch] = []
    fake = mock.Mock(side_effect=lambda kernel: _Recorder(launches, kernel))
    with mock.patch("torch.library.wrap_triton", fake):
        run()
    return launches


def compile_launch(launch: Launch, capability: tuple[int, int]) -> dict[str, Any]:
    """Compile; what the kernel takes of the GPU."""
    options = {k: v for k, v in launch.constants.items() if k in ("num_warps", "num_stages")}
    constants = {k: v for k, v in launch.constants.items() if k not in options}
    signature, attributes = {}, {}
    for index, (name, value) in enumerate(zip(launch.kernel.arg_names, launch.args, strict=False)):
        if isinstance(value, Tensor):
            signature[name] = "*" + _LETTERS[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif value == 1:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    signature.update(dict.fromkeys(launch.constants.keys() - options.keys(), "constexpr"))
    source = ASTSource(launch.kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    compiled = triton.compile(source, target=target, options=options)
    return {
        "kernel": launch.kernel.__name__,
        "sm": target.arch,
        "shared": compiled.metadata.shared,
        "cubin_bytes": len(compiled.asm["cubin"]),
        "mma": "mma" in compiled.asm["ptx"],
        "copies": len(_COPY.findall(compiled.asm["ptx"])),
    }


def layer_launches(
    plan: MoEPlan, num_tokens: int, dtype: str, capability: tuple[int, int]
) -> list[Launch]:
    config = codegen.choose_config(plan, num_tokens, dtype, capability)
    spec, top_k = plan.experts, plan.router.top_k
    experts = [
        torch.empty(spec.tensor_shape(role), dtype=DTYPES[dtype], device="meta")
        for role in spec.tensor_roles
    ]
    x = torch.empty(num_tokens, spec.hidden, dtype=DTYPES[dtype], device="meta")
    ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device="meta")
    weights = torch.empty(num_tokens, top_k, device="meta")
    return record(lambda: triton_layer.layer(plan, config, x, ids, weights, experts))


def router_launches(spec: RouterSpec) -> list[Launch]:
    logits = torch.empty(64, spec.num_experts, device="meta")
    bias = torch.empty(spec.num_experts, device="meta") if spec.has_bias else None
    return record(lambda: triton_router.route(spec, logits, bias))


def everything(few: bool) -> Iterator[tuple[str, list[Launch], tuple[int, int]]]:
    """(name, launches, capability); `few`: one shape a GPU."""
    for capability in CAPABILITIES:
        routers = ("qwen3", "deepseek-v3") if few else tuple(triton_cases.ROUTERS)
        for name in routers:
            yield name, router_launches(triton_cases.ROUTERS[name]), capability
        for name in (
            ("gpt-oss",)
            if few
            else ("qwen3-30b", "gpt-oss", "separate-1408", "fp32-large", "relu2-plain")
        ):
            case = triton_cases.LAYERS[name]
            for num_tokens in (256,) if few else (1, 256, 8192):
                launches = layer_launches(case.plan, num_tokens, case.dtype, capability)
                yield f"{name} T={num_tokens}", launches, capability


def main() -> None:
    for name, launches, capability in everything("--few" in sys.argv):
        for launch in launches:
            print(json.dumps({"case": name, **compile_launch(launch, capability)}), flush=True)


if __name__ == "__main__":
    main()
