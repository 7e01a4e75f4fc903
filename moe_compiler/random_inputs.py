"""Random inputs of the kind that a model takes, for commands that run it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_compiler.errors import OptionError
from moe_compiler.inspect_target import Target


class RandomInputs:
    """Random inputs of the kind that a model takes.

    Args:
        target: the model with its example inputs.
        axis: of the first input that is the token count, where the target does not know its own.

    Raises:
        OptionError: the first input has no such axis.
    """

    def __init__(self, target: Target, axis: int) -> None:
        self.target = target
        self.axis = axis if target.token_axis is None else target.token_axis
        tensors = [t for t in (*target.args, *target.kwargs.values()) if isinstance(t, Tensor)]
        if not tensors or tensors[0].ndim <= self.axis:
            raise OptionError(f"--axis {self.axis} is not an axis of the first input")
        self.count = tensors[0].shape[self.axis]

    def make(self, tokens: int, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments for one call."""
        generator = torch.Generator().manual_seed(seed)
        args = tuple(self._like(value, tokens, generator) for value in self.target.args)
        kwargs = {
            name: self._like(value, tokens, generator) for name, value in self.target.kwargs.items()
        }
        return args, kwargs

    def _like(self, value: Any, tokens: int, generator: torch.Generator) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = list(value.shape)
        if value.ndim > self.axis and shape[self.axis] == self.count:
            shape[self.axis] = tokens
        if value.dtype.is_floating_point:
            spread = float(value.float().std()) if value.numel() > 1 else 1.0
            random = torch.randn(shape, generator=generator) * (spread or 1.0)
            return random.to(value.dtype)
        vocabulary = self._vocabulary()
        if vocabulary:
            return torch.randint(vocabulary, shape, generator=generator).to(value.dtype)
        pick = torch.randint(max(1, value.numel()), shape, generator=generator)
        return value.flatten()[pick]  # integers that the model is known to take

    def _vocabulary(self) -> int:
        if self.target.phase == "given":
            return 0
        return int(self.target.module.get_input_embeddings().num_embeddings)  # type: ignore[operator]
