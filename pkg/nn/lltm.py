"""``LLTM``: the module of PyTorch's tutorial on C++ extensions, and over whole sequences."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor

from ..ops._arguments import check_instance, check_tensor
from ..ops.lltm import lltm
from ..ops.lltm_sequence import lltm_sequence
from ._tracing import is_traced, node_or_refusal

_State = tuple[Tensor, Tensor]


class LLTM(torch.nn.Module):
    """The recurrent unit of :func:`pkg.ops.lltm`, with the tutorial's names and calls.

    Parameters are named as in PyTorch's tutorial "Custom C++ and CUDA Extensions"
    (https://docs.pytorch.org/tutorials/advanced/cpp_extension.html) and drawn as there, so that
    each loads what the other saved: ``weights`` of shape (3 * state_size, state_size +
    input_features) and ``bias`` of shape (1, 3 * state_size), uniform in plus or minus
    ``1 / sqrt(state_size)``.

    Args:
        input_features: Elements in a row of the input.
        state_size: Elements of the state and of the cell.
        device: Of the parameters.
        dtype: Of the parameters; floating.

    Example:
        >>> unit = LLTM(8, 16)
        >>> state = torch.zeros(4, 16), torch.zeros(4, 16)
        >>> new_h, new_cell = unit(torch.randn(4, 8), state)
        >>> hidden, (last_h, last_cell) = unit(torch.randn(10, 4, 8), state)
        >>> hidden.shape
        torch.Size([10, 4, 16])
    """

    def __init__(
        self,
        input_features: int,
        state_size: int,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_features = input_features
        self.state_size = state_size
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weights = torch.nn.Parameter(
            torch.empty(3 * state_size, state_size + input_features, **options)
        )
        self.bias = torch.nn.Parameter(torch.empty(1, 3 * state_size, **options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters anew, uniformly in plus or minus ``1 / sqrt(state_size)``."""
        limit = 1 / sqrt(self.state_size) if self.state_size else 0.0
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -limit, limit)

    def forward(self, input: Tensor, state: _State) -> tuple[Tensor, Tensor | _State]:
        """Computes a step, or all steps of a sequence.

        Args:
            input: Shape (B, F), or (T, B, F) for a sequence.
            state: The state and the cell to begin with, each of shape (B, H).

        Returns:
            For a step the new state and the new cell. For a sequence the states after all
            steps, of shape (T, B, H), and the last state and cell as a pair.

        Raises:
            RuntimeError: What the operators' do.
            TypeError: ``input`` is no tensor, or ``state`` no pair of tensors.
            ValueError: ``state`` has another number of elements than two.
        """
        must_be = "a tensor of shape (B, F) or (T, B, F)"
        if is_traced(input, state):
            node: tuple[Tensor, Tensor | _State] = node_or_refusal(
                self, "LLTM", "input", must_be, (input, state)
            )
            return node
        check_tensor("LLTM", "input", input, must_be)
        must_be = "a pair of tensors, (old_h, old_cell)"
        check_instance("LLTM", "state", state, (tuple, list, Tensor), must_be)
        if len(state) != 2:
            raise ValueError(f"LLTM: state has {len(state)} elements; it must be {must_be}")
        old_h, old_cell = state
        check_tensor("LLTM", "old_h", old_h, "a tensor of shape (B, H)")
        check_tensor("LLTM", "old_cell", old_cell, "a tensor of shape (B, H)")
        if input.dim() != 3:
            return lltm(input, self.weights, self.bias, old_h, old_cell)
        hidden, cells = lltm_sequence(input, self.weights, self.bias, old_h, old_cell)
        if hidden.shape[0] == 0:
            return hidden, (old_h, old_cell)
        return hidden, (hidden[-1], cells[-1])

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"{self.input_features}, {self.state_size}"
