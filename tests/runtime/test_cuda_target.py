"""The Hopper target on a machine without a GPU: it builds, loads and takes the table; it does not launch."""

from __future__ import annotations

import logging

import pytest
import torch

from moe_compiler import cuda_kernels, placement, triton_kernels
from moe_compiler.codegen import cuda_program
from moe_compiler.errors import BuildError, ToolchainError
from moe_compiler.layer import Device, Layer
from moe_compiler.options import Options
from moe_compiler.passes.match_moe import find_regions
from moe_compiler.passes.replace import replace_region
from moe_compiler.reference import DTYPE_NAMES
from moe_compiler.runtime import cuda_build, cuda_target, op, toolchain
from moe_compiler.runtime.build import build
from tests.codegen.test_cuda_program import plan_of
from tests.models import styles
from tests.passes import graphs

HOPPER = cuda_kernels.Hopper()
SM_90 = Device(type="cuda", capability=(9, 0))
LAYER = Layer(plan=plan_of(), x_dtype="bf16", weight_dtypes=("bf16", "bf16"), num_tokens=4)

needs_compilers = pytest.mark.skipif(
    bool(cuda_target.unavailable()), reason="needs a C++ compiler, and nvcc or NVRTC"
)


@pytest.fixture
def state(monkeypatch) -> cuda_target._State:
    """A process that has built nothing yet."""
    fresh = cuda_target._State()
    monkeypatch.setattr(cuda_target, "_state", fresh)
    return fresh


@pytest.fixture
def placeable(monkeypatch) -> None:
    monkeypatch.setattr(cuda_target, "unavailable", lambda: "")


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ((9, 0), ""),
        ((8, 0), "this is sm_80"),
        ((8, 9), "this is sm_89"),
        ((10, 0), "this is sm_100"),
        ((12, 1), "this is sm_121"),
        ((0, 0), "this is cuda"),
    ],
)
def test_hopper_and_nothing_else(placeable, capability, reason) -> None:
    found = HOPPER.unsupported(LAYER, Device(type="cuda", capability=capability))
    assert reason in found
    assert bool(found) == bool(reason)


@pytest.mark.parametrize(
    ("strides", "reason"),
    [
        (((4096, 64, 1), (2048, 32, 1)), ""),
        (((4096, 64, 1), (2048, 1, 64)), "last axis is contiguous"),
        (((4096, 68, 1), (2048, 32, 1)), "multiples of 16 bytes"),
        (((64, 1), (2048, 32, 1)), ""),  # a bias
    ],
)
def test_strides_decide_before_anything_is_built(placeable, strides, reason) -> None:
    layer = Layer(plan=plan_of(), x_dtype="bf16", weight_dtypes=("bf16",), expert_strides=strides)
    found = HOPPER.unsupported(layer, SM_90)
    assert reason in found
    assert bool(found) == bool(reason)


def test_missing_compilers_are_said_once_and_do_not_count_elsewhere(monkeypatch, caplog) -> None:
    monkeypatch.setattr(cuda_kernels, "_warned", False)
    monkeypatch.setattr(cuda_build, "find_nvrtc", lambda: None)
    monkeypatch.setattr(cuda_build, "find_nvcc", lambda: None)
    for _ in range(2):
        assert "nvcc on the PATH" in HOPPER.unsupported(LAYER, SM_90)
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "nvcc" in record.getMessage()
    there = Device(type="cuda", capability=(9, 0), here=False)
    assert HOPPER.unsupported(LAYER, there) == ""


def test_a_missing_cpp_compiler_is_the_reason(monkeypatch) -> None:
    def missing() -> None:
        raise ToolchainError("no g++ here")

    monkeypatch.setattr(toolchain, "find_compiler", missing)
    assert "no g++ here" in HOPPER.unsupported(LAYER, SM_90)


def test_workspace_grows_with_the_tokens() -> None:
    sizes = [HOPPER.workspace_bytes(LAYER, tokens) for tokens in (1, 64, 8192)]
    assert 0 < sizes[0] < sizes[1] < sizes[2]


def test_the_reason_reaches_the_placement_of_a_block(placeable) -> None:
    block = styles.build("gathered_einsum", dtype=torch.bfloat16)
    (match,) = graphs.match(block, styles.rows(dtype=torch.bfloat16)).matches
    placed = placement.place(match, Options(), device=SM_90)
    assert placed.title == "cuda sm_90a"
    assert placed.layer.num_tokens == styles.rows()[..., 0].numel()
    assert placed.layer.index_dtype == "int64"
    assert placed.plan.router.score.value == "external"
    elsewhere = placement.place(match, Options(), device=Device(type="cuda", capability=(7, 5)))
    assert "this is sm_75" in elsewhere.title


@pytest.mark.parametrize("absorb", ["auto", "never"])
@pytest.mark.parametrize("style", ["gathered_einsum", "grouped_score_after", "dense_einsum"])
def test_kernels_are_built_for_the_dtypes_that_the_graph_has(placeable, style, absorb) -> None:
    """A kernel for other ids or weights would never be found by the launcher."""
    seen = []

    def edit(gm, example_inputs) -> None:
        found = find_regions(gm, example_inputs)
        (match,) = found.matches
        placed = placement.place(match, Options(absorb_router=absorb), device=SM_90)
        assert placed.target == HOPPER.NAME, placed.reason
        if placed.router is not None:
            triton_kernels.define_ops()
        replace_region(
            gm,
            match,
            placed.plan,
            flow=found.flow,
            router=placed.router,
            layer_op=placed.layer_op,
        )
        (layer,) = [n for n in gm.graph.nodes if "moe_layer" in str(n.target)]
        ids, weights = (n.meta["example_value"] for n in layer.args[1])
        asked = placed.layer
        assert str(ids.dtype) == f"torch.{asked.index_dtype}"
        assert DTYPE_NAMES[weights.dtype] == asked.combine_dtype
        seen.append(placed)

    block = styles.build(style, dtype=torch.bfloat16)
    with torch.no_grad(), op.plain_torch():
        graphs.capture(block, styles.rows(dtype=torch.bfloat16), edit=edit)
    assert len(seen) == 1


@needs_compilers
def test_the_launcher_compiles_without_cuda_headers_and_without_warnings() -> None:
    unit = cuda_target.library_unit()
    assert "cuda.h" not in unit.source + "".join(unit.inputs.values())
    log = build(unit).path.replace("op.so", "log.txt")
    with open(log) as text:
        assert text.read() == ""


@needs_compilers
def test_prepare_builds_loads_and_registers_once(state) -> None:
    HOPPER.prepare(LAYER, SM_90)
    cuda_target.wait()
    try:
        op.load_library("CUDA", cuda_target.load_op_library)
        assert not op.served_in_plain_torch("cuda")
        (job,) = state.kernels.values()
        assert job.result().resources.shared_bytes > 0
        registered = set(state.registered)
        assert len(registered) == 1
        HOPPER.prepare(LAYER, SM_90)
        cuda_target.wait()
        assert state.registered == registered
        assert not state.wanted
    finally:
        # the registration lives as long as the process; the table alone is left behind
        assert torch._C._dispatch_has_kernel_for_dispatch_key("moeflex::moe_layer", "CUDA")


@needs_compilers
def test_a_failed_build_is_raised_once_and_tried_again(state, monkeypatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(cuda_build, "read_template", lambda: "int x = no_such_name;")
        HOPPER.prepare(LAYER, SM_90)
    with pytest.raises(BuildError, match="no_such_name"):
        cuda_target.wait()
    cuda_target.wait()  # nothing that is wanted has failed
    HOPPER.prepare(LAYER, SM_90)
    cuda_target.wait()


def test_a_table_of_another_version_is_refused(state, monkeypatch) -> None:
    class Library:
        @staticmethod
        def moeflex_cuda_register(*_: object) -> int:
            return -1

    program = cuda_program.make_program(
        LAYER.plan, "bf16", "", combine_dtype="fp32", index_dtype="int64", num_tokens=4
    )
    resources = cuda_build.KernelResources(num_registers=1, stack_bytes=0, shared_bytes=1)
    binary = cuda_build.CudaBinary(
        name="",
        entry="",
        cubin=b"x",
        resources=resources,
        compiler="",
        log="",
        seconds=0.0,
        cached=True,
        disassembled=False,
    )
    monkeypatch.setattr(cuda_target, "_build_kernel", lambda _: binary)
    monkeypatch.setattr(cuda_target, "_ask_for_library", lambda: None)
    state.op_library = Library()
    cuda_target.prepare(program)
    with pytest.raises(BuildError, match="another version"):
        cuda_target.wait()
