"""pkg.nn.Linear: it is PyTorch's, sees every write of its weight, and packs it when asked to."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable

import pytest
import references
import torch
from samples import FLOATING
from torch import Tensor
from torch.nn.utils import parametrizations, parametrize, prune

import pkg

ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")


def layer(
    device: torch.device, activation: str | None = "gelu", dtype: torch.dtype = torch.float32
) -> pkg.nn.Linear:
    """In evaluation mode, and called once, as whatever would keep something of the weight wants."""
    module = pkg.nn.Linear(20, 33, activation=activation, device=device, dtype=dtype).eval()
    with torch.no_grad():
        module(torch.ones(1, 20, device=device, dtype=dtype))
    return module


def packed_layer(device: torch.device) -> pkg.nn.Linear:
    module = layer(device)
    assert module.pack_weight() is module
    assert module.is_packed
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
            recorded = module.pack_weight()(input)
            assert recorded.requires_grad
            with torch.no_grad():
                packed = module(input)
            with torch.inference_mode():
                assert torch.equal(module(input), packed)
            torch.testing.assert_close(packed, recorded)
            with torch.no_grad():
                torch.testing.assert_close(module.unpack_weight()(input), packed)


def test_a_packed_weight_is_what_inference_multiplies_by(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Tensor] = []

    def packed_linear(input: Tensor, packed_weight: Tensor, *rest: object) -> Tensor:
        used.append(packed_weight)
        return pkg.ops.packed_linear(input, packed_weight, *rest)

    monkeypatch.setattr("pkg.nn.linear.packed_linear", packed_linear)
    module, input = layer(device), torch.randn(5, 20, device=device)
    with torch.no_grad():
        module(input)
        assert not used
        module.pack_weight()(input)
        module.bias.add_(1)
        assert_up_to_date(module)
    assert len(used) == 2
    assert used[0] is used[1]
    module(input)
    assert len(used) == 2  # a gradient is recorded


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


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_from_linear_refuses_a_computed_parameter_in_words(name: str) -> None:
    input = torch.randn(4, 20)
    module = parametrize.register_parametrization(torch.nn.Linear(20, 33), name, Doubled())
    words = rf"Linear\.from_linear: module's {name} is computed by a parametrization .*"
    with pytest.raises(ValueError, match=rf"{words}remove_parametrizations\(module, '{name}', le"):
        pkg.nn.Linear.from_linear(module)
    wanted = module(input)
    parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    torch.testing.assert_close(pkg.nn.Linear.from_linear(module)(input), wanted)

    module = prune.l1_unstructured(torch.nn.Linear(20, 33), name, 0.5)
    words = rf"Linear\.from_linear: module's {name} is no parameter .* a hook computes it; .*"
    with pytest.raises(
        ValueError, match=rf"{words}prune\.remove\(module, '{name}'\).*replace_modu"
    ):
        pkg.nn.Linear.from_linear(module)
    wanted = module(input)
    assert type(pkg.replace_modules(module)) is pkg.nn.Linear
    torch.testing.assert_close(module(input), wanted)
    prune.remove(module, name)
    torch.testing.assert_close(pkg.nn.Linear.from_linear(module)(input), wanted)


def test_from_linear_does_not_compute_what_it_refuses() -> None:
    """Spectral norm changes its state whenever its weight is read in training."""
    module = parametrizations.spectral_norm(torch.nn.Linear(20, 33))
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(ValueError, match="weight is computed by a parametrization"):
        pkg.nn.Linear.from_linear(module)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize(
    "of", [pkg.nn.Linear, pkg.nn.Int4Linear, pkg.nn.RowwiseScaledLinear], ids=lambda of: of.__name__
)
def test_from_linear_refuses_a_lazy_layer_in_words(of: type[pkg.nn.Linear]) -> None:
    lazy = torch.nn.LazyLinear(64)
    words = f"{of.__name__}.from_linear: module is a LazyLinear with parameters that have no shape"
    with pytest.raises(ValueError, match=f"^{words} before the first call; call it with an input"):
        of.from_linear(lazy)
    lazy(torch.ones(1, 128))
    assert of.from_linear(lazy)(torch.ones(2, 128)).shape == (2, 64)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="activation is 'tanh'; supported are"):
        pkg.nn.Linear(2, 3, activation="tanh")


def backward(module: pkg.nn.Linear) -> None:
    module(torch.randn(4, 20, device=module.weight.device)).sum().backward()


def optimizer_step(module: pkg.nn.Linear) -> None:
    backward(module)
    torch.optim.SGD(module.parameters(), 0.1).step()


def fused_sgd(module: pkg.nn.Linear) -> None:
    backward(module)
    torch.optim.SGD(module.parameters(), 0.1, fused=True).step()


def fused_adam(module: pkg.nn.Linear) -> None:
    backward(module)
    torch.optim.Adam(module.parameters(), 0.1, fused=True).step()


def fused_adamw(module: pkg.nn.Linear) -> None:
    backward(module)
    torch.optim.AdamW(module.parameters(), 0.1, fused=True).step()


def fused_adagrad(module: pkg.nn.Linear) -> None:
    if module.weight.device.type != "cpu":
        pytest.skip("PyTorch's fused Adagrad is for the CPU alone")
    backward(module)
    torch.optim.Adagrad(module.parameters(), 0.1, fused=True).step()


def in_place(module: pkg.nn.Linear) -> None:
    with torch.no_grad():
        module.weight[3, 5] += 1


def through_a_view(module: pkg.nn.Linear) -> None:
    view = module.weight.detach()[:4]
    view.mul_(3)


def through_data(module: pkg.nn.Linear) -> None:
    module.weight.data.mul_(2)


def through_numpy(module: pkg.nn.Linear) -> None:
    if module.weight.device.type != "cpu":
        pytest.skip("NumPy knows the CPU alone")
    module.weight.detach().numpy()[2:5] *= 3


def through_dlpack(module: pkg.nn.Linear) -> None:
    torch.from_dlpack(module.weight.detach()).mul_(2)


def new_parameter(module: pkg.nn.Linear) -> None:
    module.weight = torch.nn.Parameter(torch.randn_like(module.weight))


def new_data(module: pkg.nn.Linear) -> None:
    module.weight.data = torch.randn_like(module.weight)
    # Twice, so that the memory of the first weight could come back.
    module.weight.data = torch.randn_like(module.weight)


def other_strides(module: pkg.nn.Linear) -> None:
    module.weight.data = torch.randn(20, 33, device=module.weight.device).mT


SEEN = [optimizer_step, in_place, through_a_view, new_data, other_strides]
UNSEEN = [
    fused_sgd,
    fused_adam,
    fused_adamw,
    fused_adagrad,
    through_data,
    through_numpy,
    through_dlpack,
]


@pytest.mark.parametrize("write", [*SEEN, *UNSEEN, new_parameter])
def test_every_write_of_the_weight_is_seen(
    device: torch.device, write: Callable[[pkg.nn.Linear], None]
) -> None:
    module = layer(device)
    for _ in range(3):
        before = module.weight.detach().clone()
        write(module)
        assert not torch.equal(module.weight, before)
        assert_up_to_date(module)


@pytest.mark.parametrize("write", SEEN)
def test_a_packed_module_raises_where_a_write_is_seen(
    device: torch.device, write: Callable[[pkg.nn.Linear], None]
) -> None:
    module = packed_layer(device)
    for _ in range(3):
        write(module)
        with torch.no_grad(), pytest.raises(RuntimeError, match="weight has been written"):
            module(torch.ones(5, 20, device=device))
        # Where a gradient is recorded, the weight itself is used.
        assert module(torch.ones(5, 20, device=device)).requires_grad
        module.pack_weight()
        assert_up_to_date(module)


def test_a_packed_module_uses_a_parameter_that_is_assigned(device: torch.device) -> None:
    module = packed_layer(device)
    new_parameter(module)
    assert_up_to_date(module)
    parameters = {name: 2 * each.detach() for name, each in module.named_parameters()}
    input = torch.randn(7, 20, device=device)
    with torch.no_grad():
        result = torch.func.functional_call(module.pack_weight(), parameters, input)
        wanted = references.linear(input, parameters["weight"], parameters["bias"], "gelu")
    torch.testing.assert_close(result, wanted)
    assert_up_to_date(module)


def load(module: pkg.nn.Linear, **options: bool) -> None:
    state = {name: 2 * value for name, value in module.state_dict().items()}
    module.load_state_dict(state, **options)


@pytest.mark.parametrize(
    "end",
    [
        pkg.nn.Linear.unpack_weight,
        pkg.nn.Linear.train,
        pkg.nn.Linear.double,
        pkg.nn.Linear.cpu,
        pkg.nn.Linear.share_memory,
        load,
        lambda module: load(module, assign=True),
        lambda module: module.to("meta"),
    ],
)
def test_what_ends_the_packing(
    device: torch.device, end: Callable[[pkg.nn.Linear], object]
) -> None:
    module = packed_layer(device)
    copy_of_it = weakref.ref(module._packed.tensor)
    end(module)
    assert not module.is_packed
    gc.collect()
    assert copy_of_it() is None  # the memory is given back
    if not module.weight.is_meta:
        through_data(module)
        assert_up_to_date(module.eval())


def test_modes_that_keep_the_packing(device: torch.device) -> None:
    module = packed_layer(device)
    assert module.eval().requires_grad_(False).is_packed
    assert_up_to_date(module)


def saved_and_loaded(module: pkg.nn.Linear) -> pkg.nn.Linear:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "twin_of",
    [
        lambda module: pickle.loads(pickle.dumps(module)),
        saved_and_loaded,
        copy.deepcopy,
        copy.copy,
    ],
    ids=["pickle", "torch.save", "deepcopy", "copy"],
)
def test_the_packed_weight_is_not_copied(
    device: torch.device, twin_of: Callable[[pkg.nn.Linear], pkg.nn.Linear]
) -> None:
    module = packed_layer(device)
    size = len(pickle.dumps(layer(device)))
    assert len(pickle.dumps(module)) == size
    twin = twin_of(module)
    assert not twin.is_packed
    assert module.is_packed
    assert_up_to_date(module)
    through_data(twin)
    assert_up_to_date(twin)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (pkg.nn.Linear.train, "in training mode; call eval"),
        (
            lambda module: parametrize.register_parametrization(module, "weight", Doubled()),
            "weight is a Tensor; it must be a plain torch.nn.Parameter",
        ),
        (lambda module: module.to("meta"), "weight is on meta; it must be on the CPU or"),
        (
            lambda module: module.to(torch.complex64),
            "weight is torch.complex64; it must be float16, bfloat16, float32 or float64",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Complex modules")
def test_what_cannot_be_packed_is_refused_in_words(
    change: Callable[[pkg.nn.Linear], object], words: str
) -> None:
    module = layer(torch.device("cpu"))
    change(module)
    with pytest.raises(RuntimeError, match=rf"Linear\.pack_weight: .*{words}"):
        module.pack_weight()
    assert not module.is_packed
    if not module.training:
        model = torch.nn.Sequential(module, torch.nn.ReLU(), layer(torch.device("cpu"))).eval()
        with pytest.warns(UserWarning, match=f"not packed: 0: .*{words}"):
            pkg.pack_weights_(model)
        assert [each.is_packed for each in (model[0], model[2])] == [False, True]


def test_a_model_is_packed(device: torch.device) -> None:
    shared = layer(device)
    parts = [torch.nn.ModuleList([layer(device), shared]), shared, torch.nn.Linear(3, 3)]
    model = torch.nn.ModuleList(parts).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pkg.pack_weights_(model) is model
        single = layer(device)
        assert pkg.pack_weights_(single) is single
    assert single.is_packed
    assert parts[0][0].is_packed
    assert shared.is_packed
    assert_up_to_date(shared)
    model.train().eval()
    assert not parts[0][0].is_packed
    assert not shared.is_packed


def test_a_model_that_cannot_be_packed_is_refused_in_words() -> None:
    with pytest.raises(RuntimeError, match="pack_weights_: the model is in training mode"):
        pkg.pack_weights_(torch.nn.Sequential(pkg.nn.Linear(2, 3)))
    with pytest.warns(UserWarning, match=r"nothing was packed: the model has no pkg\.nn\.Linear"):
        pkg.pack_weights_(torch.nn.Linear(2, 3).eval())
    with pytest.raises(TypeError, match=r"model is None; it must be a torch\.nn\.Module"):
        pkg.pack_weights_(None)


def test_what_is_no_tensor_or_module_is_refused_in_words(device: torch.device) -> None:
    for module in (layer(device), packed_layer(device), layer(device).train()):
        with pytest.raises(TypeError, match="Linear: input is None; it must be a tensor"):
            module(None)
    with pytest.raises(TypeError, match=r"module is None; it must be a torch\.nn\.Linear"):
        pkg.nn.Linear.from_linear(None)
    with pytest.raises(TypeError, match="module is of type ReLU; it must be"):
        pkg.nn.Linear.from_linear(torch.nn.ReLU())


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


def test_frozen_weights_pass_gradients_to_the_input(device: torch.device) -> None:
    module = packed_layer(device).requires_grad_(False)
    input = torch.randn(6, 20, device=device, requires_grad=True)
    module(input).sum().backward()
    assert input.grad is not None
    assert not module(input.detach()).requires_grad


class Doubled(torch.nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_a_weight_that_is_parametrised_later_is_used(device: torch.device) -> None:
    module = packed_layer(device)
    parametrize.register_parametrization(module, "weight", Doubled())
    for _ in range(3):
        with torch.no_grad():
            module.parametrizations.weight.original.mul_(1.5)
        assert_up_to_date(module)


def test_a_weight_of_inference_mode(device: torch.device) -> None:
    with torch.inference_mode():
        module = pkg.nn.Linear(20, 33, activation="gelu", device=device).eval()
        for _ in range(3):
            module.weight.mul_(2)
            assert_up_to_date(module)
        assert_up_to_date(module.pack_weight())
    with torch.no_grad():
        assert_up_to_date(module)


def test_a_weight_that_is_packed_in_inference_mode(device: torch.device) -> None:
    module = layer(device)
    with torch.inference_mode():
        module.pack_weight()
        assert_up_to_date(module)
    assert_up_to_date(module)
    with torch.inference_mode():
        module.weight.mul_(2)
        with pytest.raises(RuntimeError, match="weight has been written"):
            module(torch.ones(5, 20, device=device))


@pytest.mark.tracing
def test_compile_and_export_use_the_operator(device: torch.device) -> None:
    module = packed_layer(device)
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
    module = packed_layer(device)
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
    module = packed_layer(device)
    input = torch.randn(6, 20, device=device)
    wanted = expected(module, input).detach()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                with torch.no_grad():
                    torch.testing.assert_close(module(input), wanted)
                module.unpack_weight().pack_weight()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
