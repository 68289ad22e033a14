"""pkg.nn.Int4Linear and pkg.quantize_: what they compute, keep, save and refuse."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import references
import torch
from quantised_samples import GROUP_SIZES, error_bound, terms
from samples import FLOATING
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils import prune

import pkg


def quantised(
    inputs: int = 256, outputs: int = 24, group_size: int = 32, bias: bool = True
) -> tuple[nn.Linear, pkg.nn.Int4Linear]:
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias)
    return linear, pkg.nn.Int4Linear.from_linear(linear, group_size)


def weight_of(layer: pkg.nn.Int4Linear) -> Tensor:
    """The weight in float64."""
    pairs = layer.scales_and_zeros.cpu().double()
    packed = layer.packed_weight.cpu()
    return references.dequantized(packed, pairs, layer.group_size, layer.inner_k_tiles)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_rounds_to_nearest(group_size: int, bias: bool) -> None:
    """No value is further away than half a step, and what rounding scale and zero costs.

    A step is the 15th part of a group's range. The scale is rounded to bfloat16, which counts up
    to 8 times, and so is the zero, which is no larger than the group's largest magnitude.
    """
    linear, layer = quantised(512, 40, group_size, bias)
    groups = linear.weight.detach().double().unflatten(-1, (-1, group_size))
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    roundoff = torch.finfo(torch.bfloat16).eps / 2
    bound = step * (0.5 + 8 * roundoff) + roundoff * (groups.abs().amax(-1) + step)
    error = (weight_of(layer).unflatten(-1, (-1, group_size)) - groups).abs().amax(-1)
    assert (error <= 1.001 * bound).all()
    assert (layer.bias is None) != bias
    assert not bias or layer.bias is linear.bias
    values = pkg.ops.unpack_tensor_core_tiled_layout(layer.packed_weight, layer.inner_k_tiles)
    assert values.min() == 0
    assert values.max() == 15


def test_is_exact_where_it_can_be() -> None:
    linear = nn.Linear(64, 8, bias=False)
    with torch.no_grad():
        linear.weight.copy_((torch.arange(8 * 64).view(8, 64) % 16 - 8) * 0.25)
        linear.weight[3] = 0.7109375  # a constant row, exact in bfloat16
    assert torch.equal(weight_of(pkg.nn.Int4Linear.from_linear(linear, 32)), linear.weight.double())


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("inputs", [32, 64, 96, 128, 320, 512])
def test_forward_is_that_of_the_weight(
    device: torch.device, dtype: torch.dtype, inputs: int
) -> None:
    layer = quantised(inputs)[1].to(device)
    for shape in ((inputs,), (1, inputs), (2, 9, inputs), (0, inputs)):
        input = torch.randn(shape, dtype=torch.float64).to(dtype)
        result = layer(input.to(device))
        assert result.dtype == dtype
        weight, bias = weight_of(layer), layer.bias.detach().cpu().to(dtype)
        exact = input.double() @ weight.mT + bias.double()
        largest = terms(layer.scales_and_zeros.cpu(), layer.group_size)
        bound = error_bound(input, weight, largest, bias, exact)
        assert ((result.double().cpu() - exact).abs() <= bound).all()


def test_gradients_flow_to_input_and_bias(device: torch.device) -> None:
    layer = quantised()[1].to(device)
    input = torch.randn(5, 256, device=device, requires_grad=True)
    layer(input).sum().backward()
    expected = weight_of(layer).sum(0).expand(5, 256).float()
    torch.testing.assert_close(input.grad.cpu(), expected)
    assert torch.equal(layer.bias.grad.cpu(), torch.full((24,), 5.0))


def test_autocast_converts_the_input(device: torch.device) -> None:
    layer = quantised()[1].to(device)
    input = torch.randn(5, 256, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        result = layer(input)
        assert layer(input.double()).dtype == torch.float64
    assert torch.equal(result, layer(input.bfloat16()))


def test_what_is_saved_is_loaded(device: torch.device) -> None:
    layer = quantised()[1].to(device)
    assert list(layer.state_dict()) == ["bias", "packed_weight", "scales_and_zeros"]
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    new = pkg.nn.Int4Linear(256, 24, group_size=32)
    new.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    input = torch.randn(3, 256)
    expected = layer.cpu()(input)
    for each in (new, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(each(input), expected)


def test_a_move_to_another_dtype_is_the_bias_alone() -> None:
    _, layer = quantised()
    before = weight_of(layer)
    for dtype in (torch.float16, torch.float64, torch.bfloat16):
        layer.to(dtype)
        assert layer.bias.dtype == dtype
        assert layer.scales_and_zeros.dtype == torch.bfloat16
        assert torch.equal(weight_of(layer), before)
    layer.to("meta")
    assert {each.device.type for each in (*layer.buffers(), *layer.parameters())} == {"meta"}


def test_takes_half_a_byte_a_value() -> None:
    layer = quantised(1024, 512, 128, bias=False)[1]
    assert sum(each.nbytes for each in layer.buffers()) == 1024 * 512 // 2 + 1024 * 512 // 128 * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((256, 24, True, 48), "group_size is 48; it must be 32, 64, 128 or 256"),
        ((256, 24, True, 0), "group_size is 0"),
        ((250, 24, True, 32), "in_features is 250, not a multiple of group_size 32"),
        ((256, 20, True, 32), "out_features is 20, not a multiple of 8"),
    ],
)
def test_wrong_sizes_are_refused(arguments: tuple[int, int, bool, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pkg.nn.Int4Linear(*arguments)
    linear = nn.Linear(*arguments[:2])
    with pytest.raises(ValueError, match=words):
        pkg.nn.Int4Linear.from_linear(linear, arguments[3])


def test_a_weight_that_is_no_number_is_refused() -> None:
    linear = nn.Linear(32, 8)
    with torch.no_grad():
        linear.weight[2, 3] = torch.nan
    with pytest.raises(ValueError, match="infinite or NaN"):
        pkg.nn.Int4Linear.from_linear(linear, 32)
    with pytest.raises(ValueError, match="is not a matrix"):
        pkg.nn.Int4Linear.from_linear(nn.LayerNorm(32), 32)


@pytest.mark.parametrize(
    ("dtype", "values"), [(torch.float64, [1e300]), (torch.float32, [3e38, -3e38])]
)
def test_a_weight_that_float32_does_not_span_is_left(
    dtype: torch.dtype, values: list[float]
) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(dtype)
    with torch.no_grad():
        model[0].weight[0, : len(values)] = torch.tensor(values, dtype=dtype)
    with pytest.warns(UserWarning, match=r"0: its weight has values .* above 2\*\*126"):
        model = pkg.quantize_(model, 64)
    assert type(model[0]) is nn.Linear
    assert type(model[1]) is pkg.nn.Int4Linear


class Tied(nn.Module):
    """An embedding that is the output's weight too, a shared layer, and sizes that do not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 64)
        self.first = nn.Linear(64, 64)
        self.again = self.first
        self.odd = nn.Linear(64, 30)
        self.narrow = nn.Linear(30, 64)
        self.output = nn.Linear(64, 40, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.again(self.first(self.embedding(tokens)))
        return self.output(self.narrow(self.odd(hidden)))


def test_a_model_is_quantised_in_place_and_says_what_was_not() -> None:
    torch.manual_seed(0)
    model = Tied()
    original = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="not quantised") as caught:
        assert pkg.quantize_(model, group_size=32) is model
    (warning,) = caught
    assert "odd: out_features is 30, not a multiple of 8" in str(warning.message)
    assert "narrow: in_features is 30, not a multiple of group_size 32" in str(warning.message)
    assert "output: its weight is another module's too" in str(warning.message)
    assert warning.filename == __file__
    assert isinstance(model.first, pkg.nn.Int4Linear)
    assert model.again is model.first
    assert type(model.odd) is nn.Linear
    assert model.output.weight is model.embedding.weight
    with torch.no_grad():
        original.first.weight.copy_(weight_of(model.first))
        tokens = torch.arange(40)
        torch.testing.assert_close(model(tokens), original(tokens))


def test_the_filter_decides() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Bilinear(32, 32, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pkg.quantize_(model, 64, filter=lambda module, name: name == "1")
    assert [type(each) for each in model] == [nn.Linear, pkg.nn.Int4Linear, nn.Bilinear]
    with pytest.warns(UserWarning, match="2: it has no weight that is a floating matrix"):
        pkg.quantize_(model, 64, filter=lambda module, name: name == "2")


def test_a_layer_alone_is_returned() -> None:
    linear = nn.Linear(64, 64)
    assert isinstance(pkg.quantize_(linear, 64), pkg.nn.Int4Linear)


def test_a_wrong_group_size_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(ValueError, match="group_size is 100"):
        pkg.quantize_(model, 100)
    assert type(model[0]) is nn.Linear


def test_a_quantised_model_is_saved_and_loaded(device: torch.device) -> None:
    def model() -> nn.Module:
        layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        return pkg.quantize_(layers, 64).to(device)

    first, second = model(), model()
    input = torch.randn(3, 64, device=device)
    assert not torch.equal(first(input), second(input))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(input), second(input))


@pytest.mark.tracing
def test_a_quantised_model_compiles_and_exports() -> None:
    layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).eval()
    model = pkg.quantize_(layers, 64)
    input = torch.randn(9, 64)
    with torch.no_grad():
        expected = model(input)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(input), expected)
        exported = torch.export.export(model, (input,)).module()
        torch.testing.assert_close(exported(input), expected)


def test_a_layer_on_the_meta_device(device: torch.device) -> None:
    layer = quantised()[1].to(device)
    with torch.device("meta"):
        empty = pkg.nn.Int4Linear(256, 24, group_size=32)
    inputs = torch.randn(2, 3, 256, device="meta", dtype=torch.bfloat16)
    for module in (empty, copy.deepcopy(layer).to("meta"), quantised_on_meta(layer.bias)):
        for _ in range(2):
            result = module(inputs)
            assert result.shape == (2, 3, 24)
            assert result.is_meta
            assert result.dtype == torch.bfloat16
            module.half()
        assert module.scales_and_zeros.dtype == torch.bfloat16
    input = torch.randn(5, 256, device=device)
    filled = empty.float().to_empty(device=device)
    filled.load_state_dict(layer.state_dict())
    assert torch.equal(filled(input), layer(input))
    assigned = quantised_on_meta(layer.bias)
    assigned.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(assigned(input), layer(input))
    with pytest.raises(RuntimeError, match="int4_linear: the tensors are on cpu, meta"):
        pkg.nn.Int4Linear(256, 24, group_size=32, device="meta")(torch.ones(256))


def quantised_on_meta(bias: Tensor) -> pkg.nn.Int4Linear:
    module = pkg.nn.Int4Linear.from_linear(nn.Linear(256, 24, device="meta"), 32)
    assert {each.device.type for each in module.state_dict().values()} == {"meta"}
    assert module.bias.shape == bias.shape
    return module


def test_a_model_on_the_meta_device_loads_what_was_saved(device: torch.device) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    model = pkg.quantize_(make().to(device), group_size=32)
    with torch.device("meta"):
        new = pkg.quantize_(make(), group_size=32)
    input = torch.randn(2, 64, device=device)
    assert new(input.to("meta")).shape == (2, 64)
    new.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(new(input), model(input))


def test_fake_tensors() -> None:
    with FakeTensorMode():
        linear = nn.Linear(64, 128)
        for layer in (
            pkg.nn.Int4Linear(64, 128, group_size=32),
            pkg.quantize_(nn.Sequential(linear), group_size=32)[0],
        ):
            result = layer(torch.ones(3, 64, dtype=torch.float16))
            assert isinstance(result, FakeTensor)
            assert result.shape == (3, 128)
            assert result.dtype == torch.float16


def test_what_is_no_tensor_or_module_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match="Int4Linear: input is None; it must be a floating tensor"):
        quantised()[1](None)
    with pytest.raises(TypeError, match=r"module is None; it must be a torch\.nn\.Module"):
        pkg.nn.Int4Linear.from_linear(None)
    with pytest.raises(
        TypeError, match=r"quantize_: model is None; it must be a torch\.nn\.Module"
    ):
        pkg.quantize_(None)
    with pytest.raises(ValueError, match="is not a matrix"):
        pkg.nn.Int4Linear.from_linear(nn.ReLU())


def with_activation(activation: str = "relu") -> pkg.nn.Linear:
    torch.manual_seed(0)
    return pkg.nn.Linear(64, 64, activation=activation)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Renamed(nn.Linear):
    """A subclass that computes what its base class does."""


def test_what_computes_more_than_a_linear_layer_stays() -> None:
    patched = nn.Linear(64, 64)
    patched.forward = lambda input: -nn.Linear.forward(patched, input)
    layers = (with_activation(), Doubled(64, 64), patched, Renamed(64, 64), pkg.nn.Linear(64, 64))
    model = nn.Sequential(*layers)
    with pytest.warns(UserWarning, match="not quantised") as caught:
        pkg.quantize_(model, 32)
    (warning,) = caught
    assert str(warning.message) == (
        "not quantised: 0: it applies 'relu', which Int4Linear does not; "
        "1: Doubled has a forward of its own; 2: its forward was replaced"
    )
    assert list(model[:3]) == list(layers[:3])
    assert [type(each) for each in model[3:]] == [pkg.nn.Int4Linear] * 2


def test_a_filter_takes_subclasses_but_no_activation() -> None:
    model = nn.Sequential(with_activation(), Doubled(64, 64))
    with pytest.warns(UserWarning, match="^not quantised: 0: it applies 'relu'[^;]*$"):
        pkg.quantize_(model, 32, filter=lambda module, name: isinstance(module, nn.Linear))
    assert [type(each) for each in model] == [pkg.nn.Linear, pkg.nn.Int4Linear]


def test_from_linear_keeps_or_refuses_an_activation() -> None:
    layer = with_activation()
    input = torch.randn(3, 64)
    for activation in (None, "relu"):
        new = pkg.nn.Linear.from_linear(layer, activation)
        assert torch.equal(new(input), layer(input))
    with pytest.raises(ValueError, match="activation is 'gelu', and module applies 'relu' already"):
        pkg.nn.Linear.from_linear(layer, "gelu")
    for new_class in (pkg.nn.Int4Linear, pkg.nn.RowwiseScaledLinear):
        with pytest.raises(ValueError, match="from_linear: module applies 'relu', which the new"):
            new_class.from_linear(layer)


def test_a_quantised_layer_is_not_quantised_again() -> None:
    layer = quantised()[1]
    with pytest.raises(ValueError, match=r"weight is torch\.int8; it must be floating"):
        pkg.nn.Int4Linear.from_linear(layer, 32)


def test_a_lazy_layer_stays() -> None:
    with pytest.warns(UserWarning, match="0: its weight has no shape before the first call"):
        pkg.quantize_(nn.Sequential(nn.LazyLinear(64)), 32)


def test_weight_is_the_packed_bytes() -> None:
    layer = quantised()[1]
    weight = layer.weight
    assert (weight.dtype, weight.shape) == (torch.int8, (24, 128))
    assert weight.data_ptr() == layer.packed_weight.data_ptr()
    assert "weight" not in layer.state_dict()
    for each in (torch.zeros(24, 128), nn.Parameter(torch.zeros(24, 128))):
        with pytest.raises((AttributeError, KeyError)):
            layer.weight = each
    assert copy.deepcopy(layer).to("meta").weight.is_meta


@pytest.mark.tracing
def test_weight_is_read_in_a_graph() -> None:
    layer = quantised()[1]

    def call(input: Tensor) -> Tensor:
        return layer(input if layer.weight.dtype == torch.int8 else input.double())

    input = torch.randn(3, 256)
    with torch.no_grad():
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(input), layer(input))


@pytest.mark.parametrize("ours", [False, True])
def test_attention_keeps_its_projection(ours: bool) -> None:
    attention = nn.MultiheadAttention(64, 4, batch_first=True).eval()
    model = nn.ModuleDict({"attention": attention, "output": nn.Linear(64, 64)})
    if ours:
        pkg.replace_modules(model)
    input = torch.randn(2, 9, 64)
    expected = attention(input, input, input)[0]
    with pytest.warns(UserWarning, match="quantised") as caught:
        pkg.quantize_(model, 32)
    words = [str(each.message) for each in caught]
    assert "attention.out_proj: torch.nn.MultiheadAttention reads its weight" in words[0]
    assert "attention.in_proj_weight (192, 64)" in words[1]
    assert isinstance(model["output"], pkg.nn.Int4Linear)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            torch.testing.assert_close(attention(input, input, input)[0], expected)


@pytest.mark.filterwarnings("ignore:not quantised", "ignore:not all was quantised")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_computes_with_quantised_layers(padded: bool) -> None:
    """Also in inference, where PyTorch would go its fused way."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    original = copy.deepcopy(model)
    pkg.quantize_(model, 32)
    for new, old in zip(model.layers, original.layers, strict=True):
        for name in ("linear1", "linear2"):
            assert isinstance(getattr(new, name), pkg.nn.Int4Linear)
            getattr(old, name).weight.data.copy_(weight_of(getattr(new, name)))
    input = torch.randn(2, 9, 64)
    padding = torch.arange(9) >= torch.tensor([[9], [5]]) if padded else None
    seen = slice(None) if padding is None else ~padding
    expected = original(input, src_key_padding_mask=padding)[seen]
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            output = model(input, src_key_padding_mask=padding)
        torch.testing.assert_close(output[seen], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_t5_which_asks_for_the_dtype_of_weights(dtype: torch.dtype, gated: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=64,
        d_model=64,
        d_kv=32,
        d_ff=128,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu" if gated else "relu",
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    original = copy.deepcopy(model)
    pkg.quantize_(model, 32, filter=lambda module, name: name != "lm_head" and is_linear(module))
    new = dict(model.named_modules())
    for name, module in original.named_modules():
        if isinstance(new[name], pkg.nn.Int4Linear):
            module.weight.data.copy_(weight_of(new[name]))
    model.to(dtype)
    original.to(dtype)
    assert isinstance(model.encoder.block[0].layer[1].DenseReluDense.wo, pkg.nn.Int4Linear)
    tokens = torch.randint(2, 64, (2, 9))
    with torch.no_grad():
        logits = model(input_ids=tokens, labels=tokens).logits
        expected = original(input_ids=tokens, labels=tokens).logits
    assert logits.dtype == dtype
    error = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(logits, expected, atol=error, rtol=error)


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear


class Experts(nn.Module):
    """Weights of three dimensions, and a matrix that is no linear layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 64, 64))
        self.down = nn.Parameter(torch.randn(64, 64))


def test_what_stays_floating_is_said() -> None:
    experts = Experts()
    words = r"20,480 of 24,576 elements \(83%, embeddings not counted\) stay floating in "
    words += r"2 parameters .*: 1\.up \(4, 64, 64\), 1\.down \(64, 64\)$"
    model = nn.Sequential(nn.Embedding(1000, 64), experts, nn.Linear(64, 64))
    with pytest.warns(UserWarning, match=words) as caught:
        pkg.quantize_(model, 32)
    (warning,) = caught
    assert str(warning.message).startswith("not all was quantised")
    assert warning.filename == __file__
    with pytest.warns(UserWarning, match="^nothing was quantised: 20,480 of 20,480 elements"):
        pkg.quantize_(nn.Sequential(Experts()), 32)
    with pytest.warns(
        UserWarning, match=r"^nothing was quantised: the model has no torch\.nn\.Lin"
    ):
        pkg.quantize_(nn.Sequential(nn.Embedding(9, 64)), 32)
    model = pkg.quantize_(nn.Sequential(nn.Linear(64, 64), nn.GELU()), 32)
    with pytest.warns(UserWarning, match="^nothing was .* layers are Int4Linear already$"):
        pkg.quantize_(model, 32)
    with pytest.warns(UserWarning, match="^nothing was quantised: filter takes no module"):
        pkg.quantize_(nn.Linear(64, 64), 32, filter=lambda module, name: False)


def test_little_that_stays_floating_is_not_said() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Conv1d(16, 16, 3), nn.LayerNorm(512))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pkg.quantize_(model, 32)


def test_hooks_go_with_the_layer() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    seen = []
    handles = [
        model[0].register_forward_pre_hook(lambda *_: seen.append("before")),
        model[0].register_forward_hook(
            lambda module, *_, **__: seen.append(module), with_kwargs=True
        ),
        model[0].register_full_backward_hook(lambda *_: seen.append("backward")),
    ]
    pkg.quantize_(model, 32)
    assert isinstance(model[0], pkg.nn.Int4Linear)
    model(torch.randn(3, 64, requires_grad=True)).sum().backward()
    assert seen == ["before", model[0], "backward"]
    for handle in handles:
        handle.remove()
    model(torch.randn(3, 64))
    assert len(seen) == 3


def test_layers_with_hooks_that_cannot_go_along_stay() -> None:
    state, pruned = nn.Linear(64, 64), nn.Linear(64, 64)
    state.register_state_dict_post_hook(lambda *_: None)
    prune.random_unstructured(pruned, "weight", 0.5)
    parametrised = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
    model = nn.Sequential(state, pruned, parametrised)
    with pytest.warns(UserWarning, match="not quantised") as caught:
        pkg.quantize_(model, 32)
    assert [str(each.message) for each in caught] == [
        "not quantised: 0: it has hooks on its state_dict; 1: a hook computes its weight"
    ]
    assert isinstance(model[2], pkg.nn.Int4Linear)


def test_layers_whose_state_would_be_lost_stay() -> None:
    pruned, adapted, scaled = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
    prune.random_unstructured(pruned, "bias", 0.5)
    adapted.low_rank = nn.Linear(64, 64, bias=False)
    adapted.register_forward_hook(lambda module, inputs, out: out + module.low_rank(inputs[0]))
    scaled.gain = nn.Parameter(torch.ones(1))
    model = nn.Sequential(pruned, adapted, scaled, nn.Linear(64, 64))
    before = {*model.state_dict()} - {"3.weight"}
    with pytest.warns(UserWarning, match="not quantised") as caught:
        pkg.quantize_(model, 32)
    assert [str(each.message) for each in caught] == [
        "not quantised: 0: a hook computes its bias; 1: it has low_rank besides, which would be "
        "lost; 2: it has gain besides, which would be lost"
    ]
    assert before - {"1.low_rank.weight"} <= {*model.state_dict()}
    assert isinstance(model[1].low_rank, pkg.nn.Int4Linear)
    assert isinstance(model[3], pkg.nn.Int4Linear)
    model(torch.randn(3, 64))


@pytest.mark.parametrize("in_place", [False, True])
def test_layers_that_are_compiled_themselves_stay(in_place: bool) -> None:
    layer = nn.Linear(64, 64)
    compiled = torch.compile(layer, backend="eager")
    if in_place:
        layer.compile(backend="eager")
        compiled = layer
    model = nn.Sequential(compiled, nn.Linear(64, 64))
    weight = layer.weight
    with pytest.warns(UserWarning, match="0.*: torch.compile has compiled it: quantise before"):
        pkg.quantize_(model, 32)
    assert layer.weight is weight
    assert isinstance(model[1], pkg.nn.Int4Linear)
    whole = torch.compile(nn.Sequential(nn.Linear(64, 64)), backend="eager")
    pkg.quantize_(whole, 32)
    assert isinstance(whole._orig_mod[0], pkg.nn.Int4Linear)
    input = torch.randn(3, 64)
    assert torch.equal(whole(input), whole._orig_mod[0](input))


@pytest.mark.parametrize("offset", [0.0, 1.0, -100.0, 3e4])
def test_values_far_from_zero_are_within_a_step(offset: float) -> None:
    """Of what sixteen steps have to reach: the group, and what rounding the zero moves them."""
    weight = offset + 0.003 * torch.randn(16, 64, dtype=torch.float64)
    linear = nn.Linear(64, 16, bias=False).double()
    linear.weight.data.copy_(weight)
    layer = pkg.nn.Int4Linear.from_linear(linear, 32)
    groups = weight.unflatten(-1, (-1, 32))
    roundoff = torch.finfo(torch.bfloat16).eps / 2
    ends = groups.amax(-1) - groups.amin(-1) + 2 * roundoff * groups.abs().amax(-1)
    # float32 holds the values, and bfloat16 the scale.
    bound = ends / 15 * (1 + 4 * roundoff) + 2**-23 * groups.abs().amax(-1)
    error = (weight_of(layer).unflatten(-1, (-1, 32)) - groups).abs().amax(-1)
    assert (error <= bound).all()


class Adapted(nn.Module):
    """A linear layer and an adapter, under the names that peft gives."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 8, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(8, base_layer.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, input: Tensor) -> Tensor:
        low = self.lora_A["default"](input.to(self.lora_A["default"].weight.dtype))
        return self.base_layer(input) + self.lora_B["default"](low)


def test_adapters_are_trained_on_a_quantised_model() -> None:
    """By the filter of quantize_'s docstring."""
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(nn.Linear(64, 64)), nn.Tanh(), Adapted(nn.Linear(64, 64)))
    pkg.quantize_(
        model,
        group_size=32,
        filter=lambda module, name: type(module) is nn.Linear and "lora_" not in name,
    )
    for index in (0, 2):
        assert isinstance(model[index].base_layer, pkg.nn.Int4Linear)
        assert type(model[index].lora_A["default"]) is nn.Linear
    before = {name: each.clone() for name, each in model.state_dict().items()}
    trained = [each for each in model.parameters() if each.requires_grad]
    assert len(trained) == 4
    optimiser = torch.optim.Adam(trained, 0.01)
    input, target = torch.randn(16, 64), torch.randn(16, 64)
    losses = []
    for _ in range(20):
        loss = nn.functional.mse_loss(model(input), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name]) != ("lora_" in name), name
