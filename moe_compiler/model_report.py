"""What `moeflex inspect` found, as frozen data that goes to JSON and back.

```
ModelReport
  machine: Machine              the device whose floors are predicted
  blocks: BlockReport ...       one per MoE block: its region (or why there is none), bytes, floors
  graphs: BlockGraph ...        the nodes of a block; equal blocks share one
  outline: OutlineNode ...      the module tree, runs of equal layers folded
```

`ModelReport.to_json` and `from_json` read and write it; `block_groups` puts equal blocks together.
"""

from __future__ import annotations

import dataclasses
import json

from moe_compiler.codec import decode, encode
from moe_compiler.errors import OptionError
from moe_compiler.ir import MoERegion, Name

SCHEMA_VERSION = 1


class Status(Name):
    """What became of a block."""

    MATCHED = "matched"  # proven
    REFUSED = "refused"  # a candidate that could not be proven: Inductor runs it, unchanged
    UNSEEN = "unseen"  # a module that holds experts, and no captured graph has it as a candidate


class Stage(Name):
    """The part of a block that a graph node belongs to."""

    ROUTER = "router"
    DISPATCH = "dispatch"  # what arranges tokens or weights by expert
    EXPERTS = "experts"
    COMBINE = "combine"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast a machine multiplies matrices of one dtype.

    Attributes:
        dtype: "bf16" | "fp16" | "fp32" | "fp64".
        flop_per_s: two per multiply-add.
        source: where the number comes from.
    """

    dtype: str
    flop_per_s: float
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The two speeds that bound an MoE layer from below.

    Attributes:
        name: what `--device` takes.
        title: for people.
        weight_bytes_per_s: how fast expert weights are read.
        weight_source: where that number comes from.
        rates: one per dtype.
    """

    name: str
    title: str
    weight_bytes_per_s: float
    weight_source: str
    rates: tuple[Rate, ...]

    def rate(self, dtype: str) -> Rate:
        """The rate of `dtype`.

        Raises:
            OptionError: the machine has none.
        """
        for rate in self.rates:
            if rate.dtype == dtype:
                return rate
        known = ", ".join(rate.dtype for rate in self.rates)
        raise OptionError(
            f"no {dtype} matrix rate is known for {self.name} (known: {known}); give one with --tflops"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FloorPoint:
    """The time below which the experts of one block cannot run, at one token count.

    Attributes:
        tokens: T.
        experts_balanced: distinct experts that are read when routes spread evenly.
        experts_random: their mean when every token draws K of E experts at random.
        weight_bytes_balanced: bytes of `experts_balanced`.
        weight_bytes_random: bytes of `experts_random`.
        flop: of the experts.
        weight_balanced_us: the balanced bytes at the machine's read speed.
        weight_random_us: the random bytes at that speed.
        flop_us: the FLOP at the machine's matrix rate.
        floor_us: the larger of weights and FLOP, balanced.
        floor_random_us: the larger of weights and FLOP, random.
        bound: which of the two decides `floor_us`: "weights" | "flop".
    """

    tokens: int
    experts_balanced: float
    experts_random: float
    weight_bytes_balanced: float
    weight_bytes_random: float
    flop: float
    weight_balanced_us: float
    weight_random_us: float
    flop_us: float
    floor_us: float
    floor_random_us: float
    bound: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """One node of a block's graph.

    Attributes:
        name: the node's name in the graph.
        op: what it calls, e.g. `topk`, `bmm`.
        stage: the part of the block.
        shape: shape and dtype of its value, e.g. `[T, 8] bf16`; "" when it is no tensor.
        inputs: names of the nodes it reads; those that are not in the block are in `BlockGraph.outside`.
    """

    name: str
    op: str
    stage: Stage
    shape: str
    inputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutsideNode:
    """What a block reads: the hidden states, or a parameter.

    Attributes:
        name: the node's name in the graph.
        role: "x", an expert role such as `w13`, or "" for anything else.
        shape: shape and dtype.
    """

    name: str
    role: str
    shape: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockGraph:
    """The nodes of one block, in graph order.

    Attributes:
        nodes: the nodes that are drawn.
        outside: what the block reads.
        output: name of the node that holds the block's result.
        num_hidden: nodes that were left out because the graph is too long to draw.
    """

    nodes: tuple[GraphNode, ...]
    outside: tuple[OutsideNode, ...]
    output: str
    num_hidden: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """One role of a block's expert tensors.

    Attributes:
        role: e.g. `w13`, see `ExpertSpec.tensor_roles`.
        shape: of the tensor; of one expert's when `count` > 1.
        count: how many tensors the role has.
        num_bytes: of all of them.
    """

    role: str
    shape: tuple[int, ...]
    count: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockReport:
    """One block: what it is, who runs it, and its floors.

    Attributes:
        name: qualified module name, or the anchor node's name when the graph has no names.
        module_class: class of that module, or "".
        status: what became of it.
        reason: why it was not matched, or "".
        detail: more of that, or "".
        node: the graph node at which a refused candidate was anchored, or "".
        router: `RouterSpec.kind`, or "" when not matched.
        region: the proven block; None when not matched.
        target: what runs it on the device asked for.
        tensors: the expert tensors.
        expert_bytes: of all experts of this block; 0 when not matched.
        bytes_per_expert: of one.
        active_bytes_per_token: of the K experts that one token reads.
        floors: one per token count asked for.
        workspace_bytes: what a launch needs besides its tensors, one per token count; blocks that run one after the
            other share it.
        graph_idx: index into `ModelReport.graphs`; -1 when there is none.
    """

    name: str
    module_class: str
    status: Status
    reason: str = ""
    detail: str = ""
    node: str = ""
    router: str = ""
    region: MoERegion | None = None
    target: str
    tensors: tuple[TensorReport, ...] = ()
    expert_bytes: int = 0
    bytes_per_expert: int = 0
    active_bytes_per_token: int = 0
    floors: tuple[FloorPoint, ...] = ()
    workspace_bytes: tuple[int, ...] = ()
    graph_idx: int = -1

    @property
    def likeness(self) -> BlockReport:
        """This block without its name, its place and the cost of its proof: equal for blocks that differ in no more."""
        region = self.region
        if region is not None:
            proof = dataclasses.replace(
                region.proof, max_error=0.0, num_runs=0, seconds=0.0, peak_bytes=0, reused=False
            )
            region = dataclasses.replace(region, name="", proof=proof)
        return dataclasses.replace(self, name="", node="", detail="", region=region, graph_idx=-1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutlineNode:
    """One entry of the module tree, or a run of equal ones.

    Attributes:
        label: name inside of the parent, e.g. `layers.3-60`.
        module_class: class name; "" for a repeated pattern of several modules.
        num_parameters: of one repetition.
        num_bytes: of one repetition.
        repeat: how many equal modules this entry stands for.
        blocks: indices into `ModelReport.blocks` when this module is an MoE block, one per repetition of all parents.
        children: what the first repetition holds.
    """

    label: str
    module_class: str
    num_parameters: int
    num_bytes: int
    repeat: int = 1
    blocks: tuple[int, ...] = ()
    children: tuple[OutlineNode, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Wall time of one stage of the inspection."""

    name: str
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """All that `moeflex inspect` has to say about one model.

    Attributes:
        target: what was inspected, as the user named it.
        model_class: class of the module.
        level: "torch" (the graph of dynamo) | "aten" (that of `torch.export`).
        phase: "prefill" | "decode" | "given" (the user's own inputs).
        input_note: the example inputs, in words.
        dtype: of most parameters.
        num_parameters: of the model, shared ones counted once.
        parameter_bytes: of those.
        capture_notes: how the model was made traceable, one sentence each; empty when it traced as it is.
        notes: what else the reader should know.
        num_graphs: captured graphs.
        num_graph_nodes: nodes of all of them.
        machine: the device of the floors.
        tokens: the token counts of the floors.
        floor_formula: how the floors were computed, in words.
        blocks: in the order of the model.
        graphs: the distinct block graphs.
        outline: the module tree.
        stages: where the time of the inspection went.
        peak_rss_bytes: the process's largest resident size.
        versions: pairs (package, version).
        schema: version of this format.
    """

    target: str
    model_class: str
    level: str
    phase: str
    input_note: str
    dtype: str
    num_parameters: int
    parameter_bytes: int
    capture_notes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    num_graphs: int
    num_graph_nodes: int
    machine: Machine
    tokens: tuple[int, ...]
    floor_formula: str
    blocks: tuple[BlockReport, ...]
    graphs: tuple[BlockGraph, ...] = ()
    outline: tuple[OutlineNode, ...] = ()
    stages: tuple[StageTime, ...] = ()
    peak_rss_bytes: int = 0
    versions: tuple[tuple[str, str], ...] = ()
    schema: int = SCHEMA_VERSION

    def count(self, status: Status) -> int:
        """How many blocks ended this way."""
        return sum(block.status == status for block in self.blocks)

    @property
    def expert_bytes(self) -> int:
        """Bytes of the experts of all matched blocks; experts shared by several blocks count for each."""
        return sum(block.expert_bytes for block in self.blocks)

    @property
    def proof_seconds(self) -> float:
        """Wall time of all proofs."""
        return sum(block.region.proof.seconds for block in self.blocks if block.region)

    @property
    def proof_peak_bytes(self) -> int:
        """The most that one proof held at once."""
        return max(
            (block.region.proof.peak_bytes for block in self.blocks if block.region), default=0
        )

    @property
    def seconds(self) -> float:
        """Wall time of the inspection."""
        return sum(stage.seconds for stage in self.stages)

    def floor_us(self, tokens: int, *, routing: str = "balanced") -> float:
        """Sum of the floors of all matched blocks at `tokens`, for "balanced" or "random" routing."""
        points = (p for block in self.blocks for p in block.floors if p.tokens == tokens)
        return sum(p.floor_us if routing == "balanced" else p.floor_random_us for p in points)

    def to_json(self, *, indent: int | None = None) -> str:
        """Strict JSON text of this report."""
        return json.dumps(encode(self), indent=indent, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> ModelReport:
        """Read a report back.

        Raises:
            OptionError: `text` is not a report of this schema.
        """
        try:
            fields = json.loads(text)
            if fields.get("schema") != SCHEMA_VERSION:
                raise OptionError(
                    f"this moeflex reads report schema {SCHEMA_VERSION}, the file has "
                    f"{fields.get('schema')!r}; run `moeflex inspect --json` again"
                )
            return decode(ModelReport, fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, OptionError):
                raise
            raise OptionError(
                f"not a moeflex report ({error}); write one with `moeflex inspect TARGET --json FILE`"
            ) from error
