"""``pkg.accelerate`` under ``torch.nn.attention``: ``varlen_attn`` and the registry of kernels."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import references
import torch
import torch.nn.attention
from torch import Tensor, nn

import pkg
from pkg import _accelerate_routes, _accelerate_table
from pkg.testing import Sample, expect

varlen = pytest.importorskip("torch.nn.attention.varlen")

FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
HEADS, SIZE = 4, 24
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
FORWARD, BACKWARD = "_flash_attention_forward", "_flash_attention_backward"
# PyTorch 2.10 has causal attention of as many heads and nothing more.
HAS_WINDOWS = "window_size" in inspect.signature(varlen.varlen_attn).parameters
needs_windows = pytest.mark.skipif(not HAS_WINDOWS, reason="varlen_attn of 2.10 has no options")
needs_restore = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "restore_flash_attention_impl"),
    reason="PyTorch 2.10 cannot take back what it activated",
)


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """A table that leaves all to PyTorch, which has nothing to say of ``varlen_attn``."""
    yield
    if HAS_WINDOWS:
        torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)
    pkg.accelerate(False)


def counts() -> dict[tuple[str, str], tuple[int, int]]:
    """Calls taken and left since the last time."""
    found = _accelerate_routes.take_counts()
    return {(each.operator, each.dtype): (each.taken, each.left) for each in found}


def starts(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def packed(tokens: int, dtype: torch.dtype, heads: int = HEADS) -> Tensor:
    return torch.randn(tokens, heads, SIZE, dtype=torch.float64).to(dtype)


# Window, scale, heads of the keys, lengths of the queries and of the keys.
KINDS: dict[str, tuple[tuple[int, int], float | None, int, tuple[int, ...], tuple[int, ...]]] = {
    "full": ((-1, -1), None, HEADS, (5, 0, 33, 7), (9, 4, 20, 0)),
    "causal": ((-1, 0), None, HEADS, (5, 17, 33), (5, 17, 33)),
    "causal, queries without keys": ((-1, 0), None, HEADS, (9, 3), (4, 8)),
    "window": ((6, 0), None, HEADS, (12, 40), (12, 40)),
    "window on both sides": ((3, 2), None, HEADS, (12, 20), (30, 16)),
    "scale": ((-1, -1), 0.7, HEADS, (12, 20), (12, 20)),
    "shared heads": ((-1, 0), None, 2, (12, 20), (30, 20)),
}


def options_of(kind: str) -> dict[str, Any]:
    window, scale, key_heads, _, _ = KINDS[kind]
    if not HAS_WINDOWS:
        return {"is_causal": window == (-1, 0)}
    return {"window_size": window, "scale": scale, "enable_gqa": key_heads != HEADS}


def kinds() -> list[Any]:
    plain = {"full", "causal", "causal, queries without keys"}
    return [kind if kind in plain else pytest.param(kind, marks=needs_windows) for kind in KINDS]


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("kind", kinds())
def test_varlen_attn(kind: str, dtype: torch.dtype) -> None:
    """Output, log-sum-exp and gradients, by check_op's rule beside plain attention."""
    window, scale, key_heads, query_lengths, key_lengths = KINDS[kind]
    sides = starts(*query_lengths), starts(*key_lengths), max(query_lengths), max(key_lengths)
    query, upstream = (packed(sum(query_lengths), dtype) for _ in range(2))
    key, value = (packed(sum(key_lengths), dtype, key_heads) for _ in range(2))
    limits = {"window_left": window[0], "window_right": window[1]}

    def run(sample: Sample, attend: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        *inputs, gradient = sample.args
        leaves = [each.detach().requires_grad_() for each in inputs]
        output, log_sum_exp = attend(*leaves)
        gradients = torch.autograd.grad(output, leaves, gradient)
        return [output.detach(), log_sum_exp.detach(), *gradients]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        output = references.scaled_dot_product_attention_varlen(
            q, k, v, *sides, softmax_scale=scale, **limits
        )
        # In the dtype of the operands, as for the operator: where the processor has dot products of
        # bfloat16, probabilities are summed as they are multiplied, rounded.
        sums = references.packed_log_sum_exp(q, k, *sides, softmax_scale=scale, **limits)
        sums = sums.to(torch.promote_types(q.dtype, torch.float32))
        return output, sums.masked_fill(sums == -torch.inf, torch.inf)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        aux = varlen.AuxRequest(lse=True)
        result: tuple[Tensor, Tensor] = varlen.varlen_attn(
            q, k, v, *sides, return_aux=aux, **options_of(kind)
        )
        return result

    sample = Sample((query, key, value, upstream), {})
    counts()
    with pkg.accelerate():
        ours = run(sample, theirs)
    name = str(dtype).removeprefix("torch.")
    found = counts()
    assert found[FORWARD, name] == found[BACKWARD, name] == (1, 0)
    expected = expect(lambda given: run(given, plain), sample)
    names = ("output", "log_sum_exp", "grad_query", "grad_key", "grad_value")
    for label, wanted, actual in zip(names, expected, ours, strict=True):
        wanted.compare(actual, label)


def test_gradients_in_float64() -> None:
    side = starts(4, 6)
    inputs = [packed(10, torch.float64, 2)[..., :5].requires_grad_() for _ in range(3)]
    options = options_of("causal")
    with pkg.accelerate():
        assert torch.autograd.gradcheck(
            lambda *each: varlen.varlen_attn(*each, side, side, 6, 6, **options), inputs
        )


@pytest.mark.parametrize("switches_on", [False, True])
def test_gradients_behind_the_block(switches_on: bool) -> None:
    """Those of a forward pass within it, whether or not another block is entered."""
    side = starts(4, 6)
    leaves = [packed(10, torch.float32, 2).requires_grad_() for _ in range(3)]

    def output() -> Tensor:
        return varlen.varlen_attn(*leaves, side, side, 6, 6, **options_of("causal"))

    with pkg.accelerate():
        expected = torch.autograd.grad(output().sum(), leaves)
        behind = output().sum()
    counts()
    with pkg.accelerate(switches_on):
        actual = torch.autograd.grad(behind, leaves)
    assert all(map(torch.equal, actual, expected))
    assert ((BACKWARD, "float32") in counts()) == switches_on


def test_padding_behind_the_sequences() -> None:
    """Zeros for it, and for its gradients; what the sequences get is what they get alone."""
    side, options = starts(4, 6), options_of("causal")
    inputs = [packed(13, torch.float32) for _ in range(3)]
    results = []
    with pkg.accelerate():
        for tokens in (10, 13):
            leaves = [each[:tokens].detach().requires_grad_() for each in inputs]
            output = varlen.varlen_attn(*leaves, side, side, 6, 6, **options)
            gradients = torch.autograd.grad(output, leaves, torch.ones_like(output))
            results.append([output.detach(), *gradients])
    for alone, padded in zip(*results, strict=True):
        assert torch.equal(padded[:10], alone)
        assert (padded[10:] == 0).all()


@needs_windows
def test_keys_that_are_used_alone() -> None:
    """As if the others were not there: the last query's own key is the last that is used."""
    query_side, key_side = starts(3, 1, 2), starts(10, 8, 5)
    used = torch.tensor([7, 8, 0], dtype=torch.int32)
    query, key, value = packed(6, torch.float32), *(packed(23, torch.float32, 2) for _ in range(2))
    kept = torch.cat([torch.arange(0, 7), torch.arange(10, 18)])
    options = {"window_size": (-1, 0), "enable_gqa": True}
    key[7:10] = torch.nan
    with pkg.accelerate():
        actual = varlen.varlen_attn(
            query, key, value, query_side, key_side, 3, 10, seqused_k=used, **options
        )
        expected = varlen.varlen_attn(
            query, key[kept], value[kept], query_side, starts(7, 8, 0), 3, 8, **options
        )
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@needs_windows
@pytest.mark.parametrize("into", [False, True])
def test_keys_in_pages(into: bool) -> None:
    query_side, lengths = starts(3, 1, 2), (7, 8, 0)
    query, keys, values = packed(6, torch.bfloat16), *(packed(15, torch.bfloat16) for _ in range(2))
    table = torch.tensor([[4, 2], [0, 5], [7, 7]], dtype=torch.int32)
    pools = []
    for tokens in (keys, values):
        pool = torch.full((6, 4, HEADS, SIZE), torch.nan, dtype=torch.bfloat16)
        for row, part in zip(table, tokens.split(lengths), strict=True):
            for page, some in zip(row.tolist(), part.split(4), strict=False):
                if len(some):
                    pool[page, : len(some)] = some
        pools.append(pool)
    used = torch.tensor(lengths, dtype=torch.int32)
    options = {"window_size": (5, 0), "return_aux": varlen.AuxRequest(lse=True)}
    with pkg.accelerate():
        expected = varlen.varlen_attn(
            query, keys, values, query_side, starts(*lengths), 3, 8, **options
        )
        call = (query, *pools, query_side, None, 3, 8)
        paged = {**options, "seqused_k": used, "block_table": table}
        if into:
            out = torch.empty_like(query)
            actual = varlen.varlen_attn_out(out, *call, **paged)
            assert actual[0] is out
        else:
            actual = varlen.varlen_attn(*call, **paged)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("lengths", [(40, 300, 7, 90), (1, 1, 1)])
def test_no_sequence_s_result_depends_on_the_others(lengths: tuple[int, ...], threads: int) -> None:
    """What num_splits=1 promises, to the bit."""
    before = torch.get_num_threads()
    query = packed(sum(lengths), torch.float32)
    keys = tuple(max(each, 500) for each in lengths)
    key, value = (packed(sum(keys), torch.float32) for _ in range(2))
    torch.set_num_threads(threads)
    try:
        with pkg.accelerate():
            sides = starts(*lengths), starts(*keys), max(lengths), max(keys)
            together = varlen.varlen_attn(query, key, value, *sides)
            parts = zip(query.split(lengths), key.split(keys), value.split(keys), strict=True)
            for whole, (q, k, v) in zip(together.split(lengths), parts, strict=True):
                alone = varlen.varlen_attn(q, k, v, starts(len(q)), starts(len(k)), len(q), len(k))
                assert torch.equal(alone, whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("layout", ["contiguous", "joint", "heads outside"])
def test_strides_are_those_that_compiled_code_expects(layout: str) -> None:
    if layout == "joint":
        query, key, value = packed(3 * 12, torch.float32).view(12, 3, HEADS, SIZE).unbind(1)
    elif layout == "heads outside":
        query, key, value = (torch.randn(HEADS, 12, SIZE).transpose(0, 1) for _ in range(3))
    else:
        query, key, value = (packed(12, torch.float32) for _ in range(3))
    leaves = [each.requires_grad_() for each in (query.detach(), key.detach(), value.detach())]
    side = starts(5, 7)
    with pkg.accelerate():
        output = varlen.varlen_attn(*leaves, side, side, 7, 7)
        gradients = torch.autograd.grad(output.sum(), leaves)
    assert output.stride() == torch.empty_like(query).stride()
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert gradient.stride() == torch.empty_like(leaf).stride()
    expected = references.scaled_dot_product_attention_varlen(query, key, value, side, side, 7, 7)
    torch.testing.assert_close(output, expected)


@pytest.mark.long
def test_a_compiled_model() -> None:
    side = starts(5, 7)

    def step(joint: Tensor) -> Tensor:
        query, key, value = joint.view(12, 3, HEADS, SIZE).transpose(0, 2).unbind(1)
        sides = (each.transpose(0, 1) for each in (query, key, value))
        result: Tensor = varlen.varlen_attn(*sides, side, side, 7, 7, **options_of("causal"))
        return result.square().sum()

    joint = packed(36, torch.float32).requires_grad_()
    with pkg.accelerate():
        (expected,) = torch.autograd.grad(step(joint), joint)
        (actual,) = torch.autograd.grad(torch.compile(step)(joint), joint)
    torch.testing.assert_close(actual, expected)


def forward(**changed: Any) -> Any:
    """``_flash_attention_forward`` of two sequences, with some arguments changed."""
    names = ("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p")
    token = packed(6, torch.float32)
    values: dict[str, Any] = dict(zip(names, (token, token, token, starts(2, 4)), strict=False))
    values |= {"cum_seq_k": starts(2, 4), "max_q": 4, "max_k": 4, "dropout_p": 0.0}
    values |= {"is_causal": False, "return_debug_mask": False, **changed}
    return torch.ops.aten._flash_attention_forward(**values)


@pytest.mark.parametrize("used", [None, torch.tensor([2, 4])], ids=["all keys", "used keys"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_tokens_beyond_the_maximum_are_of_no_sequence(is_causal: bool, used: Tensor | None) -> None:
    operands = tuple(packed(6, torch.float32) for _ in range(3))
    given = dict(zip(("query", "key", "value"), operands, strict=True))
    with pkg.accelerate():
        output, log_sum_exp, *_ = forward(
            **given, max_q=3, max_k=2, is_causal=is_causal, seqused_k=used
        )
    sides = starts(2, 4), starts(2, 4), 3, 2
    expected = references.scaled_dot_product_attention_varlen(*operands, *sides, causal=is_causal)
    torch.testing.assert_close(output, expected)
    sums = references.packed_log_sum_exp(*operands[:2], *sides, causal=is_causal)
    torch.testing.assert_close(log_sum_exp, sums.masked_fill(sums == -torch.inf, torch.inf))


USED, PAGES = torch.tensor([2, 3]), torch.tensor([[0], [1]], dtype=torch.int32)
POOL = torch.zeros(2, 4, HEADS, SIZE)
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "dropout": (r"dropout_p is 0\.1; it must be 0", {"dropout_p": 0.1}),
    "weights": ("return_debug_mask is True", {"return_debug_mask": True}),
    "slopes": ("alibi_slopes are given", {"alibi_slopes": torch.ones(HEADS)}),
    "sequences of one length": ("cum_seq_q is None", {"cum_seq_q": None, "cum_seq_k": None}),
    "no starts of the keys": ("cum_seq_k is None", {"cum_seq_k": None}),
    "used keys without their starts": ("cum_seq_k is None", {"cum_seq_k": None, "seqused_k": USED}),
    "too many used keys": (r"seqused_k is \[3, 3\] where", {"seqused_k": USED.clamp(min=3)}),
    "used keys of one sequence": ("a number for each sequence", {"seqused_k": USED[:1]}),
    "used keys in float32": ("it must be torch.int32 or", {"seqused_k": USED.float()}),
    "another dtype": ("key is torch.float64", {"key": packed(6, torch.float64)}),
    "starts that decrease": ("decreases from 4 to 2", {"cum_seq_q": torch.tensor([0, 4, 2])}),
}
REFUSED_PAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "pages without lengths": ("without seqused_k", {"seqused_k": None}),
    "a page that is not there": ("pages in use that are 1 to 2", {"block_table": PAGES + 1}),
    "too few pages": ("hold no more", {"seqused_k": USED + 3}),
    "a negative length": ("none can have fewer than 0", {"seqused_k": USED - 3}),
    "another table": ("block_table is of shape", {"block_table": PAGES[:1]}),
    "no pages": ("they must be .pages, page size", {"key": packed(6, torch.float32)}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_taken_is_refused_in_words(name: str) -> None:
    words, changed = REFUSED[name]
    with pkg.accelerate(), pytest.raises(RuntimeError, match=words):
        forward(**changed)


@needs_windows
@pytest.mark.parametrize("name", REFUSED_PAGES)
def test_pages_that_do_not_fit_are_refused_in_words(name: str) -> None:
    words, changed = REFUSED_PAGES[name]
    paged = {"key": POOL, "value": POOL, "seqused_k": USED, "block_table": PAGES}
    with pkg.accelerate(), pytest.raises(RuntimeError, match=words):
        forward(**{**paged, "cum_seq_k": None, **changed})


@needs_windows
def test_an_output_that_does_not_fit_is_refused_in_words() -> None:
    token, side = packed(6, torch.float32), starts(2, 4)
    with pkg.accelerate():
        for out in (torch.empty(6, HEADS, 1), torch.empty_like(token, dtype=torch.float64)):
            with pytest.raises(RuntimeError, match="out is torch"):
                varlen.varlen_attn_out(out, token, token, token, side, side, 4, 4)


@needs_windows
def test_inference_s_options_have_no_gradients() -> None:
    token, side = packed(6, torch.float32).requires_grad_(), starts(2, 4)
    with pkg.accelerate(), pytest.raises(RuntimeError, match="seqused_k is an inference-only"):
        varlen.varlen_attn(token, token, token, side, side, 4, 4, seqused_k=USED)


def run(script: str) -> subprocess.CompletedProcess[str]:
    before = """
        import torch, pkg
        import torch.nn.attention as registry
        from torch.nn.attention.varlen import varlen_attn
        from pkg import _accelerate_table, _accelerate_routes

        def table(ratio):
            _accelerate_table.put({"ratios": [ratio] * len(_accelerate_routes.table())})

        def taken():
            return {each.operator for each in _accelerate_routes.take_counts() if each.taken}

        def error_of(call):
            try:
                call()
            except Exception as error:
                return type(error), str(error)
            raise AssertionError("it was not refused")

        token = torch.randn(6, 2, 16)
        side = torch.tensor([0, 2, 6], dtype=torch.int32)
        dense = token.transpose(0, 1)[None]

        def packed(token=token):
            return varlen_attn(token, token, token, side, side, 4, 4)

        def attend():
            return torch.nn.functional.scaled_dot_product_attention(dense, dense, dense)

        FLASH, VARLEN = "_scaled_dot_product_flash_attention_for_cpu", "_flash_attention_forward"
        def multiply():
            return torch.mm(token[0], token[0].T)
    """
    text = textwrap.dedent(before) + textwrap.dedent(script)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", text], capture_output=True, text=True, check=False
    )


def test_without_acceleration_the_error_is_pytorch_s() -> None:
    done = run("""
        leaf = token.clone().requires_grad_()
        call = torch.ops.aten._flash_attention_backward
        options = (token,) * 5 + (torch.ones(2, 6), side, side, 4, 4, 0.0, False, side, side)
        calls = [packed, lambda: packed(leaf), lambda: call(*options)]
        if hasattr(torch.ops.aten, VARLEN + "_no_dropout_inplace"):
            from torch.nn.attention.varlen import varlen_attn_out
            calls.append(lambda: varlen_attn_out(token, token, token, token, side, side, 4, 4))
        before = [error_of(each) for each in calls]
        assert all(kind is NotImplementedError for kind, _ in before), before
        table(0.0)
        with pkg.accelerate():
            packed(leaf).sum().backward()
        assert [error_of(each) for each in calls] == before
        assert taken() == {VARLEN, "_flash_attention_backward"}
    """)
    assert done.returncode == 0, done.stderr


def test_pytorch_s_registry_switches_attention() -> None:
    """Without a table, and attention alone; 2.10 cannot switch back."""
    done = run("""
        table(0.0)
        assert "pkg" in registry.list_flash_attention_impls()
        assert registry.current_flash_attention_impl() is None
        before = error_of(packed)
        expected = attend()
        assert not taken()
        registry.activate_flash_attention_impl("pkg")
        assert registry.current_flash_attention_impl() == "pkg"
        torch.testing.assert_close(attend(), expected)
        packed(), multiply()
        assert taken() == {FLASH, VARLEN}
        if hasattr(registry, "restore_flash_attention_impl"):
            registry.activate_flash_attention_impl("pkg")
            attend()
            assert taken() == {FLASH}
            registry.restore_flash_attention_impl()
            assert registry.current_flash_attention_impl() is None
            assert torch.equal(attend(), expected)
            assert error_of(packed) == before
            assert not taken()
    """)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@needs_restore
def test_the_registry_and_accelerate_in_any_order() -> None:
    """Each is taken back on its own: attention is ours while one of both says so."""
    done = run("""
        import itertools, logging

        def of(attention, product):
            return ({FLASH} if attention else set()) | ({"mm"} if product else set())

        table(9.0)
        logging.getLogger("torch.nn.attention._registry").disabled = True  # of a second restore
        activate = lambda: registry.activate_flash_attention_impl("pkg")
        restore = registry.restore_flash_attention_impl
        steps = [activate, restore, pkg.accelerate, lambda: pkg.accelerate(False)]
        active = on = False
        for step in itertools.chain(*itertools.permutations(range(4))):
            steps[step]()
            active = {0: True, 1: False}.get(step, active)
            on = {2: True, 3: False}.get(step, on)
            attend(), multiply()
            assert taken() == of(active or on, on), (step, active, on)
            with pkg.accelerate(not on):
                attend(), multiply()
                assert taken() == of(active or not on, not on), (step, active, on)
                steps[active]()
                attend()
                assert taken() == of(not active or not on, False), (step, active, on)
            steps[not active]()
            attend()
            assert taken() == of(active or on, False), (step, active, on)
    """)
    assert done.returncode == 0, done.stderr


@needs_restore
def test_what_an_active_kernel_cannot_take_goes_to_pytorch() -> None:
    # Sequences outermost but one: an output of such a layout is made by PyTorch's kernel alone.
    query = torch.randn(6, 4, 2, 8).permute(2, 1, 0, 3)
    attend = nn.functional.scaled_dot_product_attention
    expected = attend(query, query, query)
    torch.nn.attention.activate_flash_attention_impl("pkg")
    counts()
    torch.testing.assert_close(attend(query, query, query), expected)
    assert counts()[FLASH, "float32"] == (0, 1)


def test_a_pytorch_without_the_registry() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error", "-c"),
            "import torch.nn.attention as a; del a.register_flash_attention_impl; import pkg",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_report_counts_it(capsys: pytest.CaptureFixture[str]) -> None:
    side = starts(2, 4)
    token = packed(6, torch.float32)
    with pkg.accelerate(report=True) as block:
        varlen.varlen_attn(token, token, token, side, side, 4, 4)
        (found,) = block.report().counts
    assert (found.operator, found.taken, found.left, found.saved) == (FORWARD, 1, 0, 0.0)
    assert found.seconds > 0
    capsys.readouterr()


def test_a_table_is_not_asked() -> None:
    """There is nothing to compare with."""
    assert _accelerate_table._in_use is not None
    side, token = starts(2, 4), packed(6, torch.float16)
    counts()
    with pkg.accelerate():
        varlen.varlen_attn(token, token, token, side, side, 4, 4)
    assert counts()[FORWARD, "float16"] == (1, 0)
