"""pkg.replace_modules and pkg.restore_modules: ours in, ours out, and nothing else is touched."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize
from torch.testing._internal.two_tensor import TwoTensor

import pkg


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 16)
        self.attention = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        self.first = torch.nn.Linear(16, 24)
        self.again = self.first
        self.second = torch.nn.Linear(24, 16).eval()
        self.ours = pkg.nn.Linear(16, 16, activation="relu")
        self.head = torch.nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.ours(self.second(self.again(x).relu())))


def test_in_and_out_again() -> None:
    model = Tied()
    tokens = torch.randint(11, (2, 5))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    modules, parameters = list(model.modules()), list(model.parameters())
    types, attributes = [type(each) for each in modules], [set(vars(each)) for each in modules]
    seen: list[str] = []
    model.first.register_forward_hook(lambda *_: seen.append("hook"))
    expected = model(tokens)
    (before,) = torch.autograd.grad(expected.sum(), model.embedding.weight)

    assert pkg.replace_modules(model) is model
    assert type(model.attention) is pkg.nn.MultiheadAttention
    assert type(model.first) is type(model.head) is pkg.nn.Linear
    assert model.again is model.first
    assert model.head.weight is model.embedding.weight
    assert not model.second.training
    assert model.training
    assert model.ours.activation == "relu"
    assert list(model.modules()) == modules
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(state)
    torch.testing.assert_close(model(tokens), expected)
    (after,) = torch.autograd.grad(model(tokens).sum(), model.embedding.weight)
    torch.testing.assert_close(after, before)
    assert seen == ["hook"] * 3
    model.load_state_dict(state)
    pkg.replace_modules(model)
    model.first._forward_hooks.clear()
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(each(tokens), expected)
        assert type(pkg.restore_modules(each).first) is torch.nn.Linear

    model.first.eval().pack_weight()
    assert pkg.restore_modules(model) is model
    assert [type(each) for each in modules] == types
    for each, names in zip(modules, attributes, strict=True):
        assert set(vars(each)) == names or each is model.ours
    assert torch.equal(model(tokens), expected)


def test_one_module() -> None:
    layer = torch.nn.Linear(3, 2)
    assert pkg.replace_modules(layer) is layer
    assert repr(layer) == "Linear(in_features=3, out_features=2, bias=True)"
    assert type(layer) is pkg.nn.Linear
    assert type(pkg.restore_modules(layer)) is torch.nn.Linear


def test_what_else_a_module_may_be_stays() -> None:
    class Other(torch.nn.Linear):
        pass

    parametrised = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3))
    attention = torch.nn.MultiheadAttention(4, 2)
    model = torch.nn.Sequential(Other(3, 3), parametrised, attention)
    types = [type(each) for each in (model[0], model[1], attention.out_proj)]
    pkg.replace_modules(model)
    assert [type(each) for each in (model[0], model[1], attention.out_proj)] == types
    assert parametrize.is_parametrized(model[1])
    with pytest.raises(TypeError, match="replace_modules: model is of type int"):
        pkg.replace_modules(3)
    with pytest.raises(TypeError, match="restore_modules: model is None"):
        pkg.restore_modules(None)


def test_what_ours_cannot_compute_stays() -> None:
    model = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(5))
    model[0].to(torch.complex64)
    model[1].weight = torch.nn.Parameter(model[1].weight.detach().to_sparse_csr())
    model[2].weight = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.int64), requires_grad=False)
    model[3].activation = "the user's"
    model[4]._packed = 5
    pkg.replace_modules(model)
    assert {type(each) for each in model} == {torch.nn.Linear}
    pkg.restore_modules(model)
    assert (model[3].activation, model[4]._packed) == ("the user's", 5)


def test_what_was_given_an_activation_since_stays_until_that_is_taken() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3))
    pkg.replace_modules(model)
    model[0].activation = "relu"
    with pytest.warns(UserWarning, match="not restored: 0: it applies 'relu' since"):
        pkg.restore_modules(model)
    assert type(model[0]) is pkg.nn.Linear
    model[0].activation = None
    assert type(pkg.restore_modules(model)[0]) is torch.nn.Linear


def test_what_was_parametrised_since_stays_until_that_is_undone() -> None:
    def changed(model: Tied) -> list[tuple[torch.nn.Module, str]]:
        parametrizations.weight_norm(model.second)
        parametrizations.orthogonal(model.first)
        parametrizations.spectral_norm(model.attention, "in_proj_weight")
        parametrizations.weight_norm(model.ours)
        names = {"first": "weight", "second": "weight", "attention": "in_proj_weight"}
        return [(getattr(model, name), weight) for name, weight in names.items()]

    model, tokens = Tied().eval(), torch.randint(11, (2, 5))
    parts = changed(pkg.replace_modules(model))
    types = [type(module) for module, _ in parts]
    expected = model(tokens)
    with pytest.warns(UserWarning, match="not restored: attention: .* its in_proj_weight") as seen:
        assert pkg.restore_modules(model) is model
    assert len(seen) == 1
    assert seen[0].filename == __file__
    text = str(seen[0].message)
    assert "; first: replace_modules made it ours, and then it became a ParametrizedLinear" in text
    assert "; second: " in text
    assert "ours: " not in text
    assert [type(module) for module, _ in parts] == types
    assert type(model.head) is torch.nn.Linear
    torch.testing.assert_close(model(tokens), expected)
    for module, weight in parts:
        parametrize.remove_parametrizations(module, weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pkg.restore_modules(model)
    assert type(model.first) is type(model.second) is torch.nn.Linear
    assert type(model.attention) is torch.nn.MultiheadAttention
    torch.testing.assert_close(model(tokens), expected)


def test_what_became_another_class_since_stays() -> None:
    """As fully_shard makes it, whose class it would lose silently."""

    class Sharded(pkg.nn.Linear):
        pass

    layer = pkg.replace_modules(torch.nn.Linear(3, 2))
    layer.__class__ = Sharded
    with pytest.warns(UserWarning, match="not restored: the model: .* a Sharded; undo that"):
        pkg.restore_modules(layer)
    assert type(layer) is Sharded
    assert layer(torch.ones(1, 3)).shape == (1, 2)
    for undone in (pkg.nn.Linear, torch.nn.Linear):
        pkg.replace_modules(layer)
        layer.__class__ = undone
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert type(pkg.restore_modules(layer)) is torch.nn.Linear
        assert "_pkg_replaces" not in vars(layer)


class Scored(torch.nn.Module):
    """Calls each kind of layer that has a node of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        self.first = torch.nn.Linear(32, 32)
        self.second = torch.nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended, _ = self.attention(x, x, x, need_weights=False)
        return self.second(self.first(attended).relu())


def test_fx_makes_a_node_of_each_call() -> None:
    original = Scored().eval()
    input = torch.randn(2, 5, 32)
    names = ["attention", "first", "second"]
    for change in ("replaced", "packed", "quantised", "in integers"):
        model = pkg.replace_modules(copy.deepcopy(original))
        if change == "packed":
            pkg.pack_weights_(model)
        elif change == "quantised":
            pkg.quantize_(model, 32, lambda _, name: name in names[1:])
        elif change == "in integers":
            model.first = pkg.nn.RowwiseScaledLinear.from_linear(model.first)
        traced = torch.fx.symbolic_trace(model)
        nodes = [node.target for node in traced.graph.nodes if node.op == "call_module"]
        assert nodes == names, change
        with torch.no_grad():
            assert torch.equal(traced(input), model(input)), change


class Correlated(torch.nn.Module):
    """Calls the modules that take the place of none of PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("image", torch.randn(2, 3, 6, 8))
        self.sampler = pkg.nn.SpatialCorrelationSampler(patch_size=3)
        self.flattened = pkg.nn.FlattenedCorrelation(patch_size=3)
        self.unit = pkg.nn.LLTM(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums = self.sampler(self.image, x).flatten(1, 2)
        means = self.flattened(x, input2=self.image)
        image = (sums + means).mean((1, 2))
        state = (image, torch.zeros(2, 8))
        new_h, new_cell = self.unit(image, state)
        hidden, (last_h, last_cell) = self.unit(torch.ones(3, 2, 8), (new_h, new_cell))
        return self.unit(hidden, torch.stack((last_h, last_cell)))[0]


def test_fx_makes_nodes_of_correlations_and_recurrent_units() -> None:
    model, input = Correlated(), torch.randn(2, 3, 6, 8)
    traced = torch.fx.symbolic_trace(model)
    nodes = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert nodes == ["sampler", "flattened", "unit", "unit", "unit"]
    for each in (input, torch.randn(2, 3, 6, 8)):
        assert torch.equal(traced(each), model(each))


def test_fx_makes_a_node_where_the_query_alone_is_no_proxy() -> None:
    class Queried(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("query", torch.randn(2, 5, 32))
            self.attention = pkg.nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(self.query, x, x)[0]

    model, input = Queried(), torch.randn(2, 7, 32)
    assert torch.equal(torch.fx.symbolic_trace(model)(input), model(input))


def test_fx_does_not_trace_into_a_layer() -> None:
    linear = (pkg.nn.Linear(32, 8), pkg.nn.Int4Linear(32, 8, group_size=32))
    for layer in (*linear, pkg.nn.FlattenedCorrelation(), pkg.nn.LLTM(3, 2)):
        with pytest.raises(TypeError, match="which is a leaf, as those of torch"):
            torch.fx.symbolic_trace(layer)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_a_restored_model_is_scripted() -> None:
    """The way back, since torch.jit.script does not compile our modules."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    input = torch.randn(2, 4)
    expected = pkg.replace_modules(model)(input)
    scripted = torch.jit.script(pkg.restore_modules(model))
    torch.testing.assert_close(scripted(input), expected)


class KeptOtherwise(TwoTensor):
    """A weight whose values a subclass keeps in its own way, as torchao's quantised ones."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "pkg":
            raise NotImplementedError(f"KeptOtherwise has no {func}")
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_weights_that_a_subclass_keeps_in_its_own_way() -> None:
    def model(kind: type[torch.nn.Linear]) -> torch.nn.Sequential:
        layers = torch.nn.Sequential(kind(32, 32), kind(32, 32))
        weight = layers[0].weight.detach()
        layers[0].weight = torch.nn.Parameter(KeptOtherwise(weight, weight.clone()), False)
        return layers.eval()

    input = torch.randn(2, 32)
    replaced = pkg.replace_modules(model(torch.nn.Linear))
    assert [type(each) for each in replaced] == [torch.nn.Linear, pkg.nn.Linear]
    with pytest.warns(UserWarning, match="its weight is a KeptOtherwise"):
        quantised = pkg.quantize_(model(torch.nn.Linear), group_size=32)
    assert [type(each) for each in quantised] == [torch.nn.Linear, pkg.nn.Int4Linear]
    own = model(pkg.nn.Linear)
    own[0].activation = "relu"
    expected = torch.nn.functional.linear(input, own[0].weight.a, own[0].bias).relu()
    torch.testing.assert_close(own[0](input).a, expected)
