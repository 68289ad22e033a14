"""pkg.nn.LLTM: the tutorial's module, and over sequences."""

from __future__ import annotations

import pytest
import references
import torch
from torch import Tensor

import pkg


def state_of(batch: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, size, device=device), torch.randn(batch, size, device=device)


def test_parameters_are_the_tutorials(device: torch.device) -> None:
    module = pkg.nn.LLTM(7, 5, device=device, dtype=torch.float64)
    shapes = {name: tuple(each.shape) for name, each in module.named_parameters()}
    assert shapes == {"weights": (15, 12), "bias": (1, 15)}
    for parameter in module.parameters():
        assert parameter.dtype == torch.float64
        assert parameter.device.type == device.type
        assert parameter.abs().max() <= 5**-0.5
        assert parameter.std() > 0.1
    assert repr(module) == "LLTM(7, 5)"
    other = pkg.nn.LLTM(7, 5, device=device, dtype=torch.float64)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.weights, module.weights)


def test_a_step(device: torch.device) -> None:
    module = pkg.nn.LLTM(7, 5, device=device)
    input, state = torch.randn(4, 7, device=device), state_of(4, 5, device)
    results = module(input, state)
    expected = references.lltm(input, module.weights, module.bias, *state)
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted)


@pytest.mark.parametrize("steps", [1, 6])
def test_a_sequence_is_steps(device: torch.device, steps: int) -> None:
    module = pkg.nn.LLTM(7, 5, device=device, dtype=torch.float64)
    inputs = torch.randn(steps, 4, 7, device=device, dtype=torch.float64)
    state = tuple(each.double() for each in state_of(4, 5, device))
    hidden, (last_h, last_cell) = module(inputs, state)
    (hidden.sum() + last_cell.square().sum()).backward()
    gradient = module.weights.grad
    module.zero_grad()
    h, cell = state
    states = []
    for input in inputs:
        h, cell = module(input, (h, cell))
        states.append(h)
    (torch.stack(states).sum() + cell.square().sum()).backward()
    torch.testing.assert_close(hidden, torch.stack(states))
    torch.testing.assert_close(last_h, h)
    torch.testing.assert_close(last_cell, cell)
    torch.testing.assert_close(gradient, module.weights.grad)


def test_no_steps_leave_the_state(device: torch.device) -> None:
    module, state = pkg.nn.LLTM(7, 5, device=device), state_of(4, 5, device)
    hidden, last = module(torch.randn(0, 4, 7, device=device), state)
    assert hidden.shape == (0, 4, 5)
    assert all(map(torch.equal, last, state))


def test_is_compiled_whole(device: torch.device) -> None:
    module, state = pkg.nn.LLTM(7, 5, device=device), state_of(4, 5, device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for input in (torch.randn(4, 7, device=device), torch.randn(3, 4, 7, device=device)):
        torch.testing.assert_close(compiled(input, state), module(input, state))


def test_wrong_ranks_are_refused(device: torch.device) -> None:
    module, state = pkg.nn.LLTM(7, 5, device=device), state_of(4, 5, device)
    for shape in ((7,), (1, 1, 4, 7)):
        with pytest.raises(RuntimeError, match="input has shape"):
            module(torch.randn(shape, device=device), state)


def test_what_is_no_tensor_is_refused_in_words() -> None:
    module, input, state = pkg.nn.LLTM(7, 5), torch.ones(4, 7), torch.ones(4, 5)
    for arguments, words in (
        ((None, (state, state)), r"input is None; it must be a tensor of shape \(B, F\) or"),
        ((input, None), "state is None; it must be a pair of tensors"),
        ((input, (None, state)), r"old_h is None; it must be a tensor of shape \(B, H\)"),
        ((input, (state, 3)), "old_cell is of type int; it must be"),
    ):
        with pytest.raises(TypeError, match=f"LLTM: {words}"):
            module(*arguments)
    with pytest.raises(ValueError, match="state has 3 elements; it must be a pair"):
        module(input, (state, state, state))
