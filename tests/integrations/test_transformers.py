"""attn_implementation="pkg": models of transformers compute what they compute with its own kinds.

The models are the library's, from small configurations, with random weights large enough for
attention to matter. What one gives in float32 is held by the rule of pkg.testing: to at most twice
the error that it has with transformers' own attention, against the same model in float64.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import sys
import types
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pkg
from pkg.testing import Sample
from pkg.testing.tolerance import expect, expect_beside

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="needs transformers: pip install 'pkg-kernels[transformers]'",
)
WINDOW = 5
TOKENS = {"vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = {
    **TOKENS,
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 64,
}
LAYERS = ["sliding_attention", "full_attention"]
# Module of transformers.models, configuration, model, the configuration's arguments.
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "gpt2": (
        "gpt2",
        "GPT2Config",
        "GPT2LMHeadModel",
        {**TOKENS, "n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 64},
    ),
    "llama": ("llama", "LlamaConfig", "LlamaForCausalLM", GROUPED),
    "qwen3": ("qwen3", "Qwen3Config", "Qwen3ForCausalLM", GROUPED),
    "mistral": (
        "mistral",
        "MistralConfig",
        "MistralForCausalLM",
        {**GROUPED, "sliding_window": WINDOW},
    ),
    "qwen2": (
        "qwen2",
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {**GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "gemma2": (
        "gemma2",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **GROUPED,
            "sliding_window": WINDOW,
            "layer_types": LAYERS,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 1.5,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **GROUPED,
            "sliding_window": WINDOW,
            "layer_types": LAYERS,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "gemma3": (
        "gemma3",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**GROUPED, "sliding_window": WINDOW, "layer_types": LAYERS},
    ),
    "bert": ("bert", "BertConfig", "BertModel", {**TOKENS, **SIZES}),
    "vit": ("vit", "ViTConfig", "ViTModel", {**SIZES, "image_size": 24, "patch_size": 8}),
    "whisper": (
        "whisper",
        "WhisperConfig",
        "WhisperEncoder",
        {
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "num_mel_bins": 8,
            "max_source_positions": 20,
        },
    ),
}
DECODERS = ["gpt2", "llama", "qwen3", "mistral", "qwen2", "gemma2", "gemma3", "gpt_oss"]
# With windows, in so many of their layers.
SLIDING = {"mistral": 2, "qwen2": 1, "gemma2": 1, "gemma3": 1, "gpt_oss": 1}
# Which plain one is beside them: SDPA caps no scores and has no sinks.
BESIDE = {"gemma2": "eager", "gpt_oss": "sinks_as_keys"}
LENGTH, PADDING = 12, 4


def sinks_as_keys(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """PyTorch's SDPA, given each head's sink as a key whose value is zero.

    A further element of every query makes its product with that key the sink. SDPA and not eager
    attention is what float32's error is measured with: both of the fast ones take a row's sum of
    gradients from its output, which eager attention does not, and of a key's bias, where a row's
    gradients cancel but for the sink's, that sum's rounding is most of the error.
    """
    sinks, scale = options["s_aux"], options["scaling"]
    heads, length = query.shape[1], key.shape[2]
    key, value = (each.repeat_interleave(heads // each.shape[1], 1) for each in (key, value))
    query = torch.cat([query, torch.full_like(query[..., :1], 1 / scale)], -1)
    key = torch.nn.functional.pad(key, (0, 1, 0, 1))
    last = torch.zeros_like(key[:, :, -1:])
    last[..., -1] = sinks[:, None]
    key = torch.cat([key[:, :, :-1], last], 2)
    value = torch.nn.functional.pad(value, (0, 1, 0, 1))
    mask = torch.nn.functional.pad(mask[..., :length], (0, 1))
    attend = torch.nn.functional.scaled_dot_product_attention
    output = attend(query, key, value, attn_mask=mask, scale=scale)
    return output[..., :-1].transpose(1, 2).contiguous(), None


def make(name: str, *kinds: str) -> list[torch.nn.Module]:
    """The same model, in evaluation mode, once for each kind of attention."""
    pkg.integrations.transformers.register()
    masking = importlib.import_module("transformers.masking_utils")
    interface = importlib.import_module("transformers").AttentionInterface
    interface.register("sinks_as_keys", sinks_as_keys)
    masking.AttentionMaskInterface.register("sinks_as_keys", masking.eager_mask)
    module, config, model, arguments = MODELS[name]
    package = importlib.import_module("transformers")
    source = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    made: list[torch.nn.Module] = []
    arguments = dict(arguments)
    if name == "gpt_oss":
        arguments["experts_implementation"] = "eager"  # the other one refuses float64
    for kind in kinds:
        # A configuration of its own: it is where a model keeps its kind of attention.
        options = getattr(package, config)(**copy.deepcopy(arguments))
        try:
            each = getattr(source, model)._from_config(options, attn_implementation=kind).eval()
        except KeyError as error:
            pytest.skip(f"{name} of this transformers knows only its own attention: {error}")
        if made:
            each.load_state_dict(made[0].state_dict())
        else:
            enlarge(each)
        made.append(each)
    return made


def enlarge(model: torch.nn.Module) -> None:
    """Weights at which scores are of the order of one, and biases that are not zero."""
    for parameter in model.parameters():
        size = parameter[0].numel() if parameter.dim() > 1 else 4
        torch.nn.init.normal_(parameter, std=1.5 * size**-0.5)


def inputs_of(name: str, padded: bool) -> tuple[dict[str, Any], Tensor]:
    """Arguments of a model, and which of its outputs count."""
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 24, 24)}, torch.ones(2, 10, dtype=torch.bool)
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 40)}, torch.ones(2, 20, dtype=torch.bool)
    there = torch.ones(2, LENGTH, dtype=torch.bool)
    tokens = torch.randint(3, 101, (2, LENGTH))
    if not padded:
        return {"input_ids": tokens}, there
    # Eager attention in float64 makes rows without a key NaN, as padding on the left has them.
    there[0, -PADDING:] = False
    if name not in BESIDE:
        there[0] = there[0].flip(0)
    arguments = {"input_ids": tokens.where(there, 0), "attention_mask": there.long()}
    return arguments, there


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """The masks of the calls of our attention: that it was called at all is part of each test."""
    masks: list[Tensor | None] = []
    ours = pkg.integrations.transformers.attention

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any
    ) -> Any:
        masks.append(mask)
        return ours(module, query, key, value, mask, **rest)

    monkeypatch.setattr(pkg.integrations.transformers, "attention", attention)
    return masks


@needs_transformers
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients(name: str, padded: bool, calls: list[Tensor | None]) -> None:
    if padded and name in ("vit", "whisper"):
        pytest.skip("images and spectrograms have no padding")
    arguments, counts = inputs_of(name, padded)
    ours, plain = make(name, "pkg", BESIDE.get(name, "sdpa"))
    with torch.no_grad():
        weights = torch.randn(ours(**arguments)[0][counts].shape)

    def evaluate(model: torch.nn.Module, sample: Sample) -> list[Tensor]:
        parameters, given = sample.args
        leaves = {key: each.detach().requires_grad_() for key, each in parameters.items()}
        output = torch.func.functional_call(model, leaves, kwargs=given)[0][counts]
        loss = (output * weights.to(output.dtype)).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        return [output.detach(), *(each for each in grads if each is not None)]

    parameters = {key: each.detach() for key, each in plain.named_parameters()}
    sample = Sample((parameters, arguments))
    calls.clear()
    actual = evaluate(ours, sample)
    assert len(calls) == 2
    expected = expect(partial(evaluate, plain), sample)
    for number, (each, value) in enumerate(zip(expected, actual, strict=True)):
        each.compare(value, f"{name}: the output" if number == 0 else f"{name}: gradient {number}")


def cache_of(kind: str, model: torch.nn.Module) -> Any:
    package = importlib.import_module("transformers")
    if kind == "dynamic":
        return package.DynamicCache(config=model.config)
    return package.StaticCache(config=model.config, max_cache_len=24)


@needs_transformers
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("name", "padded"), [*((name, True) for name in DECODERS), *((name, False) for name in SLIDING)]
)
def test_prefill_and_decode(
    name: str, padded: bool, cache: str, calls: list[Tensor | None]
) -> None:
    """A prompt, then several tokens at a time, then one at a time."""
    arguments, there = inputs_of(name, padded=True)
    if name in BESIDE or not padded:  # whose padding is behind
        arguments, there = {**arguments, "attention_mask": torch.ones(2, LENGTH).long()}, ~there
        there[:] = True
    ours, *others = make(name, "pkg", BESIDE.get(name, "sdpa"), "eager")
    # Not eager where there is another: in float64 its lowest finite score is float32's infinity.
    exact = copy.deepcopy(others[0]).double()
    results = []
    for model in (ours, *others, exact):
        past, logits = cache_of(cache, model), []
        bounds = [0, 6, 9, 10, 11, LENGTH]
        for first, last in pairwise(bounds):
            positions = torch.arange(first, last)
            step = model(
                input_ids=arguments["input_ids"][:, first:last],
                attention_mask=arguments["attention_mask"][:, :last],
                position_ids=(there.cumsum(-1) - 1).clamp(min=0)[:, first:last],
                past_key_values=past,
                cache_position=positions,
                use_cache=True,
            )
            logits.append(step.logits.detach())
        results.append(torch.cat(logits, 1)[there])
    assert len(calls) == 10
    mine, *plain, right = results
    # The worse of the two that transformers has: which of them rounds less is chance.
    worse = max(plain, key=lambda each: float((each - right).abs().max()))
    expect_beside(right, worse).compare(mine, name)


@needs_transformers
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate_writes_the_same_tokens(name: str, cache: str, calls: list[Tensor | None]) -> None:
    arguments, _ = inputs_of(name, padded=True)
    texts = []
    for model in make(name, "pkg", BESIDE.get(name, "sdpa")):
        model.generation_config.disable_compile = True
        texts.append(
            model.generate(
                **arguments,
                max_new_tokens=9,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                cache_implementation=cache,
            )
        )
    assert texts[0].shape == (2, LENGTH + 9)
    assert torch.equal(*texts)
    assert len(calls) == 18


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """Of each call of the operator: keys, window, whether there is a mask."""
    made: list[tuple[int, int, bool]] = []
    module = pkg.integrations.transformers

    def spy(ours: Any, place: int, *arguments: Any, **options: Any) -> Tensor:
        mask = arguments[place]
        made.append((arguments[1].shape[2], options["window_left"], mask is not None))
        result: Tensor = ours(*arguments, **options)
        return result

    for name, place in (("scaled_dot_product_attention", 3), ("attention_with_sinks", 4)):
        monkeypatch.setattr(module, name, partial(spy, getattr(module, name), place))
    return made


@needs_transformers
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", SLIDING)
def test_keys_out_of_the_window_are_skipped(
    name: str, cache: str, attended: list[tuple[int, int, bool]]
) -> None:
    (model,) = make(name, "pkg")
    tokens = torch.randint(3, 101, (2, LENGTH))
    past = cache_of(cache, model)
    with torch.no_grad():
        model(tokens, past_key_values=past, use_cache=True)
        prefill = attended.copy()
        attended.clear()
        model(
            tokens[:, :3],
            past_key_values=past,
            use_cache=True,
            cache_position=torch.arange(LENGTH, LENGTH + 3),
        )
        chunk = attended.copy()
    assert prefill.count((LENGTH, WINDOW - 1, False)) == SLIDING[name]
    # The keys that the chunk's first query sees, and its own.
    assert chunk.count((WINDOW + 2, WINDOW - 1, False)) == SLIDING[name]


@needs_transformers
def test_a_padded_window_is_masked(attended: list[tuple[int, int, bool]]) -> None:
    (model,) = make("mistral", "pkg")
    arguments, _ = inputs_of("mistral", padded=True)
    with torch.no_grad():
        model(**arguments)
    assert attended == [(LENGTH, -1, True)] * 2


@needs_transformers
def test_a_window_with_sinks_has_tangents() -> None:
    masking = importlib.import_module("transformers.masking_utils")
    windows = importlib.import_module("pkg.integrations._window_mask")
    rule = masking.sliding_window_causal_mask_function
    new = "q_length" in inspect.signature(masking.sdpa_mask).parameters
    where = {"q_length": 6} if new else {"cache_position": torch.arange(6)}
    mask = windows.with_windows(masking.sdpa_mask, rule)(
        batch_size=1, kv_length=6, local_size=3, mask_function=rule(3), **where
    )
    assert windows.window_of(mask, 6, 6) is not None
    module = types.SimpleNamespace(is_causal=True)

    def attend(query: Tensor) -> Tensor:
        attention = pkg.integrations.transformers.attention
        output: Tensor = attention(module, query, tokens, tokens, mask, s_aux=torch.ones(2))[0]
        return output

    tokens = torch.randn(1, 2, 6, 8)
    _, expected = torch.autograd.functional.jvp(attend, tokens, tokens)  # by gradients alone
    torch.testing.assert_close(torch.func.jvp(attend, (tokens,), (tokens,))[1], expected)


@needs_transformers
def test_what_is_more_than_a_window_is_a_mask() -> None:
    masking = importlib.import_module("transformers.masking_utils")
    windows = importlib.import_module("pkg.integrations._window_mask")
    rule = masking.sliding_window_causal_mask_function
    make_mask = windows.with_windows(masking.sdpa_mask, rule)
    new = "q_length" in inspect.signature(masking.sdpa_mask).parameters
    where = {"q_length": 6, "q_offset": 4} if new else {"cache_position": torch.arange(4, 10)}
    options = {"batch_size": 2, "kv_length": 10, "local_size": 3, **where}

    def made(**more: Any) -> Tensor:
        mask = make_mask(**{**options, "mask_function": rule(3), **more})
        assert torch.equal(mask, masking.sdpa_mask(**{**options, "mask_function": rule(3), **more}))
        return mask

    def known(mask: Tensor) -> Any:
        return windows.window_of(mask, 6, 10)

    mask = made()
    assert known(mask) == windows.Window(6, 10, 2, 10, 2)
    for other in (mask[:], mask.clone(), copy.deepcopy(mask), mask & True):
        assert known(other) is None
    assert windows.window_of(mask, 5, 10) is None
    assert windows.window_of(mask, 6, 11) is None
    image = masking.or_masks(rule(3), lambda b, h, q, k: k < 2)
    packed = masking.and_masks(rule(3), lambda b, h, q, k: k != 5)
    for function in (image, packed, rule(4), masking.causal_mask_function):
        assert known(made(mask_function=function)) is None
    hidden = torch.ones(2, 10, dtype=torch.bool)
    assert known(made(attention_mask=hidden)) is not None
    hidden[1, :2] = False  # no query sees them
    assert known(made(attention_mask=hidden)) is not None
    hidden[1, 2] = False
    assert known(made(attention_mask=hidden)) is None
    assert known(made(allow_is_causal_skip=False)) is not None
    mask[0, 0, 0, 0] = True
    assert known(mask) is None


@needs_transformers
@pytest.mark.parametrize("name", DECODERS)
def test_the_future_is_not_seen(name: str) -> None:
    (model,) = make(name, "pkg")
    tokens = torch.randint(3, 101, (1, LENGTH))
    other = tokens.clone()
    other[0, -1] = 3 + (other[0, -1] - 2) % 98
    with torch.no_grad():
        first, second = model(tokens).logits, model(other).logits
    assert torch.equal(first[:, :-1], second[:, :-1])
    assert not torch.equal(first[:, -1], second[:, -1])


@needs_transformers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    arguments, counts = inputs_of("llama", padded=True)
    ours, plain = make("llama", "pkg", "sdpa")
    with torch.no_grad():
        exact = copy.deepcopy(plain).to(dtype).double()(**arguments).logits[counts]
        results = [model.to(dtype)(**arguments).logits[counts] for model in (ours, plain)]
    expect_beside(exact, results[1]).compare(results[0], f"llama in {dtype}")


@needs_transformers
def test_a_layer_with_a_bias_of_its_own() -> None:
    """T5's: numbers that are added to the scores, and that learn; newer models pass them on."""
    attention = pkg.integrations.transformers.attention
    module = types.SimpleNamespace(is_causal=True)
    query, key, value = (torch.randn(2, 4, 7, 16, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 4, 7, 7, requires_grad=True)
    there = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    there[0, ..., :2] = False
    lower = torch.ones(7, 7, dtype=torch.bool).tril()
    low = torch.finfo(torch.float32).min
    for mask, seen in ((None, lower), (there, there), (torch.zeros(1, 1, 7, 7), None)):
        output, nothing = attention(module, query, key, value, mask, position_bias=bias)
        assert nothing is None

        def plain(sample: Sample, seen: Tensor | None = seen) -> list[Tensor]:
            inputs = query, key, value, bias = [x.detach().requires_grad_() for x in sample.args]
            added = bias if seen is None else torch.where(seen, bias, low)
            scores = query @ key.mT / 4 + added
            result = (scores.softmax(-1) @ value).transpose(1, 2)
            return [result.detach(), *torch.autograd.grad(result.sum(), inputs)]

        inputs = (query, key, value, bias)
        actual = [output.detach(), *torch.autograd.grad(output.sum(), inputs)]
        expected = expect(plain, Sample(tuple(x.detach() for x in inputs)))
        for mine, right in zip(actual, expected, strict=True):
            right.compare(mine, "with a bias")


def test_dropout_is_reproducible() -> None:
    module = types.SimpleNamespace(is_causal=False)
    query = torch.randn(1, 2, 9, 8)
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        attention = pkg.integrations.transformers.attention
        outputs.append(attention(module, query, query, query, None, dropout=0.5)[0])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("head_mask", torch.ones(2)),
        ("output_attentions", True),
        ("sinks", torch.ones(2)),
        ("cache", object()),
    ],
)
def test_what_cannot_be_done_is_refused(option: str, value: object) -> None:
    query = torch.randn(1, 2, 3, 8)
    attention = pkg.integrations.transformers.attention
    module = types.SimpleNamespace(is_causal=True)
    with pytest.raises(ValueError, match=f"attn_implementation='pkg': {option} is given"):
        attention(module, query, query, query, None, **{option: value})
    attention(module, query, query, query, None, **{option: None})


@pytest.mark.parametrize("option", ["none", "s_aux", "position_bias"])
def test_a_mask_of_integers_is_refused(option: str) -> None:
    query, mask = torch.randn(1, 2, 3, 8), torch.ones(1, 1, 3, 3)
    options = {"s_aux": torch.ones(2), "position_bias": torch.zeros(1, 2, 3, 3)}
    given = {option: options[option]} if option in options else {}
    attention = partial(pkg.integrations.transformers.attention, types.SimpleNamespace())
    for dtype in (torch.int64, torch.uint8):
        with pytest.raises(RuntimeError, match=f"attention_mask is {dtype}; it must be boolean"):
            attention(query, query, query, mask.to(dtype), **given)
    attention(query, query, query, mask.double(), **given)


def test_transformers_that_is_absent_or_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ImportError, match=r"transformers cannot be imported .*install 4\.53 or newer"
    ):
        pkg.integrations.transformers.register()
    old = types.ModuleType("transformers")
    old.__version__ = "4.40.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", old)
    with pytest.raises(ImportError, match=r"transformers is 4\.40\.0.*it must be 4\.53 or newer"):
        pkg.integrations.transformers.register()


@needs_transformers
@pytest.mark.tracing
def test_a_compiled_model() -> None:
    arguments, counts = inputs_of("llama", padded=True)
    (model,) = make("llama", "pkg")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(**arguments).logits[counts], model(**arguments).logits[counts]
        )


@needs_transformers
@pytest.mark.checkout
def test_the_example_of_the_readme() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    block = readme.partition("```python\nimport pkg\nfrom transformers")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec("import pkg\nfrom transformers" + block, names)
    assert names["model"](torch.zeros(1, 3, dtype=torch.long)).logits.shape == (1, 3, 100)
    assert names["config"]._attn_implementation == "pkg"
