"""The modules of pkg.nn: they are PyTorch's, and what they keep is never out of date."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable

import pytest
import references
import torch
from samples import FLOATING
from torch import Tensor
from torch.nn.utils import parametrize

import pkg

ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")


def layer(
    device: torch.device, activation: str | None = "gelu", dtype: torch.dtype = torch.float32
) -> pkg.nn.Linear:
    """In evaluation mode, and called once, so that its weight is packed."""
    module = pkg.nn.Linear(20, 33, activation=activation, device=device, dtype=dtype).eval()
    with torch.no_grad():
        module(torch.ones(1, 20, device=device, dtype=dtype))
    assert module._packed is not None
    return module


def expected(module: torch.nn.Linear, input: Tensor, activation: str | None = "gelu") -> Tensor:
    return references.linear(input, module.weight, module.bias, activation)


def assert_up_to_date(module: pkg.nn.Linear) -> None:
    input = torch.randn(7, 20, device=module.weight.device, dtype=module.weight.dtype)
    with torch.no_grad():
        torch.testing.assert_close(module(input), expected(module, input))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_inference_agrees_with_the_operator(
    device: torch.device, activation: str | None, bias: bool
) -> None:
    for dtype in FLOATING:
        module = pkg.nn.Linear(40, 70, bias, activation, device, dtype).eval()
        for shape in ((40,), (1, 40), (9, 40), (2, 0, 40), (3, 5, 40)):
            input = torch.randn(shape, device=device, dtype=dtype)
            recorded = module(input)
            assert recorded.requires_grad
            assert module._packed is None or len(shape) > 1
            with torch.no_grad():
                packed = module(input)
            with torch.inference_mode():
                assert torch.equal(module(input), packed)
            assert module._packed is not None
            torch.testing.assert_close(packed, recorded)


def test_parameters_and_state_are_those_of_pytorch(device: torch.device) -> None:
    theirs = torch.nn.Linear(20, 33, device=device)
    ours = layer(device)
    ours.load_state_dict(theirs.state_dict())
    assert_up_to_date(ours)
    assert torch.equal(ours.weight, theirs.weight)
    theirs.load_state_dict(ours.state_dict())
    assert list(ours.state_dict()) == ["weight", "bias"]
    assert [name for name, _ in ours.named_parameters()] == ["weight", "bias"]
    assert repr(ours) == "Linear(in_features=20, out_features=33, bias=True, activation='gelu')"
    assert repr(pkg.nn.Linear(2, 3)) == repr(torch.nn.Linear(2, 3))


def test_from_linear_shares_the_parameters(device: torch.device) -> None:
    for theirs in (torch.nn.Linear(20, 33, device=device), torch.nn.Linear(20, 33, bias=False)):
        for training in (True, False):
            ours = pkg.nn.Linear.from_linear(theirs.train(training), "silu")
            assert ours.weight is theirs.weight
            assert ours.bias is theirs.bias
            assert ours.training == training
            input = torch.randn(4, 20, device=theirs.weight.device)
            with torch.no_grad():
                torch.testing.assert_close(ours(input), expected(theirs, input, "silu"))


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="activation is 'tanh'; supported are"):
        pkg.nn.Linear(2, 3, activation="tanh")


def optimizer_step(module: pkg.nn.Linear) -> None:
    module(torch.randn(4, 20, device=module.weight.device)).sum().backward()
    torch.optim.SGD(module.parameters(), 0.1).step()


def in_place(module: pkg.nn.Linear) -> None:
    with torch.no_grad():
        module.weight[3, 5] += 1


def through_a_view(module: pkg.nn.Linear) -> None:
    view = module.weight.detach()[:4]
    view.mul_(3)


def new_parameter(module: pkg.nn.Linear) -> None:
    module.weight = torch.nn.Parameter(torch.randn_like(module.weight))


def new_data(module: pkg.nn.Linear) -> None:
    module.weight.data = torch.randn_like(module.weight)
    # Twice, so that the memory of the first weight could come back.
    module.weight.data = torch.randn_like(module.weight)


def forgotten(module: pkg.nn.Linear) -> None:
    module.weight.data.mul_(2)
    module.forget_packed_weight()


def trained(module: pkg.nn.Linear) -> None:
    module.train()
    assert module._packed is None
    module.weight.data.mul_(2)
    module.eval()


def other_strides(module: pkg.nn.Linear) -> None:
    module.weight.data = torch.randn(20, 33, device=module.weight.device).mT


@pytest.mark.parametrize(
    "change",
    [
        optimizer_step,
        in_place,
        through_a_view,
        new_parameter,
        new_data,
        forgotten,
        trained,
        other_strides,
    ],
)
def test_a_change_of_the_weight_is_seen(
    device: torch.device, change: Callable[[pkg.nn.Linear], None]
) -> None:
    module = layer(device)
    for _ in range(3):
        change(module)
        assert_up_to_date(module)


def test_is_not_packed_again_without_a_change(device: torch.device) -> None:
    module = layer(device)
    packed = module._packed
    with torch.no_grad():
        module(torch.ones(5, 20, device=device))
        module.bias.add_(1)
    assert_up_to_date(module)
    assert module._packed is packed


def test_the_packed_weight_goes_with_a_move(device: torch.device) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        module = layer(device).to(dtype)
        assert module._packed is None
        assert_up_to_date(module)
    assert layer(device).to("meta")._packed is None


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_the_packed_weight_is_not_copied(device: torch.device, way: str) -> None:
    module = layer(device)
    twin = pickle.loads(pickle.dumps(module)) if way == "pickle" else copy.deepcopy(module)
    assert twin._packed is None
    assert module._packed is not None
    assert_up_to_date(twin)
    with torch.no_grad():
        twin.weight.zero_()
    assert_up_to_date(module)


def test_the_memory_is_given_back(device: torch.device) -> None:
    module = layer(device)
    assert module._packed is not None
    packed = weakref.ref(module._packed.tensor)
    module.forget_packed_weight()
    gc.collect()
    assert packed() is None


def test_training_gives_pytorchs_gradients(device: torch.device) -> None:
    ours = pkg.nn.Linear(20, 33, activation="gelu", device=device, dtype=torch.float64)
    theirs = torch.nn.Linear(20, 33, device=device, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    input = torch.randn(6, 20, device=device, dtype=torch.float64)
    for module, output in ((ours, ours(input)), (theirs, expected(theirs, input))):
        output.square().sum().backward()
        assert module.weight.grad is not None
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
    torch.testing.assert_close(ours.bias.grad, theirs.bias.grad)
    assert ours._packed is None


def test_frozen_weights_pass_gradients_to_the_input(device: torch.device) -> None:
    module = layer(device).requires_grad_(False)
    input = torch.randn(6, 20, device=device, requires_grad=True)
    module(input).sum().backward()
    assert input.grad is not None
    assert not module(input.detach()).requires_grad


def test_a_parametrised_weight_is_never_packed(device: torch.device) -> None:
    class Doubled(torch.nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    module = layer(device)
    parametrize.register_parametrization(module, "weight", Doubled())
    module.forget_packed_weight()
    for _ in range(3):
        with torch.no_grad():
            module.parametrizations.weight.original.mul_(1.5)
        assert_up_to_date(module)
    assert module._packed is None


def test_a_weight_of_inference_mode_is_never_packed(device: torch.device) -> None:
    with torch.inference_mode():
        module = pkg.nn.Linear(20, 33, activation="gelu", device=device).eval()
        for _ in range(3):
            module.weight.mul_(2)
            assert_up_to_date(module)


@pytest.mark.tracing
def test_compile_and_export_use_the_operator(device: torch.device) -> None:
    module = layer(device)
    input = torch.randn(6, 20, device=device)
    with torch.no_grad():
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(input), expected(module, input))
        module.weight.mul_(2)
        torch.testing.assert_close(compiled(input), expected(module, input))
        program = torch.export.export(module, (input,))
        torch.testing.assert_close(program.module()(input), expected(module, input))
    assert any(node.target is torch.ops.pkg.linear.default for node in program.graph.nodes)


def test_autocast_and_transforms_use_the_operator(device: torch.device) -> None:
    module = layer(device)
    input = torch.randn(6, 20, device=device)
    with torch.no_grad():
        with torch.autocast(device.type, torch.bfloat16):
            assert module(input).dtype == torch.bfloat16
        torch.testing.assert_close(torch.func.vmap(module)(input), expected(module, input))
    gradient = torch.func.grad(lambda x: module(x).sum())(input)
    assert gradient.shape == input.shape
    stacked = {name: torch.stack([p, 2 * p]) for name, p in module.named_parameters()}
    outputs = torch.func.vmap(
        lambda parameters: torch.func.functional_call(module, parameters, (input,))
    )(stacked)
    assert outputs.shape == (2, 6, 33)


def test_threads_share_one_module(device: torch.device) -> None:
    module = layer(device)
    input = torch.randn(6, 20, device=device)
    wanted = expected(module, input).detach()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                with torch.no_grad():
                    torch.testing.assert_close(module(input), wanted)
                module.forget_packed_weight()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
