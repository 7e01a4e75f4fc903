"""The compiled CPU layer against the plain-torch reference: every way to say a layer, every instruction set."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_compiler import cpu_kernels, reference
from moe_compiler.codegen.cpu import Isa
from moe_compiler.errors import BuildError, OptionError, ToolchainError
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
from moe_compiler.runtime import build, cpu_target, op
from tests.tolerances import assert_close_to_fp32

try:
    ISAS: tuple[Isa, ...] = cpu_target.runnable_isas()
except ToolchainError as error:
    pytest.skip(str(error), allow_module_level=True)

SILU = ActivationSpec(kind=ActivationKind.SILU)
GPT_OSS = ActivationSpec(
    kind=ActivationKind.SILU, alpha=1.702, gate_max=0.7, up_min=-0.7, up_max=0.7, up_shift=1.0
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A layer and its inputs, spelled for people."""

    dtype: str = "fp32"
    x_dtype: str = ""
    out_dtype: str = ""
    tokens: int = 13
    experts: int = 6
    top_k: int = 2
    hidden: int = 64
    intermediate: int = 48
    layout: GateLayout = GateLayout.CONCAT
    w13: Orientation = Orientation.OUT_IN
    w2: Orientation = Orientation.OUT_IN
    stacked: bool = True
    bias: bool = False
    activation: ActivationSpec = SILU
    position: WeightPosition = WeightPosition.OUTPUT
    batch_invariant: bool = False

    @property
    def plan(self) -> MoEPlan:
        return MoEPlan(
            router=RouterSpec(score=Score.EXTERNAL, top_k=self.top_k, num_experts=self.experts),
            experts=ExpertSpec(
                num_experts=self.experts,
                hidden=self.hidden,
                intermediate=self.intermediate,
                gate_layout=self.layout,
                w13_orientation=self.w13,
                w2_orientation=self.w2,
                stacked=self.stacked,
                has_b13=self.bias,
                has_b2=self.bias,
                activation=self.activation,
                weight_position=self.position,
            ),
            out_dtype=self.out_dtype,
            batch_invariant=self.batch_invariant,
        )

    def expert_tensors(self, seed: int = 0) -> list[Tensor]:
        spec, rng = self.plan.experts, torch.Generator().manual_seed(seed)
        tensors = []
        for role in spec.tensor_roles:
            shape = spec.tensor_shape(role)
            scale = 1.0 if role.startswith("b") else min(self.hidden, 64) ** -0.5
            for _ in range(1 if self.stacked else self.experts):
                value = torch.randn(shape, generator=rng) * scale
                tensors.append(value.to(reference.DTYPES[self.dtype]))
        return tensors

    def inputs(self, seed: int = 1) -> tuple[Tensor, list[Tensor]]:
        rng = torch.Generator().manual_seed(seed)
        dtype = reference.DTYPES[self.x_dtype or self.dtype]
        x = torch.randn(self.tokens, self.hidden, generator=rng).to(dtype)
        ids = torch.randint(0, self.experts, (self.tokens, self.top_k), generator=rng)
        weights = torch.rand(self.tokens, self.top_k, generator=rng)
        return x, [ids, weights]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """The compiled library serves the op in this module; the builds of all cases start at once."""
    for case in ALL_CASES:
        prepare(case)
    cpu_target.wait()
    op.load_library("CPU", cpu_target.load_op_library)


def prepare(case: Case) -> None:
    cpu_kernels.prepare(case.plan, case.x_dtype or case.dtype, [case.dtype])


def run(plan: MoEPlan, x: Tensor, router: Sequence[Tensor], experts: Sequence[Tensor]) -> Tensor:
    """Through the op; the plan's kernel is made the newest one first."""
    cpu_kernels.prepare(
        plan,
        reference.DTYPE_NAMES[x.dtype],
        [reference.DTYPE_NAMES[tensor.dtype] for tensor in experts],
    )
    cpu_target.wait()
    return torch.ops.moeflex.moe_layer(x, list(router), list(experts), plan.key)


def wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.double() if t.is_floating_point() else t for t in tensors]


def check(plan: MoEPlan, x: Tensor, router: Sequence[Tensor], experts: Sequence[Tensor]) -> Tensor:
    """Compare with the reference in fp64, by the rule: twice eager's own error and no more."""
    ours = run(plan, x, router, experts)
    eager = reference.moe_layer(plan, x, router, experts)
    exact = reference.moe_layer(
        dataclasses.replace(plan, out_dtype="fp64"), *wide([x]), wide(router), wide(experts)
    )
    assert_close_to_fp32(ours, eager, exact)
    return ours


LAYOUTS = [
    Case(layout=layout, w13=w13, w2=w2, hidden=33, intermediate=17, bias=True, stacked=stacked)
    for layout in GateLayout
    for w13 in Orientation
    for w2 in Orientation
    for stacked in (True, False)
]
ACTIVATIONS = [
    Case(activation=ActivationSpec(kind=kind), layout=layout)
    for kind in ActivationKind
    for layout in (GateLayout.CONCAT, GateLayout.NONE)
] + [Case(activation=GPT_OSS, layout=GateLayout.INTERLEAVED, w13=Orientation.IN_OUT, bias=True)]
POSITIONS = [
    Case(position=position, dtype=dtype, bias=True, hidden=33)
    for position in WeightPosition
    for dtype in ("bf16", "fp32")
]
DTYPES = [
    Case(dtype="fp16"),
    Case(dtype="fp64", hidden=33, intermediate=17, bias=True),
    Case(dtype="bf16", x_dtype="fp32"),
    Case(dtype="fp32", x_dtype="bf16"),
    Case(dtype="bf16", x_dtype="fp16"),
    Case(dtype="bf16", out_dtype="fp32"),
    Case(dtype="bf16", x_dtype="fp64"),
]
# Few kernels for the sweep over shapes: sizes are run-time arguments.
KERNELS = [
    Case(dtype="bf16"),
    Case(dtype="fp32"),
    Case(
        dtype="fp16", layout=GateLayout.NONE, activation=ActivationSpec(kind=ActivationKind.RELU2)
    ),
    Case(dtype="bf16", position=WeightPosition.INPUT),
]
ALL_CASES = [*LAYOUTS, *ACTIVATIONS, *POSITIONS, *DTYPES, *KERNELS]


def name_of(case: Case) -> str:
    words = []
    for field in dataclasses.fields(case):
        value = getattr(case, field.name)
        if value != field.default:
            text = value.name if isinstance(value, ActivationSpec) else str(value)
            words.append(f"{field.name}={text}")
    return ",".join(words) or "plain"


@pytest.mark.parametrize("case", ALL_CASES, ids=name_of)
def test_every_way_to_say_a_layer(case: Case) -> None:
    x, router = case.inputs()
    check(case.plan, x, router, case.expert_tensors())
    # Many rows an expert: packed panels, several groups of rows.
    larger = dataclasses.replace(case, tokens=200)
    x, router = larger.inputs(seed=2)
    check(case.plan, x, router, case.expert_tensors(seed=3))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", [*KERNELS, LAYOUTS[6], LAYOUTS[22], ACTIVATIONS[2]], ids=name_of)
def test_every_instruction_set_of_this_machine(
    isa: Isa, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEFLEX_CPU_ISA", isa.value)
    assert cpu_target.isa() == isa.value
    for tokens in (1, 40, 300):
        now = dataclasses.replace(case, tokens=tokens, bias=True, hidden=71, intermediate=45)
        x, router = now.inputs(seed=tokens)
        check(now.plan, x, router, now.expert_tensors())


@pytest.mark.parametrize("seed", range(60))
def test_random_shapes(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)

    def pick(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (1,), generator=rng))]

    experts = pick(1, 2, 7, 64)
    case = dataclasses.replace(
        pick(*KERNELS),
        tokens=pick(1, 2, 5, 17, 64, 333),
        experts=experts,
        top_k=pick(1, 2, 3, 8),
        hidden=pick(1, 6, 17, 32, 33, 64, 100, 257),
        intermediate=pick(1, 6, 17, 31, 32, 65, 130),
        w13=pick(*Orientation),
        w2=pick(*Orientation),
        stacked=pick(True, False),
        batch_invariant=pick(True, False),
    )
    x, (ids, weights) = case.inputs(seed=seed)
    kind = seed % 4
    if kind == 1:
        ids = torch.full_like(ids, experts - 1)  # all tokens to one expert
    elif kind == 2:
        ids = torch.randint(-1, experts + 2, ids.shape, generator=rng)  # some invalid
    check(case.plan, x, [ids, weights], case.expert_tensors(seed))


def test_contractions_longer_than_a_panel() -> None:
    """H and I beyond the 1024 steps that a panel holds."""
    for case in (
        Case(dtype="fp32", hidden=1025, intermediate=2050, experts=2, tokens=40),
        Case(dtype="bf16", hidden=2050, intermediate=4099, experts=2, tokens=40),
    ):
        x, router = case.inputs()
        check(case.plan, x, router, case.expert_tensors())
        invariant = dataclasses.replace(case, batch_invariant=True, tokens=3)
        x, router = invariant.inputs()
        check(invariant.plan, x, router, case.expert_tensors())


def test_more_rows_than_a_tile() -> None:
    case = Case(dtype="bf16", tokens=1100, experts=2, hidden=32, intermediate=16)
    x, router = case.inputs()
    check(case.plan, x, router, case.expert_tensors())


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_no_tokens(dtype: str) -> None:
    case = Case(dtype=dtype, tokens=0)
    x, router = case.inputs()
    y = run(case.plan, x, router, case.expert_tensors())
    assert y.shape == (0, case.hidden) and y.dtype == x.dtype


def test_invalid_ids_contribute_nothing() -> None:
    case = Case(tokens=5)
    x, (ids, weights) = case.inputs()
    nothing = torch.tensor([[-1, case.experts], [1 << 40, -(1 << 40)]]).repeat(3, 1)[:5]
    y = run(case.plan, x, [nothing, torch.full_like(weights, float("nan"))], case.expert_tensors())
    assert torch.equal(y, torch.zeros_like(y))
    ids[0, 1] = -1
    check(case.plan, x, [ids, weights], case.expert_tensors())


def test_an_expert_may_be_chosen_twice_by_a_token() -> None:
    case = Case(top_k=3)
    x, (_, weights) = case.inputs()
    ids = torch.tensor([[2, 2, 4]]).expand(case.tokens, 3)
    check(case.plan, x, [ids, weights], case.expert_tensors())


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str
)
def test_integer_dtypes_of_ids(dtype: torch.dtype) -> None:
    case = Case()
    x, (ids, weights) = case.inputs()
    check(case.plan, x, [ids.to(dtype), weights], case.expert_tensors())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_float_dtypes_of_weights(dtype: torch.dtype) -> None:
    case = Case(dtype="bf16")
    x, (ids, weights) = case.inputs()
    check(case.plan, x, [ids, weights.to(dtype)], case.expert_tensors())


def _every_other(t: Tensor) -> Tensor:
    """The same values, every stride doubled, NaN in between."""
    spread = torch.full([2 * n for n in t.shape], float("nan")).to(t.dtype)
    view = spread[tuple(slice(None, None, 2) for _ in t.shape)]
    return view.copy_(t)


def _padded_rows(t: Tensor) -> Tensor:
    """The same values, rows longer than they need be, NaN behind them."""
    spread = torch.full([*t.shape[:-1], t.shape[-1] + 3], float("nan")).to(t.dtype)
    return spread[..., : t.shape[-1]].copy_(t)


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() > 1 else t


@pytest.mark.parametrize("view", [_every_other, _padded_rows, _transposed])
@pytest.mark.parametrize("layout", [GateLayout.CONCAT, GateLayout.INTERLEAVED, GateLayout.SEPARATE])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_views_are_read_in_place(
    view: Callable[[Tensor], Tensor], layout: GateLayout, dtype: str
) -> None:
    """Weights, x, ids and combine weights of any strides; what lies between is never read."""
    case = Case(dtype=dtype, layout=layout, hidden=35, intermediate=21, bias=True)
    for tokens in (5, 120):
        now = dataclasses.replace(case, tokens=tokens)
        x, (ids, weights) = now.inputs()
        experts = now.expert_tensors()
        plain = run(case.plan, x, [ids, weights], experts)
        wide_ids = torch.stack([ids, torch.full_like(ids, 99)], -1).flatten(-2)[:, ::2]
        viewed = run(
            case.plan, view(x), [wide_ids, view(weights)], [view(tensor) for tensor in experts]
        )
        assert_close_to_fp32(viewed, plain, plain)
        check(case.plan, view(x), [wide_ids, view(weights)], [view(tensor) for tensor in experts])


def test_leading_axes_are_flattened() -> None:
    case = Case(tokens=12)
    x, (ids, weights) = case.inputs()
    experts = case.expert_tensors()
    flat = run(case.plan, x, [ids, weights], experts)
    boxed = run(case.plan, x.view(3, 4, -1), [ids.view(3, 4, -1), weights.view(3, 4, -1)], experts)
    assert torch.equal(boxed, flat)
    swapped = x.view(3, 4, -1).transpose(0, 1).contiguous().transpose(0, 1)  # does not collapse
    assert torch.equal(run(case.plan, swapped, [ids, weights], experts), flat)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_two_runs_and_any_number_of_threads_give_equal_bytes(dtype: str) -> None:
    case = Case(dtype=dtype, tokens=200)
    x, router = case.inputs()
    experts = case.expert_tensors()
    first = run(case.plan, x, router, experts)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 4, 4, 4):
            torch.set_num_threads(threads)
            assert torch.equal(run(case.plan, x, router, experts), first)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_batch_invariance(isa: Isa, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token alone, in a small batch and in a large one: equal bytes."""
    monkeypatch.setenv("MOEFLEX_CPU_ISA", isa.value)
    case = Case(dtype=dtype, tokens=130, experts=3, batch_invariant=True, hidden=70)
    x, (ids, weights) = case.inputs()
    experts = case.expert_tensors()
    whole = run(case.plan, x, [ids, weights], experts)
    for n in (1, 2, 7, 40):
        part = run(case.plan, x[:n], [ids[:n], weights[:n]], experts)
        assert torch.equal(part, whole[:n])


def test_nan_and_inf_stay_where_they_are() -> None:
    case = Case(tokens=6, top_k=1)
    x, (_, weights) = case.inputs()
    ids = torch.arange(6).view(6, 1) % case.experts
    x[2, 5] = float("nan")
    y = run(case.plan, x, [ids, weights], case.expert_tensors())
    assert y[2].isnan().all() and y[[0, 1, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_activations_far_out(dtype: str) -> None:
    """Large gates neither overflow to NaN nor lose the sign of zero's side."""
    case = Case(dtype=dtype, tokens=40, hidden=16, intermediate=16)
    x, router = case.inputs()
    check(case.plan, x * 30, router, case.expert_tensors())


def test_a_refit_is_seen_by_the_next_call() -> None:
    case = Case(dtype="bf16")
    x, router = case.inputs()
    experts = case.expert_tensors()
    run(case.plan, x, router, experts)
    for tensor in experts:
        tensor.mul_(0.5)
    check(case.plan, x, router, experts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, r, e: (x[:, :-1], r, e), "x must be"),
        (lambda x, r, e: (x, [r[0][:-1], r[1]], e), "tokens"),
        (lambda x, r, e: (x, r[:1], e), "ids, weights"),
        (lambda x, r, e: (x, [r[0].float(), r[1]], e), "integer"),
        (lambda x, r, e: (x, r, e[:1]), "2 expert tensors"),
        (lambda x, r, e: (x, r, [e[0][:, :-1], e[1]]), "role 0 must be"),
        (lambda x, r, e: (x.half(), r, e), "other dtypes"),
    ],
)
def test_bad_calls_say_what_is_wrong(change: Callable[..., Any], message: str) -> None:
    case = Case()
    x, router = case.inputs()
    experts = case.expert_tensors()
    run(case.plan, x, router, experts)
    x, router, experts = change(x, router, experts)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.moeflex.moe_layer(x, router, experts, case.plan.key)


def test_a_plan_that_was_never_prepared() -> None:
    case = Case(hidden=57)
    x, router = case.inputs()
    with pytest.raises(RuntimeError, match="no CPU kernel was registered"):
        torch.ops.moeflex.moe_layer(x, router, case.expert_tensors(), case.plan.key)


def test_prepare_is_idempotent_and_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(activation=ActivationSpec(kind=ActivationKind.SILU, alpha=1.25))
    monkeypatch.setenv("MOEFLEX_CACHE_DIR", str(tmp_path))
    cpu_target.wait()
    for _ in range(3):
        prepare(case)
    reports = cpu_target.wait()
    assert [report.cached for report in reports] == [False]
    assert reports[0].name.startswith("cpu-moe-fp32") and 0 < reports[0].seconds < 120
    assert cpu_target.wait() == []


def test_a_failed_build_is_raised_and_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(activation=ActivationSpec(kind=ActivationKind.SILU, alpha=1.375))
    monkeypatch.setenv("MOEFLEX_CACHE_DIR", str(tmp_path))

    def fail(unit: build.Unit) -> build.BuildReport:
        raise BuildError(f"{unit.name} was not built")

    with monkeypatch.context() as patch:
        patch.setattr(cpu_target, "build", fail)
        prepare(case)
        with pytest.raises(BuildError, match="cpu-moe"):
            cpu_target.wait()
    x, router = case.inputs()
    check(case.plan, x, router, case.expert_tensors())


def test_an_instruction_set_that_does_not_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_target.toolchain, "cpu_features", lambda: frozenset({"sse2"}))
    monkeypatch.setenv("MOEFLEX_CPU_ISA", "avx512")
    with pytest.raises(OptionError, match="it runs scalar"):
        cpu_target.isa()


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in (cpu_target.unavailable() or "")
    assert "not available" in cpu_target.description()
    with pytest.raises(ToolchainError):
        prepare(Case(hidden=55))


def test_description_names_instruction_set_and_compiler() -> None:
    assert cpu_target.isa() in cpu_target.description()


FORKED = """
import os, sys, torch
from tests.runtime.test_cpu_target import Case, prepare, cpu_target, op, run
torch.set_num_threads(2)
case = Case(tokens=50)
prepare(case); op.load_library("CPU", cpu_target.load_op_library)
x, router = case.inputs(); experts = case.expert_tensors()
first = torch.ops.moeflex.moe_layer(x, router, experts, case.plan.key)
pid = os.fork()
if pid == 0:
    same = torch.equal(torch.ops.moeflex.moe_layer(x, router, experts, case.plan.key), first)
    os._exit(0 if same else 3)
_, status = os.waitpid(pid, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_computes() -> None:
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", FORKED],
        cwd=root,
        env=env,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_threads_may_call_at_once() -> None:
    """Scratch memory is not shared between calls that run at the same time."""
    from concurrent.futures import ThreadPoolExecutor

    case = Case(dtype="bf16", tokens=60)
    experts = case.expert_tensors()
    inputs = [case.inputs(seed) for seed in range(8)]
    expected = [run(case.plan, x, router, experts) for x, router in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(
                lambda i: torch.ops.moeflex.moe_layer(
                    inputs[i % 8][0], inputs[i % 8][1], experts, case.plan.key
                ),
                range(80),
            )
        )
    assert all(torch.equal(y, expected[i % 8]) for i, y in enumerate(found))


def test_memory_does_not_grow() -> None:
    """A thousand calls leave nothing behind: handles, lists and strings are given back."""
    case = Case(stacked=False, experts=16, hidden=16, intermediate=16)
    x, router = case.inputs()
    experts = case.expert_tensors()
    run(case.plan, x, router, experts)

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc here")
    for _ in range(200):
        torch.ops.moeflex.moe_layer(x, router, experts, case.plan.key)
    before = resident_bytes()
    for _ in range(5000):
        torch.ops.moeflex.moe_layer(x, router, experts, case.plan.key)
    assert resident_bytes() - before < 2_000_000
