"""Where the expert matrices lie in memory, as the tensor maps of the layer kernels.

Every layout of gate and up becomes two strided views, or one where they are neighbours along the
contiguous axis: nothing is packed or copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from moe_compiler.errors import PlanError
from moe_compiler.ir import ExpertSpec, GateLayout, Orientation
from moe_compiler.runtime.cuda_driver import TensorMap


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One [rows, k] matrix an expert, in memory.

    Attributes:
        address: of element (expert 0, row 0, k 0).
        rows, k: extent.
        row_stride, k_stride, expert_stride: in elements; one of the first two is 1.
        num_experts: E.
    """

    address: int
    rows: int
    k: int
    row_stride: int
    k_stride: int
    expert_stride: int
    num_experts: int

    def tensor_map(self, dtype: str, box_rows: int, box_k: int) -> TensorMap:
        """3-d map: [k, rows, expert] when K-major, else [rows, k, expert], 64 rows a box."""
        if self.k_stride == 1:
            dims, stride, box = (self.k, self.rows), self.row_stride, (64, box_rows)
        else:
            dims, stride, box = (self.rows, self.k), self.k_stride, (64, box_k)
        return TensorMap(
            self.address,
            dtype,
            (*dims, self.num_experts),
            (2 * stride, 2 * self.expert_stride),
            (*box, 1),
        )


def expert_matrix(
    tensor: Tensor, orientation: Orientation, first_row: int, num_rows: int, row_step: int
) -> Matrix:
    """Rows first_row, first_row + row_step, ... of the stacked expert tensor `tensor`."""
    out_in = orientation is Orientation.OUT_IN
    row_stride, k_stride = (
        (tensor.stride(1), tensor.stride(2)) if out_in else (tensor.stride(2), tensor.stride(1))
    )
    return Matrix(
        address=tensor.data_ptr() + 2 * first_row * row_stride,
        rows=num_rows,
        k=tensor.shape[2] if out_in else tensor.shape[1],
        row_stride=row_stride * row_step,
        k_stride=k_stride,
        expert_stride=tensor.stride(0),
        num_experts=tensor.shape[0],
    )


def split_gate_up(spec: ExpertSpec, tensors: Mapping[str, Tensor]) -> tuple[Matrix, Matrix | None]:
    """Gate and up as views; up is None when not gated, or when gate holds both as neighbours."""
    orientation, rows = spec.w13_orientation, spec.intermediate
    if spec.gate_layout is GateLayout.NONE:
        return expert_matrix(tensors["w1"], orientation, 0, rows, 1), None
    if spec.gate_layout is GateLayout.SEPARATE:
        return expert_matrix(tensors["w1"], orientation, 0, rows, 1), expert_matrix(
            tensors["w3"], orientation, 0, rows, 1
        )
    first, step = halves(spec)
    if (
        step == 2 and orientation is Orientation.IN_OUT
    ):  # neighbours along the contiguous axis: loaded as one matrix
        return expert_matrix(tensors["w13"], orientation, 0, 2 * rows, 1), None
    pair = [expert_matrix(tensors["w13"], orientation, start, rows, step) for start in first]
    return pair[0], pair[1]


def halves(spec: ExpertSpec) -> tuple[tuple[int, int], int]:
    """(first row of gate, of up), and the step from row to row, along the 2I axis."""
    interleaved = spec.gate_layout in (GateLayout.INTERLEAVED, GateLayout.INTERLEAVED_UP_FIRST)
    second = 1 if interleaved else spec.intermediate
    swapped = spec.gate_layout in (GateLayout.CONCAT_UP_FIRST, GateLayout.INTERLEAVED_UP_FIRST)
    return ((second, 0) if swapped else (0, second)), 2 if interleaved else 1


def slab_map(gate: Matrix, up: Matrix, dtype: str, num_slabs: int) -> TensorMap:
    """5-d map of K-major gate and up: [k, 8 rows, gate | up, rows / 8, expert].

    The one with the lower address comes first.
    """
    if (gate.row_stride, gate.expert_stride) != (up.row_stride, up.expert_stride):
        raise PlanError(
            f"w1 and w3 must have the same strides; got {(gate.expert_stride, gate.row_stride)} and "
            f"{(up.expert_stride, up.row_stride)}; make both contiguous"
        )
    low, high = sorted((gate, up), key=lambda matrix: matrix.address)
    dims = (gate.k, 8, 2, gate.rows // 8, gate.num_experts)
    strides = (
        2 * gate.row_stride,
        high.address - low.address,
        16 * gate.row_stride,
        2 * gate.expert_stride,
    )
    return TensorMap(low.address, dtype, dims, strides, (64, 8, 2, 4 * num_slabs, 1))
