"""The Hopper layer kernels on paper: their own C++ on an emulated GPU, against the reference.

What is emulated is in `cuda_emulator/`: fibers for threads, barriers, bulk copies that land late, the operand
layouts of wgmma and stmatrix. A wrong layout, a missing wait or a deadlock is found here, without a GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_compiler import reference
from moe_compiler.codegen.cuda import CudaConfig, choose_config, render
from moe_compiler.codegen.cuda import Kernel as KernelKind
from moe_compiler.ir import (
    ActivationKind,
    ActivationSpec,
    ExpertSpec,
    GateLayout,
    MoEPlan,
    Orientation,
    RouterSpec,
    Score,
    WeightPosition,
)
from moe_compiler.runtime import cuda_launch, cuda_maps
from moe_compiler.runtime.cuda_build import read_template
from tests.tolerances import assert_close_to_fp32

HERE = Path(__file__).resolve().parent
TEMPLATES = HERE.parents[1] / "templates"
NUM_BLOCKS = 2
KN = Orientation.IN_OUT


class MapContents(ctypes.Structure):
    """`moeflex::MapContents` of cuda_emulator/ptx.cuh."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("rank", ctypes.c_int),
        ("dims", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 5),
        ("box", ctypes.c_uint32 * 5),
    )


class EmulatedMap:
    """Stands for `cuda_driver.TensorMap`."""

    def __init__(
        self,
        address: int,
        dtype: str,
        dims: Sequence[int],
        strides_bytes: Sequence[int],
        box: Sequence[int],
    ) -> None:
        self._contents = MapContents(base=address, rank=len(dims))
        self._contents.dims[: len(dims)] = list(dims)
        self._contents.strides[1 : len(dims)] = list(strides_bytes)
        self._contents.box[: len(dims)] = list(box)
        self.address = ctypes.addressof(self._contents)


@dataclasses.dataclass
class EmulatedKernel:
    """Stands for `cuda_driver.Kernel`."""

    library: ctypes.CDLL
    seed: int = 1

    def launch(
        self, grid: int, num_threads: int, arguments: Any, stream: int, cooperative: bool
    ) -> None:
        """Run it; every launch in another order."""
        self.seed += 1
        assert self.library.emulate(arguments, grid, num_threads, self.seed) == 0, "deadlock"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launch asks the GPU for."""
    monkeypatch.setattr(cuda_maps, "TensorMap", EmulatedMap)
    monkeypatch.setattr(cuda_launch, "TensorMap", EmulatedMap)
    monkeypatch.setattr(cuda_launch.CudaLayer, "_check_expert_tensor", lambda *_: None)
    properties = SimpleNamespace(multi_processor_count=NUM_BLOCKS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))


@functools.cache
def compile_kernel(
    config: CudaConfig, compile_cpp: Any, folder: Path, seeded_bug: tuple[str, str] = ("", "")
) -> ctypes.CDLL:
    """The kernel of `config` with the emulated instructions in the place of the real ones.

    `seeded_bug`: a text of the kernel's header, and what stands in its place.
    """
    folder = folder / f"{config.name}-{abs(hash((config, seeded_bug))):x}"
    folder.mkdir()
    for path in [*TEMPLATES.glob("cuda/*.cuh"), *TEMPLATES.glob("cuda/layer_args.h")]:
        shutil.copy(path, folder)
    for path in (HERE / "cuda_emulator").iterdir():
        shutil.copy(path, folder)
    header = folder / f"{config.kernel}.cuh"
    assert seeded_bug[0] in header.read_text()
    header.write_text(
        header.read_text().replace(*seeded_bug) if seeded_bug[0] else header.read_text()
    )
    source = render(config, read_template())
    members = re.search(r"struct Config \{.*?\n\};", source, re.DOTALL)
    parameters = re.search(r"\.run\((.*?)\);", source)
    assert members
    assert parameters
    num_maps = parameters.group(1).count("&")
    kind = config.kernel.capitalize()
    lines = [
        f'#include "{config.kernel}.cuh"',
        f"#define NUM_MAPS {num_maps}",
        "#define RUN_ARGUMENTS(maps) " + ", ".join(f"&maps[{i}]" for i in range(num_maps)),
        "namespace moeflex {",
        f"template <class C> using KERNEL = {kind}<C>;",
        members.group(0),
        "}",
    ]
    (folder / "config.h").write_text("\n".join(lines))
    flags = ("-std=c++17", "-O2", "-shared", "-fPIC", "-w", f"-I{TEMPLATES}", f"-I{folder}")
    return ctypes.CDLL(str(compile_cpp(folder / "run_layer.cpp", *flags)))


@dataclasses.dataclass(frozen=True)
class Case:
    """A small layer."""

    intermediate: int = 96
    hidden: int = 136
    experts: int = 5
    top_k: int = 2
    layout: GateLayout = GateLayout.CONCAT
    orientation: Orientation = Orientation.OUT_IN
    activation: ActivationKind = ActivationKind.SILU
    position: WeightPosition = WeightPosition.OUTPUT

    @property
    def plan(self) -> MoEPlan:
        """As a plan."""
        return MoEPlan(
            router=RouterSpec(score=Score.EXTERNAL, top_k=self.top_k, num_experts=self.experts),
            experts=ExpertSpec(
                num_experts=self.experts,
                hidden=self.hidden,
                intermediate=self.intermediate,
                gate_layout=self.layout,
                w13_orientation=self.orientation,
                w2_orientation=self.orientation,
                activation=ActivationSpec(kind=self.activation),
                weight_position=self.position,
            ),
        )


CASES = {
    "plain": Case(),
    "up-first": Case(layout=GateLayout.CONCAT_UP_FIRST),
    "larger": Case(intermediate=328, hidden=264),
    "shard": Case(intermediate=192, hidden=264),
    "mn-major": Case(orientation=KN),
    "interleaved": Case(layout=GateLayout.INTERLEAVED),
    "interleaved-mn-major": Case(layout=GateLayout.INTERLEAVED, orientation=KN, intermediate=200),
    "not-gated": Case(layout=GateLayout.NONE, activation=ActivationKind.RELU2, intermediate=320),
    "not-gated-mn-major": Case(
        layout=GateLayout.NONE, activation=ActivationKind.RELU2, orientation=KN
    ),
    "hidden-weight": Case(position=WeightPosition.HIDDEN),
    "input-weight": Case(position=WeightPosition.INPUT, orientation=KN, top_k=1),
}


# The cases that differ most; the others are run by hand and at night.
QUICK = {
    KernelKind.DECODE: ("plain", "mn-major", "interleaved-mn-major"),
    KernelKind.PREFILL: ("plain", "larger", "mn-major"),
}
RUNS = [
    pytest.param(kind, name, marks=() if name in QUICK[kind] else pytest.mark.slow)
    for kind in KernelKind
    for name in CASES
]


def check(
    case: Case,
    kind: str,
    num_tokens: int,
    compile_cpp: Any,
    folder: Path,
    seeded_bug: tuple[str, str] = ("", ""),
    num_launches: int = 2,
) -> None:
    """Launches in different orders, each with the counters that the one before left."""
    torch.manual_seed(num_tokens)
    plan = dataclasses.replace(case.plan, batch_invariant=kind != KernelKind.DECODE)
    config = choose_config(plan, num_tokens, "bf16")
    assert config.kernel == kind
    experts = []
    for role in plan.experts.tensor_roles:
        shape = plan.experts.tensor_shape(role)
        scale = (case.intermediate if role == "w2" else case.hidden) ** -0.5
        experts.append((torch.randn(shape) * scale).bfloat16())
    x = torch.randn(num_tokens, case.hidden).bfloat16()
    logits = torch.randn(num_tokens, case.experts) + torch.randn(case.experts)
    weights, ids = logits.softmax(-1).topk(case.top_k)
    ids[torch.rand(ids.shape) < 0.1] = -1
    kernel: Any = EmulatedKernel(compile_kernel(config, compile_cpp, folder, seeded_bug))
    layer = cuda_launch.CudaLayer(kernel, config, plan, experts, num_tokens)
    outs = []
    for _ in range(num_launches):
        for buffer in layer._buffers[1:]:
            buffer.fill_(0xFF)
        outs.append(layer(x, ids, weights, torch.full_like(x, float("nan"))))
        assert not layer._buffers[0].any(), "the kernel left a counter that is not zero"
        assert torch.equal(outs[0], outs[-1])
    eager = reference.moe_layer(plan, x, [ids, weights], experts)
    fp32_plan = dataclasses.replace(plan, out_dtype="fp32")
    fp32 = reference.moe_layer(
        fp32_plan, x.float(), [ids, weights], [tensor.float() for tensor in experts]
    )
    assert_close_to_fp32(outs[0], eager, fp32)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("kind", "name"), RUNS)
def test_layer_on_paper(kind: str, name: str, compile_cpp: Any, tmp_path: Path) -> None:
    check(CASES[name], kind, 40, compile_cpp, tmp_path)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("kind", "num_tokens"),
    [
        (KernelKind.DECODE, 1),
        (KernelKind.PREFILL, 1),
        (KernelKind.PREFILL, 300),
    ],
)
def test_few_and_many_tokens_on_paper(
    kind: str, num_tokens: int, compile_cpp: Any, tmp_path: Path
) -> None:
    check(CASES["plain"], kind, num_tokens, compile_cpp, tmp_path)


SEEDED_BUGS = {
    "h is read before it is there": (
        KernelKind.DECODE,
        "wait_at_least(work.h_done + unit.tile, n0);",
        ";",
    ),
    "tokens are multiplied before they are there": (
        KernelKind.DECODE,
        "shared.full[stage.index].wait(stage.parity);",
        "",
    ),
    "staging is overwritten before it is stored": (
        KernelKind.PREFILL,
        "if (thread == 0) tma_wait_read();",
        "",
    ),
    "a warp falls behind in a skipped tile": (
        KernelKind.PREFILL,
        "named_barrier(1 + warpgroup, 128);\n        stage.advance(num_steps);",
        "for (; num_steps; --num_steps, stage.advance())"
        " shared.full[stage.index].wait(stage.parity);",
    ),
    "the last tile is never published": (
        KernelKind.PREFILL,
        "publish(thread);\n        for (int slice",
        "for (int slice",
    ),
}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("bug", list(SEEDED_BUGS))
def test_a_seeded_bug_is_found(bug: str, compile_cpp: Any, tmp_path: Path) -> None:
    kind, old, new = SEEDED_BUGS[bug]
    case = Case(intermediate=328, hidden=264, experts=1 if bug.startswith("h ") else 5, top_k=1)
    with pytest.raises(AssertionError, match=r"deadlock|equal|err"):
        check(case, kind, 30, compile_cpp, tmp_path, (old, new), num_launches=20)
