"""pkg.nn.MultiheadAttention is PyTorch's, whatever its options, forward and backward."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrizations, prune

import pkg
from pkg.testing import Sample
from pkg.testing.tolerance import expect, expect_beside

EMBED, HEADS, BATCH, ROWS, COLUMNS = 24, 4, 3, 5, 7
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
MODULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "other sizes": {"kdim": 10, "vdim": 14},
    "added keys": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "learnt key": {"add_bias_kv": True},
}
MASKS = ("none", "padding", "attention", "every head", "both", "numbers", "mixed")


def make(options: dict[str, Any], dtype: torch.dtype = torch.float32) -> list[torch.nn.Module]:
    theirs = torch.nn.MultiheadAttention(EMBED, HEADS, **options, dtype=dtype)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = pkg.nn.MultiheadAttention(EMBED, HEADS, **options, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    return [ours, theirs]


def masks_of(kind: str, rows: int, columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Masks that leave every query a key: PyTorch gives NaN where there is none."""
    padding = torch.rand(BATCH, columns) < 0.3
    hidden = torch.rand(rows, columns) < 0.3
    of_heads = torch.rand(BATCH * HEADS, rows, columns) < 0.3
    padding[:, 0] = hidden[:, 0] = of_heads[..., 0] = False
    numbers = torch.randn(rows, columns).to(dtype)
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "attention": {"attn_mask": hidden},
        "every head": {"attn_mask": of_heads},
        "both": {"key_padding_mask": padding, "attn_mask": hidden},
        "numbers": {"attn_mask": numbers},
        "mixed": {
            "key_padding_mask": torch.zeros(BATCH, columns, dtype=dtype).masked_fill(
                padding, -torch.inf
            ),
            "attn_mask": numbers,
        },
    }[kind]


def evaluate(
    module: torch.nn.Module, weights: list[Tensor | None], options: dict[str, Any], sample: Sample
) -> list[Tensor]:
    """Both results, and the gradients of everything that they depend on."""
    parameters, inputs, masks = sample.args
    leaves = {key: each.detach().requires_grad_() for key, each in parameters.items()}
    inputs = [each.detach().requires_grad_() for each in inputs]
    if len(inputs) == 1:
        inputs *= 3
    results = [
        each
        for each in torch.func.functional_call(module, leaves, tuple(inputs), {**options, **masks})
        if each is not None
    ]
    while len(weights) < len(results):
        weights.append(torch.randn(results[len(weights)].shape))
    loss = sum((r * w.to(r.dtype)).sum() for r, w in zip(results, weights, strict=False))
    sources = [*leaves.values(), *dict.fromkeys(inputs)]
    return [*(each.detach() for each in results), *torch.autograd.grad(loss, sources)]


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("name", MODULES)
def test_it_computes_what_pytorchs_does(name: str, masks: str, need_weights: bool) -> None:
    dtype = DTYPES[(list(MODULES).index(name) + MASKS.index(masks)) % len(DTYPES)]
    options = MODULES[name]
    ours, theirs = make(options, dtype)
    is_self = masks in ("none", "both") and "kdim" not in options
    rows = COLUMNS if is_self else ROWS
    shapes = [(rows, EMBED), (COLUMNS, options.get("kdim", EMBED))]
    shapes.append((COLUMNS, options.get("vdim", EMBED)))
    inputs = [torch.randn(BATCH, *shape).to(dtype) for shape in shapes[: 1 if is_self else 3]]
    if not options.get("batch_first"):
        inputs = [each.transpose(0, 1) for each in inputs]
    given = {"need_weights": need_weights, "average_attn_weights": masks != "padding"}
    sample = Sample(
        (
            {key: each.detach() for key, each in theirs.named_parameters()},
            inputs,
            masks_of(masks, rows, COLUMNS, dtype),
        )
    )
    weights: list[Tensor | None] = []
    actual = evaluate(ours, weights, given, sample)
    expected = expect(partial(evaluate, theirs, weights, given), sample)
    for number, (each, value) in enumerate(zip(expected, actual, strict=True)):
        each.compare(value, f"result {number}")


@pytest.mark.parametrize(
    "options",
    [{}, {"batch_first": True}, {"add_bias_kv": True}, {"add_zero_attn": True}],
    ids=str,
)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_the_hint_of_causality(options: dict[str, Any], need_weights: bool, padded: bool) -> None:
    ours, theirs = make(options)
    tokens = torch.randn(BATCH, ROWS, EMBED)
    tokens = tokens if options.get("batch_first") else tokens.transpose(0, 1)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(ROWS)
    padding = torch.zeros(BATCH, ROWS)
    padding[0, -2:] = -torch.inf
    given = {"attn_mask": mask, "is_causal": True, "need_weights": need_weights}
    given |= {"key_padding_mask": padding} if padded else {}
    # Without the hint, by which PyTorch hides the added keys.
    expected = theirs(tokens, tokens, tokens, **{**given, "is_causal": False})
    for mine, other in zip(ours(tokens, tokens, tokens, **given), expected, strict=True):
        if other is None:
            assert mine is None
        else:
            torch.testing.assert_close(mine, other)
    with pytest.raises(RuntimeError, match="is_causal is given without attn_mask"):
        ours(tokens, tokens, tokens, is_causal=True)


@pytest.mark.tracing
@pytest.mark.parametrize("need_weights", [False, True])
def test_a_learnt_key_is_of_any_batch(need_weights: bool) -> None:
    class Attended(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = pkg.nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.attention(tokens, tokens, tokens, need_weights=need_weights)[0]

    model = Attended().eval()
    sizes = ({0: torch.export.Dim("batch", min=2, max=99)},)
    program = torch.export.export(model, (torch.randn(4, 6, 8),), dynamic_shapes=sizes).module()
    other = torch.randn(3, 6, 8)
    torch.testing.assert_close(program(other), model(other))


@pytest.mark.parametrize("average", [False, True])
def test_without_a_batch(average: bool) -> None:
    for options in MODULES.values():
        ours, theirs = make(options)
        sizes = (options.get("kdim", EMBED), options.get("vdim", EMBED))
        inputs = (torch.randn(ROWS, EMBED), *(torch.randn(COLUMNS, size) for size in sizes))
        padding = torch.arange(COLUMNS) > 4
        given = {"key_padding_mask": padding, "average_attn_weights": average}
        torch.testing.assert_close(ours(*inputs, **given), theirs(*inputs, **given))
        assert ours(*inputs, need_weights=False)[1] is None


def test_the_state_is_pytorchs() -> None:
    for options in MODULES.values():
        ours, theirs = make(options)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        theirs.load_state_dict(ours.state_dict())
        shared = pkg.nn.MultiheadAttention.from_multihead_attention(theirs.eval())
        assert not shared.training
        assert all(
            mine is other
            for mine, other in zip(shared.parameters(), theirs.parameters(), strict=True)
        )
        assert list(shared.state_dict()) == list(theirs.state_dict())
        copied = copy.deepcopy(shared)
        assert all(map(torch.equal, copied.parameters(), theirs.parameters()))
    text = repr(make(MODULES["added keys"])[0])
    assert "embed_dim=24, num_heads=4, add_bias_kv=True, add_zero_attn=True, batch_first=T" in text
    with pytest.raises(TypeError, match="from_multihead_attention: module is of type Linear"):
        pkg.nn.MultiheadAttention.from_multihead_attention(torch.nn.Linear(2, 2))


def test_a_module_without_parameters_to_share_is_refused_in_words() -> None:
    theirs = torch.nn.MultiheadAttention(EMBED, HEADS)
    theirs.out_proj = torch.nn.LazyLinear(EMBED)
    with pytest.raises(ValueError, match="attention: module is a MultiheadAttention with"):
        pkg.nn.MultiheadAttention.from_multihead_attention(theirs)
    for change, words in (
        (parametrizations.spectral_norm, "computed by a parametrization"),
        (lambda module, name: prune.l1_unstructured(module, name, 0.5), "no parameter that"),
    ):
        theirs = torch.nn.MultiheadAttention(EMBED, HEADS)
        change(theirs, "in_proj_weight")
        with pytest.raises(ValueError, match=f"module's in_proj_weight is {words}"):
            pkg.nn.MultiheadAttention.from_multihead_attention(theirs)


def test_dropout_in_training_alone() -> None:
    module = pkg.nn.MultiheadAttention(EMBED, HEADS, dropout=0.5)
    tokens = torch.randn(ROWS, BATCH, EMBED)
    for need_weights in (False, True):
        outputs = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            outputs.append(module(tokens, tokens, tokens, need_weights=need_weights)[0])
        assert torch.equal(outputs[0], outputs[1])
        assert not torch.equal(outputs[0], outputs[2])
    module.eval()
    torch.testing.assert_close(
        module(tokens, tokens, tokens, need_weights=False)[0], module(tokens, tokens, tokens)[0]
    )


def test_a_query_without_a_key_gets_zeros() -> None:
    (module, _) = make({"bias": False})
    tokens = torch.randn(ROWS, BATCH, EMBED)
    hidden = torch.ones(BATCH, ROWS, dtype=torch.bool)
    output, _ = module(tokens, tokens, tokens, hidden, need_weights=False)
    assert torch.equal(output, torch.zeros_like(output))


def test_nested_tensors_go_pytorchs_way() -> None:
    ours, theirs = (each.eval() for each in make({"batch_first": True}))
    nested = torch.nested.nested_tensor([torch.randn(n, EMBED) for n in (3, 5)])
    with torch.no_grad():
        pair = (module(nested, nested, nested, need_weights=False)[0] for module in (ours, theirs))
        for mine, other in zip(*(each.unbind() for each in pair), strict=True):
            assert torch.equal(mine, other)


def test_wrong_shapes_are_named() -> None:
    module = pkg.nn.MultiheadAttention(EMBED, HEADS)
    query, key = torch.zeros(ROWS, BATCH, EMBED), torch.zeros(COLUMNS, BATCH, EMBED)
    with pytest.raises(RuntimeError, match="have 3, 2 and 2 dimensions"):
        module(query, key[0], key[0])
    with pytest.raises(RuntimeError, match=r"key has 23 elements in its last .* have 24"):
        module(query, key[..., 1:], key)
    with pytest.raises(RuntimeError, match="batches, and tokens of key and value, must be equal"):
        module(query, key[:, 1:], key[:, 1:])
    with pytest.raises(RuntimeError, match=r"key_padding_mask is .*must be \[3, 7\]"):
        module(query, key, key, torch.zeros(COLUMNS, BATCH).bool())
    with pytest.raises(RuntimeError, match=r"shape \[7\] where query has .* must be \[3, 7\]"):
        module(query, key, key, torch.zeros(COLUMNS).bool())
    with pytest.raises(RuntimeError, match=r"attn_mask is .*must be \[5, 7\] or \[12, 5, 7\]"):
        module(query, key, key, attn_mask=torch.zeros(COLUMNS, ROWS).bool())
    with pytest.raises(TypeError, match="query is None"):
        module(None, key, key)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.complex64])
def test_masks_of_other_dtypes_are_refused(dtype: torch.dtype, need_weights: bool) -> None:
    module = pkg.nn.MultiheadAttention(EMBED, HEADS)
    tokens = torch.zeros(ROWS, BATCH, EMBED)
    masks = {
        "attn_mask": torch.ones(ROWS, ROWS).to(dtype),
        "key_padding_mask": torch.ones(BATCH, ROWS).to(dtype),
    }
    for name, mask in masks.items():
        with pytest.raises(RuntimeError, match=f"{name} is {dtype}; it must be boolean"):
            module(tokens, tokens, tokens, **{name: mask}, need_weights=need_weights)


@pytest.mark.tracing
def test_compilation() -> None:
    module, _ = make({"batch_first": True})
    tokens = torch.randn(BATCH, ROWS, EMBED)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    given = {"key_padding_mask": torch.arange(ROWS).expand(BATCH, -1) > 2, "need_weights": False}
    torch.testing.assert_close(
        compiled(tokens, tokens, tokens, **given), module(tokens, tokens, tokens, **given)
    )


def test_autocast() -> None:
    ours, theirs = make({"batch_first": True})
    tokens = torch.randn(BATCH, ROWS, EMBED)
    exact = copy.deepcopy(theirs).double()(*[tokens.double()] * 3)[0]
    with torch.autocast("cpu", torch.bfloat16):
        mine, other = (
            module(tokens, tokens, tokens, need_weights=False)[0] for module in (ours, theirs)
        )
    expect_beside(exact.detach(), other.detach()).compare(mine, "under autocast")
