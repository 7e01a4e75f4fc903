"""The op `moeflex::moe_layer`: forward, gradient, registration."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from moe_compiler import reference
from moe_compiler.errors import PlanError, UnsupportedError
from moe_compiler.ir import (
    ActivationKind,
    ActivationSpec,
    ExpertSpec,
    GateLayout,
    GroupScore,
    MoEPlan,
    Normalize,
    Orientation,
    RouterSpec,
    Score,
    WeightPosition,
)
from moe_compiler.runtime import op, op_backward

T, H, E, K = 5, 6, 4, 2
INTER = 4
SILU = ActivationSpec(kind=ActivationKind.SILU)
EXTERNAL = RouterSpec(score=Score.EXTERNAL, top_k=K, num_experts=E)
CONCAT = ExpertSpec(
    num_experts=E, hidden=H, intermediate=INTER, gate_layout=GateLayout.CONCAT, activation=SILU
)
GPT_OSS = ActivationSpec(
    kind=ActivationKind.SILU, alpha=1.702, gate_max=0.7, up_min=-0.7, up_max=0.7, up_shift=1.0
)
ROUTERS = {
    "softmax": RouterSpec(score=Score.SOFTMAX, top_k=K, num_experts=E),
    "softmax-sum": RouterSpec(
        score=Score.SOFTMAX, top_k=K, num_experts=E, normalize=Normalize.SUM, eps=1e-3, scale=2.5
    ),
    "softmax-clamp": RouterSpec(
        score=Score.SOFTMAX,
        top_k=K,
        num_experts=E,
        normalize=Normalize.SUM,
        eps=0.6,
        eps_clamps=True,
    ),
    "topk-softmax": RouterSpec(
        score=Score.IDENTITY, top_k=K, num_experts=E, normalize=Normalize.SOFTMAX
    ),
    "topk-sigmoid": RouterSpec(
        score=Score.IDENTITY, top_k=1, num_experts=E, normalize=Normalize.SIGMOID
    ),
    "topk-sigmoid-sum": RouterSpec(
        score=Score.IDENTITY, top_k=K, num_experts=E, normalize=Normalize.SIGMOID_SUM, eps=1e-3
    ),
    "deepseek": RouterSpec(
        score=Score.SIGMOID,
        top_k=K,
        num_experts=E,
        has_bias=True,
        num_groups=2,
        top_k_groups=1,
        group_score=GroupScore.TOP2_SUM,
        normalize=Normalize.SUM,
        eps=1e-20,
    ),
    "sqrtsoftplus": RouterSpec(score=Score.SQRTSOFTPLUS, top_k=K, num_experts=E),
    "sparsemixer": RouterSpec(score=Score.SPARSEMIXER, top_k=K, num_experts=E, jitter_eps=0.1),
}


@pytest.fixture(autouse=True)
def _plain_torch():
    """Another test may have loaded the compiled CPU library into this process."""
    with op.plain_torch():
        yield


def spec(**changes):
    return dataclasses.replace(CONCAT, **changes)


def plan_of(experts=CONCAT, router=EXTERNAL, **changes):
    return MoEPlan(router=router, experts=experts, **changes)


def make(plan, num_tokens=T, dtype=torch.float64, grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    experts = plan.experts
    repeat = 1 if experts.stacked else experts.num_experts
    tensors = [
        rand(*experts.tensor_shape(role)) * 0.5
        for role in experts.tensor_roles
        for _ in range(repeat)
    ]
    x = rand(num_tokens, experts.hidden)
    if plan.router.score is Score.EXTERNAL:
        logits = rand(num_tokens, experts.num_experts)
        ids = logits.topk(plan.router.top_k).indices
        router = [ids, rand(num_tokens, plan.router.top_k).abs()]
    else:
        router = [rand(num_tokens, experts.num_experts)]
        if plan.router.has_bias:
            router.append(rand(experts.num_experts) * 0.1)
    if grad:
        for t in (x, *router, *tensors):
            t.requires_grad_(t.is_floating_point())
    return x, router, tensors


def call(plan, x, router, experts):
    return torch.ops.moeflex.moe_layer(x, router, experts, plan.key)


ORIENTATIONS = [
    (Orientation.OUT_IN, Orientation.OUT_IN),
    (Orientation.IN_OUT, Orientation.OUT_IN),
    (Orientation.OUT_IN, Orientation.IN_OUT),
]


def every_layout():
    storage = [(True, False), (True, True), (False, True)]
    for layout, (o13, o2), (stacked, bias) in itertools.product(GateLayout, ORIENTATIONS, storage):
        words = [layout, o13, o2, "stacked" if stacked else "list", "bias" if bias else "plain"]
        yield (
            "-".join(words),
            spec(
                gate_layout=layout,
                w13_orientation=o13,
                w2_orientation=o2,
                stacked=stacked,
                has_b13=bias,
                has_b2=bias,
            ),
        )


SPECS = dict(every_layout())


def gradcheck(plan, fast=True):
    x, router, experts = make(plan, num_tokens=3, grad=True)
    flat = [x, *router, *experts]

    def run(*tensors):
        return call(
            plan, tensors[0], list(tensors[1 : 1 + len(router)]), list(tensors[1 + len(router) :])
        )

    return torch.autograd.gradcheck(run, flat, atol=1e-6, fast_mode=fast)


@pytest.mark.parametrize("name", SPECS)
def test_forward_agrees_with_reference(name):
    for position in WeightPosition:
        plan = plan_of(dataclasses.replace(SPECS[name], weight_position=position))
        args = make(plan, num_tokens=11)
        torch.testing.assert_close(call(plan, *args), reference.moe_layer(plan, *args))


@pytest.mark.parametrize("name", SPECS)
def test_gradient_of_every_layout(name):
    assert gradcheck(plan_of(SPECS[name]))


@pytest.mark.parametrize("position", WeightPosition)
@pytest.mark.parametrize("layout", [GateLayout.NONE, GateLayout.SEPARATE, GateLayout.INTERLEAVED])
def test_gradient_of_every_weight_position(position, layout):
    assert gradcheck(
        plan_of(spec(weight_position=position, gate_layout=layout, has_b2=True, has_b13=True))
    )


@pytest.mark.parametrize(
    "activation",
    [ActivationSpec(kind=kind) for kind in ActivationKind] + [GPT_OSS],
    ids=lambda a: a.name,
)
def test_gradient_of_every_activation(activation):
    for layout in (GateLayout.NONE, GateLayout.CONCAT):
        assert gradcheck(plan_of(spec(activation=activation, gate_layout=layout)))


@pytest.mark.parametrize("name", ROUTERS)
def test_gradient_through_every_router(name):
    assert gradcheck(plan_of(router=ROUTERS[name]), fast=False)


@pytest.mark.parametrize("name", ROUTERS)
def test_router_gradient_agrees_with_autograd(name):
    router = ROUTERS[name]
    logits = torch.randn(64, E, generator=torch.Generator().manual_seed(3)).requires_grad_()
    bias = torch.linspace(-0.2, 0.2, E) if router.has_bias else None
    ids, weights = reference.route(router, logits, bias)
    grad = torch.randn(weights.shape, generator=torch.Generator().manual_seed(4))
    (expected,) = torch.autograd.grad(weights, logits, grad)
    torch.testing.assert_close(
        op_backward.route_backward(router, logits.detach(), ids, grad), expected
    )


def test_selection_bias_and_ids_get_no_gradient():
    plan = plan_of(router=ROUTERS["deepseek"])
    x, router, experts = make(plan, grad=True)
    call(plan, x, router, experts).square().sum().backward()
    assert router[1].grad is None
    assert router[0].grad.abs().sum() > 0


@pytest.mark.parametrize("router", [EXTERNAL, ROUTERS["deepseek"]], ids=["external", "absorbed"])
def test_opcheck(router):
    plan = plan_of(router=router)
    for num_tokens in (T, 1):
        args = make(plan, num_tokens=num_tokens, grad=True)
        torch.library.opcheck(torch.ops.moeflex.moe_layer.default, (*args, plan.key))
        x, router_tensors, experts = make(plan, num_tokens=num_tokens)
        mask = [True, *[t.is_floating_point() for t in router_tensors], *[True] * len(experts)]
        grad = torch.randn(num_tokens, H, dtype=torch.float64)
        torch.library.opcheck(
            torch.ops.moeflex.moe_layer_backward.default,
            (grad, x, router_tensors, experts, plan.key, mask),
        )


def test_only_wanted_gradients_are_computed():
    plan = plan_of()
    x, router, experts = make(plan)
    grad = torch.ones(T, H, dtype=torch.float64)
    everything = torch.ops.moeflex.moe_layer_backward(
        grad, x, router, experts, plan.key, [True, False, True, True, True]
    )
    assert [tuple(g.shape) for g in everything] == [
        (T, H),
        (T, K),
        (E, 2 * INTER, H),
        (E, H, INTER),
    ]
    for i, index in enumerate((0, 2, 3, 4)):
        mask = [index == j for j in range(5)]
        (one,) = torch.ops.moeflex.moe_layer_backward(grad, x, router, experts, plan.key, mask)
        torch.testing.assert_close(one, everything[i])


def test_frozen_tensors_keep_no_gradient():
    plan = plan_of()
    x, router, experts = make(plan)
    experts[1].requires_grad_()
    call(plan, x, router, experts).sum().backward()
    assert experts[1].grad is not None
    assert all(t.grad is None for t in (x, router[1], experts[0]))


def test_layout_of_a_transposed_parameter_is_kept_by_its_gradient():
    plan = plan_of(spec(w2_orientation=Orientation.IN_OUT))
    x, router, experts = make(plan)
    experts[1] = experts[1].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    assert not experts[1].is_contiguous()
    call(plan, x, router, experts).square().sum().backward()
    assert experts[1].grad.stride() == experts[1].stride()


def test_no_tokens():
    for router in (EXTERNAL, ROUTERS["softmax-sum"]):
        plan = plan_of(router=router)
        x, router_tensors, experts = make(plan, num_tokens=0, grad=True)
        y = call(plan, x, router_tensors, experts)
        assert y.shape == (0, H)
        y.sum().backward()
        assert all(torch.count_nonzero(t.grad) == 0 for t in experts)
        assert x.grad.shape == (0, H)


def test_expanded_gradient():
    plan = plan_of()
    x, router, experts = make(plan, grad=True)
    call(plan, x, router, experts).sum().backward()
    expected = [t.grad.clone() for t in (x, *experts)]
    for t in (x, router[1], *experts):
        t.grad = None
    (call(plan, x, router, experts) * torch.ones(T, H, dtype=torch.float64)).sum().backward()
    for got, want in zip((t.grad for t in (x, *experts)), expected, strict=True):
        torch.testing.assert_close(got, want)


def test_invalid_ids_contribute_nothing():
    plan = plan_of()
    x, router, experts = make(plan, grad=True)
    ids = router[0].clone()
    ids[0, 0], ids[1, 1], ids[2] = -1, E, E + 7
    y = call(plan, x, [ids, router[1]], experts)
    torch.testing.assert_close(y, reference.moe_layer(plan, x, [ids, router[1]], experts))
    assert torch.count_nonzero(y[2]) == 0
    y.square().sum().backward()
    assert torch.count_nonzero(x.grad[2]) == 0
    assert torch.count_nonzero(router[1].grad[[0, 1, 2, 2], [0, 1, 0, 1]]) == 0
    assert torch.count_nonzero(router[1].grad[3:]) == router[1].grad[3:].numel()


def test_all_tokens_at_one_expert_and_duplicate_ids():
    plan = plan_of()
    x, router, experts = make(plan)
    for ids in (torch.zeros_like(router[0]), torch.full_like(router[0], E - 1).int()):
        args = x, [ids, router[1]], experts
        torch.testing.assert_close(call(plan, *args), reference.moe_layer(plan, *args))


def test_leading_axes_are_flattened():
    plan = plan_of()
    x, router, experts = make(plan, num_tokens=6)
    shaped = call(plan, x.view(2, 3, H), [t.view(2, 3, K) for t in router], experts)
    assert shaped.shape == (6, H)
    assert torch.equal(shaped, call(plan, x, router, experts))


@pytest.mark.parametrize("out", ["", "fp32", "bf16", "fp64"])
def test_out_dtype(out):
    plan = plan_of(out_dtype=out)
    y = call(plan, *make(plan, dtype=torch.bfloat16))
    assert y.dtype is (reference.DTYPES[out] if out else torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_near_as_the_reference(dtype):
    plan = plan_of(spec(hidden=64, intermediate=48))
    x, router, experts = make(plan, num_tokens=40, dtype=dtype)
    exact = reference.moe_layer(
        plan, x.double(), [router[0], router[1].double()], [t.double() for t in experts]
    )
    error = (call(plan, x, router, experts).double() - exact).norm()
    same_dtype = (reference.moe_layer(plan, x, router, experts).double() - exact).norm()
    assert error <= 1.05 * same_dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_invariant_rows_are_equal_bit_for_bit(dtype):
    plan = plan_of(spec(hidden=96, intermediate=72), batch_invariant=True)
    x, router, experts = make(plan, num_tokens=100, dtype=dtype)
    whole = call(plan, x, router, experts)
    for part in (slice(0, 1), slice(37, 38), slice(10, 45)):
        alone = call(plan, x[part], [t[part] for t in router], experts)
        assert torch.equal(alone, whole[part])


def test_two_runs_are_equal_bit_for_bit():
    plan = plan_of(spec(hidden=64, intermediate=48))
    args = make(plan, num_tokens=50, dtype=torch.float32)
    assert torch.equal(call(plan, *args), call(plan, *args))


def test_wrong_tensors_are_named():
    plan = plan_of()
    x, router, experts = make(plan)
    with pytest.raises(PlanError, match="H = 6"):
        call(plan, x[:, :-1], router, experts)
    with pytest.raises(PlanError, match="takes 2 tensors"):
        call(plan, x, router[:1], experts)
    with pytest.raises(PlanError, match="takes 2 expert tensors"):
        call(plan, x, router, experts[:1])
    with pytest.raises(PlanError, match=r"'w2' must have shape \(4, 6, 4\)"):
        call(plan, x, router, [experts[0], experts[1].transpose(1, 2)])
    with pytest.raises(PlanError, match="not a moeflex plan"):
        torch.ops.moeflex.moe_layer(x, router, experts, "nonsense")


def test_second_derivative_is_refused_clearly():
    plan = plan_of()
    x, router, experts = make(plan, grad=True)
    (first,) = torch.autograd.grad(call(plan, x, router, experts).sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        first.sum().backward()


def test_token_count_stays_symbolic():
    plan = plan_of()
    key = plan.key
    counts = []

    def record(gm, example_inputs):
        counts.append(
            [
                str(n.meta["example_value"].shape[0])
                for n in gm.graph.nodes
                if n.op == "call_function"
            ]
        )
        return gm.forward

    @torch.compile(backend=record, dynamic=True, fullgraph=True)
    def run(x, ids, weights, experts):
        return torch.ops.moeflex.moe_layer(x, [ids, weights], experts, key)

    for num_tokens in (5, 7, 9):
        x, (ids, weights), experts = make(plan, num_tokens=num_tokens)
        assert run(x, ids, weights, experts).shape == (num_tokens, H)
    assert len(counts) == 1
    assert not counts[0][0].isdigit()


def test_meta_tensors():
    plan = plan_of(out_dtype="bf16")
    x, router, experts = make(plan)
    y = call(plan, x.to("meta"), [t.to("meta") for t in router], [t.to("meta") for t in experts])
    assert y.shape == (T, H)
    assert y.dtype is torch.bfloat16
    assert y.is_meta


def test_no_tensor_of_tokens_times_routes_times_experts():
    experts = spec(num_experts=64, hidden=8, intermediate=8)
    router = dataclasses.replace(EXTERNAL, num_experts=64, top_k=2)
    plan = plan_of(experts, router)
    x, router_tensors, tensors = make(plan, num_tokens=512, dtype=torch.float32, grad=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    with Watch():
        y = op._plain_forward(x, router_tensors, tensors, plan.key)
        op._plain_backward(
            torch.ones_like(y), x, router_tensors, tensors, plan.key, [True, False] + [True] * 3
        )
    # the largest tensors are the routes' rows [T * K, H] and the experts themselves [E, 2I, H]
    assert largest <= max(512 * 2 * 8, 64 * 16 * 8)


def test_a_compiled_library_takes_over_and_gives_back_when_it_fails(monkeypatch):
    if not op.served_in_plain_torch("cpu"):
        pytest.skip("the compiled CPU library is loaded in this process")
    plan = plan_of()
    args = make(plan)
    expected = call(plan, *args)

    def broken():
        assert not torch._C._dispatch_has_kernel_for_dispatch_key("moeflex::moe_layer", "CPU")
        raise OSError("no such library")

    with pytest.raises(OSError, match="no such library"):
        op.load_library("CPU", broken)
    assert torch.equal(call(plan, *args), expected)

    library = torch.library.Library("moeflex", "IMPL", "CPU")
    op.load_library(
        "CPU",
        lambda: library.impl("moe_layer", lambda x, router, experts, plan: x.new_full((T, H), 7.0)),
    )
    try:
        assert not op.served_in_plain_torch("cpu")
        assert torch.equal(call(plan, *args), torch.full((T, H), 7.0, dtype=torch.float64))
        op.load_library("CPU", broken)  # loaded already: not called again
    finally:
        library._destroy()
        op.use_plain("CPU")
    assert torch.equal(call(plan, *args), expected)
