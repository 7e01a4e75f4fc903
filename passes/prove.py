"""Prove a candidate by running it: the sub-graph as it stands against a spec's reference, in fp64.

A spec is accepted only when both agree on random inputs under several routings. Equal slices (the
same operators on the same shapes, in another layer) are proven once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Mapping

import torch
from torch import Tensor, fx

from moe_compiler.ir import (
    ExpertSpec,
    MoERegion,
    Proof,
    RouterSpec,
    Score,
)
from moe_compiler.passes import describe
from moe_compiler.passes.candidates import Candidate
from moe_compiler.passes.crowd import CapacityError, check_crowd
from moe_compiler.passes.dataflow import are_distinct, id_bound
from moe_compiler.passes.expert_run import (
    TOLERANCE,
    ExpertRun,
    constants_of,
    random_case,
    random_tensors,
    reference,
    relative_error,
    run_bytes,
    run_of,
    scale_beyond_limits,
    too_large_to_prove,
)
from moe_compiler.passes.explain import explain_mismatch
from moe_compiler.passes.match_experts import identify_operands
from moe_compiler.passes.match_router import RouterMatch
from moe_compiler.passes.nodes import num_rows, shape_hint, tensor
from moe_compiler.passes.operands import NoSpecError
from moe_compiler.passes.outcome import Outcome, ProofMemory, ProofStore
from moe_compiler.passes.prove_router import (
    check_support,
    prove_router,
    router_bias,
    router_signature,
)
from moe_compiler.passes.shrink import candidate_sizes
from moe_compiler.passes.subgraph import SliceError, free_symbols
from moe_compiler.reference import DTYPE_NAMES

logger = logging.getLogger(__name__)

NATIVE_TOLERANCE: Mapping[torch.dtype, float] = {
    torch.bfloat16: 6e-2,
    torch.float16: 2e-2,
    torch.float32: 1e-3,
    torch.float64: 1e-9,
}
"""How far rounding may take the sub-graph, in its own dtypes, from fp64."""


@dataclasses.dataclass(frozen=True)
class Proven:
    """A proven candidate.

    Attributes:
        region: the block, as data.
        experts: the expert weights in the order of `ExpertSpec.tensor_roles`.
        router_bias: the selection bias [E], or None.
    """

    region: MoERegion
    experts: tuple[fx.Node, ...]
    router_bias: fx.Node | None


_memory = ProofMemory()


def remember_in(store: ProofStore | None) -> None:
    """Keep proofs in this store, beyond the process."""
    _memory.store = store


def clear_proofs() -> None:
    """Forget what this process has proven; a store keeps what it has."""
    _memory.clear()


def prove_region(candidate: Candidate, *, name: str, module_class: str) -> Proven:
    """Prove a candidate.

    Raises:
        NoSpecError: the block computes something that no spec says; the text is the reason.
        SliceError: the block cannot be run by itself; the text is the reason.
    """
    key = _key(candidate)
    outcome = _memory.get(key)
    if outcome is None:
        outcome = _prove(candidate)
        _memory.put(key, outcome)
    if outcome.spec is None:
        raise NoSpecError(outcome.reason)
    return _at_full_size(candidate, outcome, name, module_class)


def _key(candidate: Candidate) -> str:
    roles = [candidate.part.weights.index(n) for n in candidate.operands.nodes]
    router = router_signature(candidate)
    return f"{candidate.part.signature()} {roles} {candidate.dense} {router}"


def _prove(candidate: Candidate) -> Outcome:
    start = time.perf_counter()
    spec, swapped, run, error = None, False, None, 0.0
    reason = capacity = ""
    for sizes in candidate_sizes(
        candidate.part, x=candidate.x, ids=candidate.ids, operands=candidate.operands
    ):
        make_run = functools.partial(run_of, candidate, sizes)
        unproven = make_run(candidate.operands)
        too_large = too_large_to_prove(unproven)
        if too_large:
            reason = reason or too_large
            continue
        try:
            spec, operands, run = identify_operands(
                make_run, candidate.operands, constants_of(candidate.part)
            )
            swapped = operands is not candidate.operands
            error = _check_experts(run, spec)
            run.num_runs += check_crowd(candidate, run, spec)
            break
        except (NoSpecError, SliceError) as failure:
            # whether it holds is decided at the sizes as they are; a capacity shows at small ones
            reason = capacity = _capacity(failure) or capacity
            reason, spec = reason or _explained(unproven, failure), None
    router: RouterMatch | None = None
    note = ""
    if spec is not None:
        assert run is not None
        try:
            router, note = prove_router(candidate, spec.num_experts)
            if candidate.dense:
                check_support(candidate)
            if router is None:
                _check_invalid_ids(run, spec, candidate, note)
                _check_repeated_ids(run, spec, candidate)
        except NoSpecError as failure:
            spec, reason = None, str(failure)
    proof = Proof(
        max_error=max(error, router.max_error if router else 0.0),
        num_runs=(run.num_runs if run else 0) + (router.num_runs if router else 0),
        precision="fp64",
        seconds=time.perf_counter() - start,
        peak_bytes=run_bytes(run) if run else 0,
    )
    return Outcome(
        spec=spec,
        swapped=swapped,
        router=router.spec if router else None,
        router_note=note,
        proof=proof,
        reason=reason,
    )


def _capacity(failure: Exception) -> str:
    return str(failure) if isinstance(failure, CapacityError) else ""


def _explained(run: ExpertRun, failure: Exception) -> str:
    """The property of an MoE block that is missing, or what the matcher said."""
    if isinstance(failure, NoSpecError):
        with contextlib.suppress(SliceError):
            return explain_mismatch(run) or str(failure)
    return str(failure)


def _check_experts(run: ExpertRun, spec: ExpertSpec) -> float:
    """Compare under several routings; the largest relative error.

    Raises:
        NoSpecError: they differ.
    """
    generator = torch.Generator().manual_seed(1)
    worst = 0.0
    beyond = scale_beyond_limits(constants_of(run.runner.part))
    for label, scale in (
        ("random routing", 1.0),
        ("large values", 30.0),
        ("values beyond every limit", beyond),
        ("one expert set", 1.0),
    ):
        if not scale:
            continue
        tensors = random_tensors(run, generator)
        x, ids, weights = random_case(run, generator, scale=scale)
        if label == "one expert set":
            ids = ids[:1].expand_as(ids).contiguous()
        case = (x, ids, weights)
        error = relative_error(reference(spec, case, tensors), run(*case, tensors))
        if not error < TOLERANCE:
            raise NoSpecError(
                f"its experts differ from {spec.activation.name} under {label} (relative error "
                f"{error:.1e})"
            )
        worst = max(worst, error)
    _check_native(run, spec, generator)
    return worst


def _check_native(run: ExpertRun, spec: ExpertSpec, generator: torch.Generator) -> None:
    """As the graph is written, in its own dtypes: the same function up to rounding."""
    tensors = random_tensors(run, generator)
    case = random_case(run, generator, scale=1.0)
    native = run(*case, tensors, precise=False)
    expected = reference(spec, case, tensors)
    dtypes = [tensor(n) for n in (run.x, *run.operands.nodes)] + [native]
    allowed = max(NATIVE_TOLERANCE.get(t.dtype, 1e-3) for t in dtypes if t is not None)
    allowed = max(
        allowed, *(NATIVE_TOLERANCE[d] for d in describe.cast_dtypes(run.runner.part)), allowed
    )
    error = relative_error(expected, native.double())
    if not error < allowed:
        raise NoSpecError(
            f"in its own dtypes it is {error:.1e} away from fp64, more than rounding explains"
        )


def _check_invalid_ids(
    run: ExpertRun, spec: ExpertSpec, candidate: Candidate, router_reason: str
) -> None:
    """Ids of an unproven router may lie outside of [0, E): the block must ignore or reject them.

    Raises:
        NoSpecError: it uses them.
    """
    generator = torch.Generator().manual_seed(2)
    num_experts = run.operands.num_experts
    bound = id_bound(candidate.flow, candidate.ids)
    possible = (
        (-1, num_experts)
        if bound is None
        else range(num_experts, bound)[:: max(1, bound - num_experts - 1)]
    )
    for invalid in possible:
        tensors = random_tensors(run, generator)
        x, ids, weights = random_case(run, generator, scale=1.0)
        ids[:, -1] = invalid
        if run.dense and not 0 <= invalid < run.sizes.shape(candidate.weights)[-1]:
            continue
        try:
            seen = run(x, ids, weights, tensors)
        except SliceError:
            continue
        error = relative_error(reference(spec, (x, ids, weights), tensors), seen)
        if not error < TOLERANCE:
            raise NoSpecError(
                f"a route to id {invalid} means more than 'not routed' in it, it has {num_experts} "
                f"experts, and its router may choose that id: {router_reason}"
            )


def _check_repeated_ids(run: ExpertRun, spec: ExpertSpec, candidate: Candidate) -> None:
    """Ids of an unproven router may name an expert twice: both routes have to count.

    Raises:
        NoSpecError: they do not.
    """
    if run.dense or run.top_k < 2 or are_distinct(candidate.flow, candidate.ids):
        return
    generator = torch.Generator().manual_seed(5)
    tensors = random_tensors(run, generator)
    x, ids, weights = random_case(run, generator, scale=1.0)
    ids[:, -1] = ids[:, 0]
    case = (x, ids, weights)
    if not relative_error(reference(spec, case, tensors), run(*case, tensors)) < TOLERANCE:
        raise NoSpecError(
            "its router may choose an expert twice for one token, and then its two results are not "
            "added"
        )


def _at_full_size(candidate: Candidate, outcome: Outcome, name: str, module_class: str) -> Proven:
    spec = outcome.spec
    assert spec is not None
    operands = candidate.operands
    if outcome.swapped:
        operands = operands.exchanged()
    hidden = shape_hint(candidate.x)[-1]
    down = tensor(operands.down[0])
    assert hidden is not None
    assert down is not None
    axis = -1 if spec.w2_orientation.value == "out_in" else -2
    spec = dataclasses.replace(spec, hidden=hidden, intermediate=int(down.shape[axis]))
    router = outcome.router or RouterSpec(
        score=Score.EXTERNAL, top_k=candidate.top_k, num_experts=spec.num_experts
    )
    dynamic = bool(free_symbols([candidate.x]))
    output, x = tensor(candidate.output), tensor(candidate.x)
    assert output is not None
    assert x is not None
    shared = describe.shared_expert(candidate.flow, candidate.x, candidate.output)
    region = MoERegion(
        name=name,
        module_class=module_class,
        router=router,
        router_note=outcome.router_note,
        experts=spec,
        num_tokens=0 if dynamic else (num_rows(candidate.x) or 0),
        dense_weights=candidate.dense,
        x_dtype=_dtype_name(x),
        weight_dtype=_dtype_name(down),
        out_dtype=_dtype_name(output),
        gemm_dtype=_narrow_gemms(candidate),
        escaping=describe.escaping(candidate),
        form=describe.expert_form(candidate.part),
        shared_expert=shared.kind,
        shared_intermediate=shared.intermediate,
        proof=outcome.proof,
    )
    bias = router_bias(candidate) if router.has_bias else None
    return Proven(region=region, experts=operands.nodes, router_bias=bias)


def _narrow_gemms(candidate: Candidate) -> str:
    """dtype of the GEMMs where the graph casts x or a weight down to it, else ""."""
    dtype = candidate.operands.gemm_dtype
    wide = [tensor(n) for n in (candidate.x, *candidate.operands.nodes)]
    if dtype is None or all(t is None or t.dtype.itemsize <= dtype.itemsize for t in wide):
        return ""
    return DTYPE_NAMES[dtype]


def _dtype_name(found: Tensor) -> str:
    return DTYPE_NAMES.get(found.dtype, str(found.dtype).removeprefix("torch."))
