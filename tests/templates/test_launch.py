"""The C++ launcher gives a kernel what `runtime.cuda_launch` gives it, map by map; no GPU."""

from __future__ import annotations

import dataclasses
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_compiler.codegen import cuda_program
from moe_compiler.codegen.cuda import choose_config
from moe_compiler.runtime import cuda_launch, cuda_maps, cuda_target
from tests.runtime.test_cuda_layer import CASES, Case

SOURCE = Path(__file__).with_name("launch_test.cpp")


Run = Callable[[Case, int, bool, list[Tensor]], list[list[str]]]


@dataclasses.dataclass(frozen=True)
class RecordedMap:
    """What would be encoded; the address of the map is its number."""

    made: list[RecordedMap]
    fields: tuple[object, ...]

    @property
    def address(self) -> int:
        return self.made.index(self)


def experts_of(case: Case) -> list[Tensor]:
    spec = case.plan.experts
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
    return [torch.empty(spec.tensor_shape(role), dtype=dtype) for role in spec.tensor_roles]


def plan_of(case: Case, prefill: bool):
    return dataclasses.replace(case.plan, batch_invariant=prefill)


@pytest.fixture(scope="module")
def launched(compile_cpp: Callable[..., Path]) -> Run:
    program = compile_cpp(SOURCE, "-Wall", "-Wextra", "-Werror")

    def run(case: Case, tokens: int, prefill: bool, experts: list[Tensor]) -> list[list[str]]:
        plan = plan_of(case, prefill)
        made = cuda_program.make_program(
            plan,
            case.dtype,
            "",
            combine_dtype=case.weight_dtype,
            index_dtype=case.index_dtype,
            num_tokens=tokens,
        )
        (kernel,) = made.kernels
        numbers = [number for _, number in made.layer]
        # as the launcher gets them: all 32-bit numbers in front of the binary
        fields = bytes(cuda_target.launch_fields(kernel))
        size = cuda_target._Kernel.cubin_bytes.offset
        numbers += struct.unpack(f"{size // 4}i", fields[:size])
        numbers += [tokens, len(experts)]
        for tensor in experts:
            numbers += [tensor.data_ptr(), tensor.dim(), *tensor.shape, *tensor.stride()]
        done = subprocess.run(
            [program], input=" ".join(map(str, numbers)), capture_output=True, text=True, check=True
        )
        return [line.split() for line in done.stdout.splitlines()]

    return run


def recorded(monkeypatch, case: Case, tokens: int, prefill: bool, experts: list[Tensor]):
    """The Python launch of the same layer, without a GPU."""
    maps: list[RecordedMap] = []

    def record(address, dtype, dims, strides, box):
        maps.append(RecordedMap(maps, (dtype, address, *dims, *strides, *box)))
        return maps[-1]

    monkeypatch.setattr(cuda_maps, "TensorMap", record)
    monkeypatch.setattr(cuda_launch, "TensorMap", record)
    config = choose_config(plan_of(case, prefill), tokens, case.dtype)
    layer = object.__new__(cuda_launch.CudaLayer)
    layer.config, layer.plan = config, plan_of(case, prefill)
    layer.workspace = cuda_launch.plan_workspace(config, layer.plan, tokens)
    layer._args = cuda_launch.LayerArgs()
    _, routes, h, _ = layer.workspace.parts
    layer._args.h, layer._args.y = (1 << 50) + routes, (1 << 50) + routes + h
    monkeypatch.setattr(layer, "_check_expert_tensor", lambda *_: None)
    layer.bind(experts)
    return layer


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
@pytest.mark.parametrize("name", [n for n in CASES if n not in ("qwen3-30b", "gpt-oss")])
def test_maps_workspace_and_arguments(launched: Run, monkeypatch, name: str, kernel: str):
    prefill = kernel != "decode"
    case = CASES[name]
    experts = experts_of(case)
    for tokens in (1, 40):
        lines = launched(case, tokens, prefill, experts)
        layer = recorded(monkeypatch, case, tokens, prefill, experts)
        assert layer.config.kernel == kernel
        found = {int(line[1]): tuple(line[2:]) for line in lines if line[0] == "map"}
        order = next(line[1:] for line in lines if line[0] == "order")
        wanted = [tuple(map(str, m.fields)) for m in layer._maps]
        assert [found[int(number)] for number in order] == wanted
        sizes = layer.workspace
        (_, *workspace), (_, *args) = (
            next(line for line in lines if line[0] == kind) for kind in ("workspace", "args")
        )
        assert [int(word) for word in workspace] == [
            sizes.control_bytes,
            sizes.routes_bytes,
            sizes.h_bytes,
            sizes.y_bytes,
            sizes.num_rows,
            sizes.num_bytes - sizes.parts[0],
        ]
        a = layer._args
        fields = (a.up_first, a.bias13_expert_stride, a.bias_gate, a.bias_up, a.bias_down)
        offsets = (a.h - (1 << 50), a.y - (1 << 50))
        wide = case.plan.experts.gated or not case.b13
        assert [int(word) for word in args] == [
            int(field or 0) if wide or i != 3 else 0 for i, field in enumerate((*fields, *offsets))
        ]


def views(case: Case) -> list[tuple[str, list[Tensor]]]:
    """Expert tensors that no launch may read, and a word of the reason."""
    w13, w2 = experts_of(case)
    columns = torch.empty(*w2.shape[:2], w2.shape[2] + 4, dtype=w2.dtype)[:, :, :-4]
    flat = torch.empty(w2.numel() + 1, dtype=w2.dtype)
    return [
        ("contiguous last axis", [w13, w2.transpose(1, 2).contiguous().transpose(1, 2)]),
        ("multiples of 16 bytes", [w13, columns]),
        ("multiple of 16 bytes", [w13, flat[1:].view(w2.shape)]),
        ("must be [8, 256, 256]; got [8, 256, 128]", [w13[:, :, :128], w2]),
        ("another number of expert tensors", [w13]),
    ]


def test_layouts_that_cannot_be_read_are_refused(launched: Run):
    case = CASES["plain"]
    for reason, experts in views(case):
        (line,) = [words for words in launched(case, 3, False, experts) if words[0] != "map"]
        assert reason in " ".join(line), line


def test_counters_belong_to_a_stream_or_to_a_capture(compile_cpp: Callable[..., Path]) -> None:
    source = SOURCE.with_name("counters_test.cpp")
    program = compile_cpp(source, "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined")
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.stdout == "ok\n", done.stdout + done.stderr
