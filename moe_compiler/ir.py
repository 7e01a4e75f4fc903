"""The data that the stages exchange: frozen, hashable, printable, picklable.

Letters, the same everywhere: T tokens, H hidden, I expert intermediate, E experts, K experts per
token (top-k).

```
RouterSpec   logits [T, E] -> ids [T, K], weights [T, K]
ExpertSpec   x [T, H], ids, weights, expert tensors -> y [T, H]
MoERegion    one proven block of a graph: router + experts + where it was found
MoEPlan      what the op needs at run time; its `key` is the string that travels in the graph
NoMatch      why a candidate was left alone
```

No object here holds a tensor or an `fx.Node`.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any

from moe_compiler.errors import PlanError

PLAN_VERSION = 1


class Name(str, enum.Enum):
    """A string from a closed set (`enum.StrEnum`, which Python 3.10 lacks)."""

    def __str__(self) -> str:
        return str.__str__(self)

    def __format__(self, format_spec: str) -> str:
        return str.__format__(self, format_spec)


class Score(Name):
    """How router logits become scores."""

    EXTERNAL = "external"  # ids and weights come from the graph
    IDENTITY = "identity"  # top-k over the logits themselves
    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRTSOFTPLUS = "sqrtsoftplus"
    SPARSEMIXER = "sparsemixer"  # Phi-3.5-MoE: masked softmax, one expert at a time


class Normalize(Name):
    """What happens to the selected scores [T, K]."""

    NONE = "none"
    SUM = "sum"  # w / (w.sum(-1) + eps), or / clamp(sum, eps) when `eps_clamps`
    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SIGMOID_SUM = "sigmoid_sum"  # sigmoid of the selected scores, then as SUM (Cohere 2, Kolibri)


class GroupScore(Name):
    """How a group of experts is scored under group-limited routing."""

    MAX = "max"
    TOP2_SUM = "top2_sum"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """From logits [T, E] to ids [T, K] int64 and weights [T, K].

    Order of the steps: score, add `selection bias` [E] (selection only), group limit, top-k, gather
    the unbiased scores, normalise, scale.

    Attributes:
        score: the score function.
        top_k: K.
        num_experts: E; 0 when `score` is EXTERNAL and the graph does not say.
        has_bias: a bias [E] is added for the selection only (DeepSeek-V3's
            `e_score_correction_bias`).
        num_groups: experts are split into this many groups; 1 means no group limit.
        top_k_groups: how many groups stay eligible.
        group_score: how a group is scored.
        group_fill: what the scores of a group that lost become before the top-k (0.0 or -inf).
        normalize: what happens to the selected scores.
        eps: added to the sum (or its lower bound, see `eps_clamps`) when `normalize` is SUM or
            SIGMOID_SUM.
        eps_clamps: `eps` bounds the sum from below instead of being added.
        scale: the weights are multiplied by this last.
        jitter_eps: the sparsemixer's threshold; 0.0 elsewhere.
        score_dtype: dtype in which scores are computed ("fp32"), "" when they stay in the dtype of
            the logits.
    """

    score: Score
    top_k: int
    num_experts: int = 0
    has_bias: bool = False
    num_groups: int = 1
    top_k_groups: int = 1
    group_score: GroupScore = GroupScore.MAX
    group_fill: float = 0.0
    normalize: Normalize = Normalize.NONE
    eps: float = 0.0
    eps_clamps: bool = False
    scale: float = 1.0
    jitter_eps: float = 0.0
    score_dtype: str = "fp32"

    @property
    def kind(self) -> str:
        """Short name for people: `softmax>top8>sum`, `sigmoid+bias>groups 4/8>top8>sum*2.5`."""
        if self.score is Score.EXTERNAL:
            return "external"
        name = str(self.score) + ("+bias" if self.has_bias else "")
        if self.num_groups > 1:
            name += f">groups {self.top_k_groups}/{self.num_groups}"
        name += f">top{self.top_k}"
        if self.normalize is not Normalize.NONE:
            name += f">{self.normalize.value}"
        return name + (f"*{self.scale:g}" if self.scale != 1.0 else "")

    @property
    def key(self) -> str:
        """Canonical text of this router, an argument of `moeflex::route`."""
        return json.dumps(_pack(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @staticmethod
    def from_key(key: str) -> RouterSpec:
        """Read a router back.

        Raises:
            PlanError: `key` is not the text of a router.
        """
        try:
            spec = _unpack(RouterSpec, json.loads(key))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(
                f"not a moeflex router: {key[:120]!r} ({error}); compile the model again"
            ) from error
        assert isinstance(spec, RouterSpec)
        return spec


class WeightPosition(Name):
    """Where the combine weight w enters."""

    OUTPUT = "output"  # y = w * down(act(up(x)))
    HIDDEN = "hidden"  # y = down(w * act(up(x))): differs from OUTPUT only through the down bias
    INPUT = "input"  # y = down(act(up(w * x))): Llama 4, torchtitan


class GateLayout(Name):
    """How gate and up lie in the first expert tensor(s)."""

    NONE = "none"  # not gated: one projection of width I
    CONCAT = "concat"  # [gate | up] along the 2I axis
    CONCAT_UP_FIRST = "concat_up_first"
    INTERLEAVED = "interleaved"  # gate, up, gate, up, ...
    INTERLEAVED_UP_FIRST = "interleaved_up_first"
    SEPARATE = "separate"  # two tensors: gate, up


class Orientation(Name):
    """Which axis of an expert matrix is contiguous in the graph's terms (never from shapes)."""

    OUT_IN = "out_in"  # [.., out, in]: y = x @ W.T, the nn.Linear way (K-major)
    IN_OUT = "in_out"  # [.., in, out]: y = x @ W (MN-major)


class ActivationKind(Name):
    """The function on the gate (or on the only projection)."""

    SILU = "silu"
    GELU = "gelu"  # erf
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU2 = "relu2"  # relu(z) ** 2
    SIGMOID = "sigmoid"
    IDENTITY = "identity"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSpec:
    """a = f(gate) * (up + up_shift), with clamps before; without a gate a = f(z).

    `alpha` is the slope inside SiLU: z * sigmoid(alpha * z) (gpt-oss: 1.702). A limit of +-inf
    means no clamp; gpt-oss has gate_max = 7, up_min = -7, up_max = 7, up_shift = 1.
    """

    kind: ActivationKind
    alpha: float = 1.0
    gate_min: float = float("-inf")
    gate_max: float = float("inf")
    up_min: float = float("-inf")
    up_max: float = float("inf")
    up_shift: float = 0.0

    @property
    def name(self) -> str:
        """Short name for people."""
        extra = [f"alpha={self.alpha:g}"] if self.alpha != 1.0 else []
        if self.gate_max != float("inf") or self.gate_min != float("-inf"):
            extra.append(f"gate[{self.gate_min:g},{self.gate_max:g}]")
        if self.up_max != float("inf") or self.up_min != float("-inf"):
            extra.append(f"up[{self.up_min:g},{self.up_max:g}]")
        if self.up_shift:
            extra.append(f"up+{self.up_shift:g}")
        return self.kind.value + (f"({' '.join(extra)})" if extra else "")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """The experts of one block.

    Tensors, in this order in `tensor_roles`:
    stacked storage: `w13` [E, 2I, H] (or `w1`, `w3` [E, I, H] when SEPARATE; `w1` alone when not
    gated), then `b13` [E, 2I] (or `b1`, `b3`), `w2` [E, H, I], `b2` [E, H].
    list storage: the same roles, each with E 2-d tensors in expert order.
    The last two axes are swapped where the orientation is IN_OUT.

    Attributes:
        num_experts: E.
        hidden: H of x and of the output.
        intermediate: I.
        gate_layout: how gate and up lie.
        w13_orientation: of `w13` (and `w1`, `w3`).
        w2_orientation: of `w2`.
        stacked: one tensor a role; otherwise E tensors a role.
        has_b13, has_b2: biases.
        activation: the activation.
        weight_position: where the combine weight enters.
    """

    num_experts: int
    hidden: int
    intermediate: int
    gate_layout: GateLayout
    w13_orientation: Orientation = Orientation.OUT_IN
    w2_orientation: Orientation = Orientation.OUT_IN
    stacked: bool = True
    has_b13: bool = False
    has_b2: bool = False
    activation: ActivationSpec
    weight_position: WeightPosition = WeightPosition.OUTPUT

    @property
    def gated(self) -> bool:
        """Whether there is an up projection next to the gate."""
        return self.gate_layout is not GateLayout.NONE

    @property
    def tensor_roles(self) -> tuple[str, ...]:
        """The roles of the expert tensors, in the order in which the op takes them."""
        up: tuple[str, ...]
        up_bias: tuple[str, ...]
        if self.gate_layout is GateLayout.SEPARATE:
            up, up_bias = ("w1", "w3"), ("b1", "b3")
        elif self.gated:
            up, up_bias = ("w13",), ("b13",)
        else:
            up, up_bias = ("w1",), ("b1",)
        return up + (up_bias if self.has_b13 else ()) + ("w2",) + (("b2",) if self.has_b2 else ())

    @property
    def num_tensors(self) -> int:
        """How many expert tensors the op takes."""
        return len(self.tensor_roles) * (1 if self.stacked else self.num_experts)

    def tensor_shape(self, role: str) -> tuple[int, ...]:
        """Shape of the tensor of `role` (of one expert's tensor when not stacked)."""
        wide = self.intermediate * (2 if role in ("w13", "b13") else 1)
        if role in ("b13", "b1", "b3"):
            shape: tuple[int, ...] = (wide,)
        elif role == "b2":
            shape = (self.hidden,)
        else:
            out_in = (self.hidden, self.intermediate) if role == "w2" else (wide, self.hidden)
            orientation = self.w2_orientation if role == "w2" else self.w13_orientation
            shape = out_in if orientation is Orientation.OUT_IN else out_in[::-1]
        return (self.num_experts, *shape) if self.stacked else shape

    @property
    def num_elements_per_expert(self) -> int:
        """Weight elements of one expert, biases left out."""
        return self.hidden * self.intermediate * (3 if self.gated else 2)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoEPlan:
    """All that `moeflex::moe_layer` must know besides its tensors.

    Attributes:
        router: EXTERNAL when ids and weights are inputs of the op.
        experts: the experts.
        out_dtype: dtype of the result, "bf16" | "fp16" | "fp32" | "fp64"; "" means that of x.
        batch_invariant: a token's result may not depend on which other tokens are in the batch, bit
            for bit.
    """

    router: RouterSpec
    experts: ExpertSpec
    out_dtype: str = ""
    batch_invariant: bool = False
    round_gemms: bool = False

    @property
    def key(self) -> str:
        """Canonical text of this plan, an argument of the op; `MoEPlan.from_key` reads it back."""
        return json.dumps(
            {"v": PLAN_VERSION, **_pack(self)},
            sort_keys=True,
            separators=(",", ":"),
            allow_nan=False,
        )

    @staticmethod
    def from_key(key: str) -> MoEPlan:
        """Read a plan back.

        Raises:
            PlanError: `key` is not the text of a plan of this version.
        """
        try:
            fields = json.loads(key)
            version = fields.pop("v")
            if version != PLAN_VERSION:
                raise PlanError(
                    f"this moeflex reads plan version {PLAN_VERSION}, the graph holds version "
                    f"{version}; compile the model again"
                )
            plan = _unpack(MoEPlan, fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(
                f"not a moeflex plan: {key[:120]!r} ({error}); compile the model again"
            ) from error
        assert isinstance(plan, MoEPlan)
        return plan


class Isa(Name):
    """An instruction set that the kernel is written for, narrow to wide."""

    SCALAR = "scalar"  # plain C++; what the compiler makes of it
    AVX2 = "avx2"
    AVX512 = "avx512"
    AVX512_BF16 = "avx512_bf16"
    AMX_BF16 = "amx_bf16"  # AVX512_BF16, and tiles where an expert has many rows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernel:
    """A rendered CPU kernel, and what the op library has to know to call it for one plan.

    Attributes:
        name: short name, for people and for the build cache.
        source: the translation unit.
        isa: instruction set to compile for.
        plan_key: `MoEPlan.key` of the plan that it serves.
        layer: fields of the C structure that describes the layer, by name.
        role_dtypes: dtype code of each expert tensor role.
    """

    name: str
    source: str
    isa: Isa
    plan_key: str
    layer: tuple[tuple[str, int], ...]
    role_dtypes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CudaKernel:
    """A rendered Hopper kernel, for a range of token counts.

    Attributes:
        name: short name, for people and for the build cache.
        source: the translation unit.
        entry: name of the kernel function.
        first_tokens, last_tokens: the range of T, both ends in it.
        launch: fields of the C structure that describes the launch, by name.
    """

    name: str
    source: str
    entry: str
    first_tokens: int
    last_tokens: int
    launch: tuple[tuple[str, int | tuple[int, ...]], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CudaProgram:
    """The Hopper kernels of one plan, and what the op library has to know to call them.

    Attributes:
        plan_key: `MoEPlan.key` of the plan that they serve.
        layer: fields of the C structure that describes the layer, by name.
        kernels: by rising T, without overlap.
    """

    plan_key: str
    layer: tuple[tuple[str, int], ...]
    kernels: tuple[CudaKernel, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How a region was proven.

    Attributes:
        max_error: largest relative error of the sub-graph against the reference, over all runs.
        num_runs: executions that were compared.
        precision: "fp64", or the dtype in which the sub-graph had to run.
        seconds: wall time; 0.0 when the proof of an equal region was reused.
        peak_bytes: bytes of the largest set of tensors held at once by a run.
        reused: an equal region had been proven before.
    """

    max_error: float
    num_runs: int
    precision: str
    seconds: float
    peak_bytes: int
    reused: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoERegion:
    """One proven MoE block of a graph.

    Attributes:
        name: qualified name of the module it came from, e.g. `model.layers.3.mlp`; "" when
            the graph has no names.
        module_class: class name of that module, for reports only.
        router: the proven router; EXTERNAL when only ids and weights could be proven.
        router_note: why `router` is EXTERNAL or stays in the graph, or "".
        experts: the proven experts.
        num_tokens: T where static, 0 where dynamic.
        dense_weights: the graph holds weights as [T, E], zero where not routed.
        x_dtype, weight_dtype, out_dtype: "bf16" | "fp16" | "fp32" | "fp64".
        gemm_dtype: dtype of the expert GEMMs where the graph casts x or the weights down to it (explicitly or by
            autocast), else "".
        escaping: what of the router is used outside of the region: subset of ("logits",
            "scores", "ids", "weights").
        form: how the graph spelled the experts: "grouped" | "gathered" | "loop" | "dense".
        shared_expert: "" | "plain" | "gated": a dense expert beside the region, added to
            its result.
        shared_intermediate: its intermediate size, or 0.
        proof: how it was proven.
    """

    name: str
    module_class: str
    router: RouterSpec
    router_note: str = ""
    experts: ExpertSpec
    num_tokens: int
    dense_weights: bool = False
    x_dtype: str
    weight_dtype: str
    out_dtype: str
    gemm_dtype: str = ""
    escaping: tuple[str, ...] = ()
    form: str
    shared_expert: str = ""
    shared_intermediate: int = 0
    proof: Proof

    @property
    def top_k(self) -> int:
        """K."""
        return self.router.top_k


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoMatch:
    """A candidate that was left alone.

    Attributes:
        name: qualified module name, or "".
        module_class: class name of that module, or "".
        node: name of the graph node at which the candidate was anchored.
        reason: one sentence for the user.
        detail: more, for `inspect --json` and the log.
    """

    name: str
    module_class: str
    node: str
    reason: str
    detail: str = ""


def _pack(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        packed = {}
        for field in dataclasses.fields(value):
            entry = getattr(value, field.name)
            if field.default is dataclasses.MISSING or entry != field.default:
                packed[field.name] = _pack(entry)
        return packed
    if isinstance(value, float):
        return repr(value) if value in (float("inf"), float("-inf")) else value
    return value


_NESTED: dict[str, type] = {
    "router": RouterSpec,
    "experts": ExpertSpec,
    "activation": ActivationSpec,
}
_ENUMS: dict[str, type[Name]] = {
    "score": Score,
    "normalize": Normalize,
    "group_score": GroupScore,
    "weight_position": WeightPosition,
    "gate_layout": GateLayout,
    "w13_orientation": Orientation,
    "w2_orientation": Orientation,
    "kind": ActivationKind,
}


def _unpack(cls: Any, fields: dict[str, Any]) -> Any:
    values: dict[str, Any] = {}
    for name, entry in fields.items():
        if name in _NESTED:
            values[name] = _unpack(_NESTED[name], entry)
        elif name in _ENUMS:
            values[name] = _ENUMS[name](entry)
        else:
            values[name] = float(entry) if entry in ("inf", "-inf") else entry
    return cls(**values)
