"""A layer as the op libraries' C tables hold it: the entries that all targets share.

`MoeflexLayerSpec` of templates/cpu/op_table.h and `MoeflexCudaLayerSpec` of templates/cuda/op_table.h.
"""

from __future__ import annotations

from moe_compiler.ir import GateLayout, MoEPlan, Orientation

_GATE_CODES = {
    GateLayout.NONE: 0,
    GateLayout.CONCAT: 1,
    GateLayout.CONCAT_UP_FIRST: 2,
    GateLayout.INTERLEAVED: 3,
    GateLayout.INTERLEAVED_UP_FIRST: 4,
    GateLayout.SEPARATE: 5,
}


def layer_entries(plan: MoEPlan) -> dict[str, int]:
    """Sizes and layouts of a plan's layer, by the names of the tables' fields."""
    spec = plan.experts
    return {
        "num_experts": spec.num_experts,
        "hidden": spec.hidden,
        "intermediate": spec.intermediate,
        "top_k": plan.router.top_k,
        "gate_layout": _GATE_CODES[spec.gate_layout],
        "w13_out_in": int(spec.w13_orientation is Orientation.OUT_IN),
        "w2_out_in": int(spec.w2_orientation is Orientation.OUT_IN),
        "has_b13": int(spec.has_b13),
        "has_b2": int(spec.has_b2),
    }
