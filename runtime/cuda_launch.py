"""One MoE layer on one Hopper GPU: tensor maps, workspace, launch.

The hot path allocates nothing but the result, never synchronises and can be captured in a CUDA
graph. A layer holds one workspace, so two launches of it may not overlap on different streams.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from moe_compiler.errors import PlanError
from moe_compiler.ir import GateLayout, MoEPlan
from moe_compiler.runtime.cuda_driver import Kernel, TensorMap
from moe_compiler.runtime.cuda_maps import (
    Matrix,
    expert_matrix,
    halves,
    slab_map,
    split_gate_up,
)

_TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int64": torch.int64,
    "int32": torch.int32,
}
_ALIGNMENT_BYTES = 1024


class KernelConfig(Protocol):
    """What the launch reads of `codegen.cuda.CudaConfig`."""

    @property
    def kernel(self) -> str: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def out_dtype(self) -> str: ...  # noqa: D102
    @property
    def weight_dtype(self) -> str: ...  # noqa: D102
    @property
    def index_dtype(self) -> str: ...  # noqa: D102
    @property
    def w13_mn_major(self) -> bool: ...  # noqa: D102
    @property
    def w2_mn_major(self) -> bool: ...  # noqa: D102
    @property
    def num_threads(self) -> int: ...  # noqa: D102
    @property
    def block_m(self) -> int: ...  # noqa: D102
    @property
    def block_k(self) -> int: ...  # noqa: D102
    @property
    def num_slabs(self) -> int: ...  # noqa: D102
    @property
    def num_slices(self) -> int: ...  # noqa: D102
    @property
    def max_routes(self) -> int: ...  # noqa: D102
    @property
    def max_tiles(self) -> int: ...  # noqa: D102


class LayerArgs(ctypes.Structure):
    """The same bytes as `moeflex::LayerArgs` in templates/cuda/layer_args.h."""

    _fields_ = (
        *(
            (name, ctypes.c_int)
            for name in (
                "num_tokens",
                "top_k",
                "num_experts",
                "hidden",
                "intermediate",
                "up_first",
                "bias13_expert_stride",
            )
        ),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "x",
                "ids",
                "weights",
                "bias_gate",
                "bias_up",
                "bias_down",
                "out",
                "h",
                "y",
                "control",
                "routes",
            )
        ),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Bytes of each part of a layer's workspace, for up to `num_tokens` tokens.

    Attributes:
        control_bytes: counters; zero before the first launch, and the kernel leaves them at zero.
        routes_bytes: route tables.
        h_bytes, y_bytes: activations and rows of the down projection.
        num_rows: rows of h and y.
    """

    control_bytes: int
    routes_bytes: int
    h_bytes: int
    y_bytes: int
    num_rows: int

    @property
    def parts(self) -> tuple[int, ...]:
        """Bytes of control, routes, h, y, each rounded up to the alignment."""
        sizes = (self.control_bytes, self.routes_bytes, self.h_bytes, self.y_bytes)
        return tuple(-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes)

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return sum(self.parts)


def plan_workspace(config: KernelConfig, plan: MoEPlan, num_tokens: int) -> Workspace:
    """The workspace of a launch with up to `num_tokens` tokens."""
    experts, top_k = plan.experts, plan.router.top_k
    num_routes = num_tokens * top_k
    if config.kernel == "prefill":
        num_tiles = num_routes // config.block_m + min(experts.num_experts, num_routes)
        num_rows = num_tiles * config.block_m
        control = 128 + experts.num_experts + (1 + config.num_slices) * num_tiles
        routes = num_routes + experts.num_experts + 1 + 2 * num_tiles + 2 * num_rows
    else:
        num_rows = num_routes
        control = 96 + config.max_tiles
        routes = 0
    return Workspace(
        control_bytes=4 * control,
        routes_bytes=4 * routes,
        h_bytes=num_rows * experts.intermediate * 2,
        y_bytes=num_rows * experts.hidden * 2,
        num_rows=num_rows,
    )


class CudaLayer:
    """A loaded layer kernel bound to its expert tensors.

    Args:
        kernel: the loaded kernel.
        config: its choices.
        plan: the plan.
        experts: expert tensors on the GPU, in the order of `plan.experts.tensor_roles`.
        max_tokens: largest T of a call.

    Raises:
        PlanError: a tensor does not fit the plan, or `max_tokens` is more than the kernel's tables
            hold.
    """

    def __init__(
        self,
        kernel: Kernel,
        config: KernelConfig,
        plan: MoEPlan,
        experts: Sequence[Tensor],
        max_tokens: int,
    ) -> None:
        """Allocate the workspace and encode the tensor maps."""
        if config.max_routes and max_tokens * plan.router.top_k > config.max_routes:
            raise PlanError(
                f"this decode kernel takes up to {config.max_routes} routes; {max_tokens} tokens of "
                f"{plan.router.top_k} experts were asked for; use the prefill kernel"
            )
        self.kernel, self.config, self.plan, self.max_tokens = kernel, config, plan, max_tokens
        device = experts[0].device
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.workspace = plan_workspace(config, plan, max_tokens)
        self._buffers = [
            torch.zeros(size, dtype=torch.uint8, device=device) for size in self.workspace.parts
        ]
        self._args = LayerArgs()
        spec = plan.experts
        self._args.top_k, self._args.num_experts = plan.router.top_k, spec.num_experts
        self._args.hidden, self._args.intermediate = spec.hidden, spec.intermediate
        for name, buffer in zip(("control", "routes", "h", "y"), self._buffers, strict=True):
            setattr(self._args, name, buffer.data_ptr())
        self.bind(experts)

    def bind(self, experts: Sequence[Tensor]) -> None:
        """Point the layer at expert tensors (again): tensor maps are encoded here and nowhere else.

        Raises:
            PlanError: a tensor has another shape, dtype or layout than the plan says.
        """
        spec, config = self.plan.experts, self.config
        roles = spec.tensor_roles
        if len(experts) != len(roles):
            raise PlanError(
                f"the plan needs the expert tensors {roles}; got {len(experts)} tensors"
            )
        tensors = dict(zip(roles, experts, strict=True))
        for role, tensor in tensors.items():
            self._check_expert_tensor(role, tensor)
        gate, up = split_gate_up(spec, tensors)
        down = expert_matrix(tensors["w2"], spec.w2_orientation, 0, spec.hidden, 1)
        self._experts = tuple(experts)
        self._addresses = tuple(tensor.data_ptr() for tensor in experts)
        up_first = (
            spec.gate_layout is GateLayout.INTERLEAVED_UP_FIRST
            if up is None
            else up.address < gate.address
        )
        self._args.up_first = int(up_first)
        self._bind_biases(tensors)
        maps = {
            "prefill": self._prefill_maps,
            "decode": self._weight_maps,
        }[config.kernel](gate, up, down)
        self._maps = maps
        pointers = [tensor_map.address for tensor_map in maps] + [ctypes.addressof(self._args)]
        self._arguments = (ctypes.c_void_p * len(pointers))(*pointers)

    def _check_expert_tensor(self, role: str, tensor: Tensor) -> None:
        spec, dtype = self.plan.experts, _TORCH_DTYPES[self.config.dtype]
        shape = spec.tensor_shape(role)
        if tuple(tensor.shape) != shape or tensor.dtype is not dtype or not tensor.is_cuda:
            raise PlanError(
                f"{role} must be {list(shape)} {dtype} on a GPU; got {list(tensor.shape)} {tensor.dtype} on "
                f"{tensor.device}"
            )
        if tensor.dim() == 2 and tensor.is_contiguous():
            return
        if (
            tensor.stride(-1) != 1
            or tensor.dim() == 2
            or any(stride % 8 for stride in tensor.stride()[:-1])
        ):
            raise PlanError(
                f"{role} must have a contiguous last axis and other strides that are multiples of 16 bytes (a bias: be "
                f"contiguous); got strides {tensor.stride()}"
            )
        if tensor.data_ptr() % 16:
            raise PlanError(
                f"{role} must start at a multiple of 16 bytes; make it contiguous or move it"
            )

    def _bind_biases(self, tensors: Mapping[str, Tensor]) -> None:
        spec, args = self.plan.experts, self._args
        args.bias_gate = args.bias_up = args.bias_down = None
        args.bias13_expert_stride = spec.intermediate
        if "b13" in tensors:
            (gate, up), _ = halves(spec)
            args.bias_gate, args.bias_up = (
                tensors["b13"].data_ptr() + 2 * first for first in (gate, up)
            )
            args.bias13_expert_stride = tensors["b13"].stride(0)
        elif "b1" in tensors:
            args.bias_gate, args.bias13_expert_stride = (
                tensors["b1"].data_ptr(),
                tensors["b1"].stride(0),
            )
            args.bias_up = tensors["b3"].data_ptr() if "b3" in tensors else None
        if "b2" in tensors:
            args.bias_down = tensors["b2"].data_ptr()

    def _prefill_maps(self, gate: Matrix, up: Matrix | None, down: Matrix) -> list[TensorMap]:
        spec, dtype, rows = self.plan.experts, self.config.dtype, self.workspace.num_rows
        box_rows = 256 if up is None else 128
        h, y = self._args.h, self._args.y

        def plain(address: int, width: int, box_rows: int) -> TensorMap:
            return TensorMap(address, dtype, (width, rows), (2 * width,), (64, box_rows))

        return [
            gate.tensor_map(dtype, box_rows, 64),
            (up or gate).tensor_map(dtype, box_rows, 64),
            down.tensor_map(dtype, 256, 64),
            plain(h, spec.intermediate, 128),
            plain(h, spec.intermediate, 64),
            plain(y, spec.hidden, 64),
        ]

    def _weight_maps(self, gate: Matrix, up: Matrix | None, down: Matrix) -> list[TensorMap]:
        """Gate, up and down as M operands of `64 * num_slabs` rows."""
        config = self.config
        dtype, unit_rows, block_k = config.dtype, 64 * config.num_slabs, config.block_k
        if up is not None and not config.w13_mn_major:
            slabs = slab_map(gate, up, dtype, config.num_slabs)
            first = [slabs, slabs]
        else:
            first = [matrix.tensor_map(dtype, unit_rows, block_k) for matrix in (gate, up or gate)]
        return [*first, down.tensor_map(dtype, unit_rows, block_k)]

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """The layer on the current stream.

        Args:
            x: [T, H] in the config's dtype, contiguous.
            ids: [T, K] in the config's index dtype; an id outside [0, E) contributes nothing.
            weights: [T, K] in the config's weight dtype.
            out: [T, H] in the config's out dtype, or None to allocate it.

        Returns:
            [T, H]: `out`.

        Raises:
            PlanError: an input does not fit.
        """
        self._check_inputs(x, ids, weights)
        if tuple(tensor.data_ptr() for tensor in self._experts) != self._addresses:
            self.bind(self._experts)
        if out is None:
            out = torch.empty(x.shape, dtype=_TORCH_DTYPES[self.config.out_dtype], device=x.device)
        if x.shape[0] == 0:
            return out
        args = self._args
        args.num_tokens = x.shape[0]
        args.x, args.ids, args.weights, args.out = (
            x.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
        )
        stream = torch.cuda.current_stream(x.device).cuda_stream
        self.kernel.launch(
            self.num_sms,
            self.config.num_threads,
            self._arguments,
            stream,
            self.config.kernel != "decode",
        )
        return out

    def _check_inputs(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        config, num_tokens = self.config, x.shape[0]
        wanted = (
            ("x", x, config.dtype, (num_tokens, self.plan.experts.hidden)),
            ("ids", ids, config.index_dtype, (num_tokens, self.plan.router.top_k)),
            ("weights", weights, config.weight_dtype, (num_tokens, self.plan.router.top_k)),
        )
        for name, tensor, dtype, shape in wanted:
            if (
                tuple(tensor.shape) != shape
                or tensor.dtype is not _TORCH_DTYPES[dtype]
                or not tensor.is_contiguous()
            ):
                raise PlanError(
                    f"{name} must be contiguous {list(shape)} {dtype}; got {list(tensor.shape)} {tensor.dtype}, "
                    f"strides {tensor.stride()}"
                )
        if num_tokens > self.max_tokens:
            raise PlanError(
                f"this layer was prepared for up to {self.max_tokens} tokens; got {num_tokens}"
            )
