"""The CUDA operators whole: the host code of ``csrc/cuda/*.cu`` over emulated kernels.

The library under test is compiled from the CUDA sources for CPU tensors. That the kernels are right
is shown elsewhere; here the point is what the host code makes of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import integer_formulas
import pytest
import references
import test_emulated_attention as attention
import test_emulated_tf32 as tf32
import torch
from emulator import Emulator
from pointwise_samples import binary_samples, mixed_samples
from test_emulated_attention import Call, name_of, some_of_each_dtype
from test_emulated_linear import assert_linear
from test_emulated_matmul import assert_product
from torch import Tensor

from pkg.testing import Sample
from pkg.testing.tolerance import expect

Operators = torch._ops._OpNamespace
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def check_pointwise(operators: Operators, name: str, sample: Sample) -> None:
    """Against the reference; the strides are those of the CPU's operator."""
    result = getattr(operators, name)(*sample.args)
    reference = getattr(references, name)
    (expected,) = expect(lambda each: [reference(*each.args)], sample)
    expected.compare(result, f"{name} of {sample}")
    assert result.stride() == getattr(torch.ops.pkg, name)(*sample.args).stride()


@pytest.mark.parametrize(("name", "extra"), [("mul", ()), ("muladd", (0.25,))])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_pointwise(
    emulated_operators: Operators, name: str, extra: tuple[float, ...], dtype: torch.dtype
) -> None:
    for sample in binary_samples(*extra):
        check_pointwise(emulated_operators, name, sample.converted(dtype))


@pytest.mark.parametrize(("name", "extra"), [("mul", ()), ("muladd", (0.25,))])
def test_pointwise_of_mixed_dtypes(
    emulated_operators: Operators, name: str, extra: tuple[float, ...]
) -> None:
    for sample in mixed_samples(*extra):
        check_pointwise(emulated_operators, name, sample)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_d_sigmoid(emulated_operators: Operators, dtype: torch.dtype) -> None:
    for shape in [(), (0,), (7,), (1030,), (33, 70)]:
        z = (3 * torch.randn(shape, dtype=torch.float64)).to(dtype)
        grad = torch.randn(shape, dtype=torch.float64).to(dtype)
        for each in (z, z.mT if z.dim() == 2 else z):
            check_pointwise(emulated_operators, "d_sigmoid", Sample((each,)))
            gradient = grad.reshape(each.shape)
            check_pointwise(emulated_operators, "d_sigmoid_backward", Sample((gradient, each)))


def test_add_out(emulated_operators: Operators) -> None:
    for out_dtype in [torch.float64, torch.float16, torch.int64, torch.int8, torch.bool]:
        dtype = out_dtype if out_dtype != torch.int8 else torch.int32
        a = (4 * torch.randn(5, 33)).to(dtype)
        b = (4 * torch.randn(33)).to(dtype)
        storage = torch.zeros(10, 99).to(out_dtype)
        for out in (torch.empty(5, 33, dtype=out_dtype), storage[::2, ::3]):
            emulated_operators.add_out(a, b, out=out)
            torch.testing.assert_close(out, (a + b).to(out_dtype), rtol=0, atol=0)
    a = torch.randn(300)
    expected = a + a
    emulated_operators.add_out(a, a, out=a)
    assert torch.equal(a, expected)


def test_formulas_of_integers(emulated_operators: Operators) -> None:
    integer_formulas.check(emulated_operators)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((5,), (5,)),
        ((3, 5), (5,)),
        ((5,), (5, 4)),
        ((130, 5), (5, 131)),
        ((2, 1, 3, 5), (4, 5, 7)),
        ((2, 3, 5), (5,)),
        ((0, 5), (5, 3)),
        ((3, 0), (0, 4)),
        ((2, 0, 3, 5), (5, 4)),
    ],
)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8], ids=name_of)
def test_matmul(
    emulated_operators: Operators, a: tuple[int, ...], b: tuple[int, ...], dtype: torch.dtype
) -> None:
    left = (4 * torch.randn(a, dtype=torch.float64)).to(dtype)
    right = (4 * torch.randn(b, dtype=torch.float64)).to(dtype)
    out_dtypes = [torch.int32] if dtype == torch.int8 else [None, dtype]
    out_dtypes += [torch.float32] if dtype in (torch.float16, torch.bfloat16) else []
    for out_dtype in out_dtypes:
        result = emulated_operators.matmul(left, right, out_dtype=out_dtype)
        assert result.shape == torch.matmul(left.float(), right.float()).shape
        assert result.dtype == (out_dtype or dtype)
        assert_product(result, left, right)
        assert_product(torch.ops.pkg.matmul(left, right, out_dtype=out_dtype), left, right)
    if left.dim() > 1 and right.dim() > 1 and dtype != torch.int8:
        result = emulated_operators.matmul(right.mT, left.mT)
        assert_product(result, right.mT, left.mT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name_of)
def test_products_of_large_tiles(emulated_operators: Operators, dtype: torch.dtype) -> None:
    """Where these take less time on the emulated device, of 3 multiprocessors."""
    left, right = torch.randn(250, 37, dtype=dtype), torch.randn(37, 380, dtype=dtype)
    assert_product(emulated_operators.matmul(left, right), left, right)
    bias = torch.randn(380, dtype=dtype)
    output = emulated_operators.linear(left, right.mT, bias, "gelu")
    assert_linear(output, left, right.mT, bias, "gelu")


WARPGROUP_THREADS = 384


@pytest.fixture
def capability_90(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated device is one of compute capability 9.0."""
    monkeypatch.setenv("PKG_EMULATED_CAPABILITY", "90")


@pytest.mark.usefixtures("capability_90")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8], ids=name_of)
def test_matmul_by_warpgroups(
    emulated_operators: Operators, launched_threads: Callable[[], int], dtype: torch.dtype
) -> None:
    """Tiles of both widths, a batch, one whose operand is the same for all; several tiles a block.

    The emulated device has 3 multiprocessors.
    """
    out_dtypes = [torch.int32] if dtype == torch.int8 else [None, torch.float32]
    for a, b in (((64, 48), (48, 400)), ((3, 40, 32), (3, 32, 24)), ((16,), (2, 16, 136))):
        left = (4 * torch.randn(a)).to(dtype)
        right = (4 * torch.randn(b)).to(dtype)
        if dtype == torch.int8:
            right = right.mT.contiguous().mT
        for out_dtype in out_dtypes:
            result = emulated_operators.matmul(left, right, out_dtype=out_dtype)
            assert launched_threads() == WARPGROUP_THREADS
            assert_product(result, left, right)


@pytest.mark.usefixtures("capability_90")
def test_int8_of_any_strides_by_warpgroups(
    emulated_operators: Operators, launched_threads: Callable[[], int]
) -> None:
    """Of a large product what the copy engine does not take is copied, of a small one not."""

    def make(*shape: int) -> Tensor:
        return torch.randint(-128, 128, shape, dtype=torch.int8)

    for left, right in (
        (make(514, 512), make(512, 520)),
        (make(512, 514).mT, make(512, 1026)[:, 1::2]),
        (make(514, 528)[:, 1:513], make(2, 512, 512)),
    ):
        result = emulated_operators.matmul(left, right, out_dtype=torch.int32)
        assert launched_threads() == WARPGROUP_THREADS
        assert_product(result, left, right)
    for left, right in ((make(514, 520), make(520, 513)), (make(100, 512), make(512, 520))):
        result = emulated_operators.matmul(left, right, out_dtype=torch.int32)
        assert launched_threads() != WARPGROUP_THREADS
        assert_product(result, left, right)


@pytest.mark.usefixtures("capability_90")
@pytest.mark.parametrize("both", [False, True])
def test_a_matrix_of_int8_that_a_batch_shares_is_copied_once(
    emulated_operators: Operators, launched_threads: Callable[[], int], both: bool
) -> None:
    """Of operands that are expanded, one or both; there are two batches of each matrix."""
    left, right = torch.randint(-128, 128, (2, 512, 513), dtype=torch.int8)
    left, right = left[:, 1:], right[:, 1:]
    a = left.expand(2, 512, 512) if both else torch.stack([left, left.flip(0)])
    with torch.profiler.profile(record_shapes=True) as profile:
        result = emulated_operators.matmul(a, right.expand(2, 512, 512), out_dtype=torch.int32)
    copies = [event.input_shapes[0] for event in profile.events() if event.name == "aten::copy_"]
    assert copies == [[1, 512, 512]] * (2 if both else 1)
    assert launched_threads() == WARPGROUP_THREADS
    assert_product(result, a, right)


@pytest.mark.usefixtures("capability_90")
def test_a_product_divided_among_warpgroups(
    emulated_operators: Operators, launched_threads: Callable[[], int]
) -> None:
    """One tile of 16 panels, whose parts another kernel adds up."""
    left, right = torch.randn(24, 1024).bfloat16(), torch.randn(1024, 16).bfloat16()
    assert_product(emulated_operators.matmul(left, right), left, right)
    assert launched_threads() != WARPGROUP_THREADS
    wide = emulated_operators.matmul(left, right, out_dtype=torch.float32)
    assert_product(wide, left, right)


def test_products_that_warpgroups_do_not_make(
    emulated_operators: Operators,
    launched_threads: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On other devices, of operands that are no boxes, and where the user turns them off."""
    left, right = torch.randn(24, 32).bfloat16(), torch.randn(32, 16).bfloat16()

    def threads_of(*operands: Tensor) -> int:
        assert_product(emulated_operators.matmul(*operands), *operands)
        return launched_threads()

    assert threads_of(left, right) != WARPGROUP_THREADS
    monkeypatch.setenv("PKG_EMULATED_CAPABILITY", "90")
    assert threads_of(left, right) == WARPGROUP_THREADS
    assert threads_of(left[:, 1:], right[1:]) != WARPGROUP_THREADS
    assert threads_of(left[:, ::2], right[::2]) != WARPGROUP_THREADS
    assert threads_of(left.float(), right.float()) != WARPGROUP_THREADS
    monkeypatch.setenv("PKG_EMULATED_CAPABILITY", "100")
    assert threads_of(left, right) != WARPGROUP_THREADS
    monkeypatch.setenv("PKG_EMULATED_CAPABILITY", "90")
    monkeypatch.setenv("PKG_CUDA_WARPGROUPS", "0")
    assert threads_of(left, right) != WARPGROUP_THREADS


def test_float32_in_tf32(
    emulated_operators: Operators, choose_float32_products: Callable[[int], None]
) -> None:
    """Whole and divided products of every operator that follows the setting, and back again."""
    for a, b in (((70, 40), (40, 72)), ((3, 3, 33), (33, 5)), ((9, 600), (600, 7)), ((9,), (9,))):
        left, right = torch.randn(a), torch.randn(b)
        packed = emulated_operators.pack_linear_weight(right.mT) if right.dim() == 2 else None

        def results(
            left: Tensor = left, right: Tensor = right, packed: Tensor | None = packed
        ) -> Iterator[Tensor]:
            yield emulated_operators.matmul(left, right, out_dtype=None)
            if packed is not None:
                yield emulated_operators.linear(left, right.mT, None, None)
                yield emulated_operators.linear_forward(left, right.mT, None, None)[0]
                yield emulated_operators.packed_linear(left, packed, right.shape[1], None, None)

        choose_float32_products(1)
        for result in results():
            tf32.assert_product(result, left, right)
        choose_float32_products(0)
        for result in results():
            assert_product(result, left, right)


@pytest.mark.usefixtures("capability_90")
def test_float32_in_tf32_by_warpgroups(
    emulated_operators: Operators,
    choose_float32_products: Callable[[int], None],
    launched_threads: Callable[[], int],
) -> None:
    """Of operands as they are and of transposes of them; divided where there are few tiles."""
    choose_float32_products(1)

    def check(a: Tensor, b: Tensor, by_warpgroups: bool) -> None:
        tf32.assert_product(emulated_operators.matmul(a, b, out_dtype=None), a, b)
        assert (launched_threads() == WARPGROUP_THREADS) == by_warpgroups

    def by_columns(matrix: Tensor) -> Tensor:
        return matrix.mT.contiguous().mT

    left, right = torch.randn(384, 256), by_columns(torch.randn(256, 256))
    for a in (left, by_columns(left)):
        for b in (right, right.contiguous()):
            check(a, b, by_warpgroups=True)
    check(left[:20, :32], right[:32, :36], by_warpgroups=True)
    # What the copy engine does not take, nor the transpose of it.
    check(torch.randn(384, 257)[:, :256], right, by_warpgroups=False)
    # Nothing is summed.
    for a in (torch.randn(384, 0), torch.randn(0, 384).mT):
        check(a, torch.randn(0, 256), by_warpgroups=False)
    # The last launch adds the parts up.
    check(torch.randn(128, 1056), torch.randn(128, 1056).mT, by_warpgroups=False)


@pytest.mark.usefixtures("capability_90")
def test_float32_by_six_products(
    emulated_operators: Operators,
    choose_float32_products: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it takes less time than multiply-adds, of which the bits tell it, and is as exact.

    Of operands that lie in any way; not where the user turns it off, the product is small, the
    device is another, or there are numbers that three parts do not make: those get what
    multiply-adds give them.
    """
    left, right, bias = torch.randn(300, 256), torch.randn(256, 260), torch.randn(260)
    packed = emulated_operators.pack_linear_weight(right.mT)

    def results(left: Tensor = left, right: Tensor = right) -> list[Tensor]:
        weight = right.mT
        linear = emulated_operators.linear_forward(left, weight, bias, "gelu")
        return [
            emulated_operators.matmul(left, right),
            emulated_operators.matmul(left.mT.contiguous().mT, right[:, 1:]),
            emulated_operators.linear(left, weight, None, "relu"),
            *linear,
            emulated_operators.packed_linear(left, packed, 260, bias, None),
        ]

    small = left[:60], right[:, :60]
    by_multiply_adds, small_product = results(), emulated_operators.matmul(*small)
    choose_float32_products(6)
    by_six = results()
    for six, plain in zip(by_six, by_multiply_adds, strict=True):
        assert not torch.equal(six, plain)
    assert_product(by_six[0], left, right)
    assert_product(by_six[1], left, right[:, 1:])
    assert_linear(by_six[2], left, right.mT, None, "relu")
    assert_linear(by_six[3], left, right.mT, bias, "gelu")
    assert_linear(by_six[4], left, right.mT, bias, "none")
    assert_linear(by_six[5], left, right.mT, bias, "none")
    assert torch.equal(emulated_operators.matmul(*small), small_product)

    for value in (torch.inf, torch.nan, 3.4e38, 1.2345e-36):
        special = left.clone()
        special[7, 3] = value
        found = results(special)
        choose_float32_products(0)
        for result, expected in zip(found, results(special), strict=True):
            torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
        choose_float32_products(6)

    for variable, value in (("PKG_EMULATED_CAPABILITY", "80"), ("PKG_CUDA_WARPGROUPS", "0")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            for result, expected in zip(results(), by_multiply_adds, strict=True):
                assert torch.equal(result, expected)


@pytest.mark.usefixtures("capability_90")
def test_six_products_divided(
    emulated_operators: Operators, choose_float32_products: Callable[[int], None]
) -> None:
    """One tile of a long summed dimension, whose parts another kernel adds up."""
    left, right = torch.randn(128, 6400), torch.randn(6400, 128)
    by_multiply_adds = emulated_operators.matmul(left, right)
    choose_float32_products(6)
    result = emulated_operators.matmul(left, right)
    assert not torch.equal(result, by_multiply_adds)
    assert_product(result, left, right)


def test_few_rows_of_float32_are_never_rounded(
    emulated_operators: Operators, choose_float32_products: Callable[[int], None]
) -> None:
    """By multiply-adds, which take no longer: and so it is seen which products have few rows.

    Of a weight that lies along either dimension, of a batch, of divided products, and of a matrix
    by a vector.
    """
    choose_float32_products(1)
    for rows, depth, columns in (
        (1, 40, 72),
        (8, 40, 72),
        (3, 4, 1),
        (1, 8200, 3),
        (2, 8200, 12),
        (300, 40, 1),
        (2, 8196, 1),
    ):
        for batch in ((), (3,)):
            left = torch.randn(*batch, rows, depth)
            for right in (
                torch.randn(*batch, columns, depth).mT,
                torch.randn(*batch, depth, (columns + 3) // 4 * 4)[..., :columns],
            ):
                if rows <= 8 or right.stride(-2) == 1:
                    result = emulated_operators.matmul(left, right)
                    assert_product(result, left, right)
    left, vector = torch.randn(40, 72).mT, torch.randn(40)
    for given in (left, left[:67], left.contiguous()):
        assert_product(emulated_operators.matmul(given, vector), given, vector)
    nine = torch.randn(9, 40)
    with pytest.raises(AssertionError):
        assert_product(emulated_operators.matmul(nine, left.mT), nine, left.mT)


FEW_ROWS_THREADS = 256


@pytest.mark.parametrize("capability", ["80", "90"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_matmul_of_few_rows_in_half_precision(
    emulated_operators: Operators,
    launched_threads: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    capability: str,
) -> None:
    """Before warpgroups and tiles are asked; up to four rows where the weight lies by columns."""
    monkeypatch.setenv("PKG_EMULATED_CAPABILITY", capability)
    for rows, is_few in (
        (1, (True, True)),
        (4, (True, True)),
        (8, (True, False)),
        (9, (False,) * 2),
    ):
        left = torch.randn(rows, 264).to(dtype)
        for right, expected in zip(
            (torch.randn(40, 264).to(dtype).mT, torch.randn(264, 40).to(dtype)), is_few, strict=True
        ):
            for out_dtype in (None, torch.float32):
                result = emulated_operators.matmul(left, right, out_dtype=out_dtype)
                assert_product(result, left, right)
                assert (launched_threads() == FEW_ROWS_THREADS) == expected
    matrix, vector = torch.randn(2, 70, 264).to(dtype), torch.randn(264).to(dtype)
    assert_product(emulated_operators.matmul(matrix, vector), matrix, vector)
    assert launched_threads() == FEW_ROWS_THREADS
    matrix = torch.randn(264, 72).to(dtype).mT
    assert_product(emulated_operators.matmul(matrix, vector), matrix, vector)
    assert launched_threads() == FEW_ROWS_THREADS


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_linear_of_few_rows(
    emulated_operators: Operators, activation: str | None, dtype: torch.dtype
) -> None:
    """Whole and divided, packed, and of one column, which all rows share the bias of."""
    divided = 8 * 8 * 32 * 16 // dtype.itemsize
    for shape, columns in (((1, 264), 40), ((2, 2, 264), 37), ((2, divided), 3), ((70, 264), 1)):
        input = torch.randn(shape, dtype=torch.float64).to(dtype)
        weight = torch.randn(columns, shape[-1], dtype=torch.float64).to(dtype)
        packed = emulated_operators.pack_linear_weight(weight)
        for bias in (None, torch.randn(columns, dtype=torch.float64).to(dtype)):
            result, kept = emulated_operators.linear_forward(input, weight, bias, activation)
            assert_linear(result, input, weight, bias, activation or "none")
            if activation not in (None, "relu"):
                assert_linear(kept, input, weight, bias, "none")
            multiplied = emulated_operators.packed_linear(input, packed, columns, bias, activation)
            assert_linear(multiplied, input, weight, bias, activation or "none")


def test_float64_is_not_made_in_tf32(
    emulated_operators: Operators, choose_float32_products: Callable[[int], None]
) -> None:
    choose_float32_products(1)
    left, right = torch.randn(7, 40).double(), torch.randn(40, 9).double()
    assert_product(emulated_operators.matmul(left, right), left, right)


@pytest.mark.usefixtures("capability_90")
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_linear_by_warpgroups(
    emulated_operators: Operators,
    launched_threads: Callable[[], int],
    activation: str | None,
    dtype: torch.dtype,
) -> None:
    """With a weight as it is and packed, whose columns are neighbours."""
    input, weight, bias = (
        torch.randn(shape).to(dtype) for shape in ((2, 70, 40), (136, 40), (136,))
    )
    packed = emulated_operators.pack_linear_weight(weight)
    for added in (None, bias):
        output, kept = emulated_operators.linear_forward(input, weight, added, activation)
        assert launched_threads() == WARPGROUP_THREADS
        assert_linear(output, input, weight, added, activation or "none")
        if activation not in (None, "relu"):
            assert_linear(kept, input, weight, added, "none")
        multiplied = emulated_operators.packed_linear(input, packed, 136, added, activation)
        assert launched_threads() == WARPGROUP_THREADS
        assert torch.equal(multiplied, output)


@pytest.mark.parametrize(
    ("input", "weight"),
    [
        ((3, 5), (4, 5)),
        ((5,), (4, 5)),
        ((2, 130, 5), (131, 5)),
        ((5,), (5,)),
        ((2, 3, 5), (5,)),
        ((0, 5), (4, 5)),
        ((3, 0), (4, 0)),
        ((3, 5), (0, 5)),
    ],
)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_linear(
    emulated_operators: Operators,
    input: tuple[int, ...],
    weight: tuple[int, ...],
    activation: str | None,
    dtype: torch.dtype,
) -> None:
    rows, matrix, bias = (
        torch.randn(shape, dtype=torch.float64).to(dtype) for shape in (input, weight, weight[:-1])
    )
    for given in (rows, rows.transpose(0, -1).contiguous().transpose(0, -1)):
        for added in (None, bias):
            result = emulated_operators.linear(given, matrix, added, activation)
            assert (
                result.stride() == torch.ops.pkg.linear(given, matrix, added, activation).stride()
            )
            forward = emulated_operators.linear_forward(given, matrix, added, activation)
            assert torch.equal(forward[0], result)
            two_dimensions = matrix if matrix.dim() == 2 else matrix.unsqueeze(0)
            column = None if added is None else added.reshape(-1)
            name = activation or "none"
            shape = (*given.shape[:-1], len(two_dimensions))
            assert_linear(result.reshape(shape), given, two_dimensions, column, name)
            if activation in (None, "relu"):
                assert forward[1].shape == (0,)
            else:
                kept = forward[1].reshape(shape)
                assert_linear(kept, given, two_dimensions, column, "none")
                gradient = torch.randn_like(forward[1])
                check_pointwise(
                    emulated_operators,
                    "linear_activation_backward",
                    Sample((gradient, forward[1], activation)),
                )
            if matrix.dim() == 2:
                packed = emulated_operators.pack_linear_weight(matrix)
                assert packed.shape == torch.ops.pkg.pack_linear_weight(matrix).shape
                multiplied = emulated_operators.packed_linear(
                    given, packed, len(matrix), added, activation
                )
                assert_linear(multiplied, given, matrix, added, name)


def forward(operators: Operators, call: Call) -> attention.Outputs:
    return operators.scaled_dot_product_attention_forward(
        call.query, call.key, call.value, *options_of(call), True, *extras_of(call)
    )


def options_of(call: Call) -> tuple[object, ...]:
    seed = attention.SEED if call.dropout > 0 else None
    return (call.mask, seed, call.dropout, call.is_causal, call.scale, call.enable_gqa)


def extras_of(call: Call) -> tuple[object, ...]:
    return (call.slopes, *call.window, call.softcap)


def backward(operators: Operators, call: Call, outputs: attention.Outputs) -> tuple[Tensor, ...]:
    mask, seed, *options = options_of(call)
    needs_mask_grad = call.mask is not None and call.mask.is_floating_point()
    assert call.grad_output is not None
    return operators.scaled_dot_product_attention_backward(
        call.grad_output.reshape(outputs[0].shape),
        call.query,
        call.key,
        call.value,
        mask,
        seed,
        *outputs,
        *options,
        needs_mask_grad,
        *extras_of(call),
    )


@pytest.mark.usefixtures("unwritten_memory_is_not_zero")
@pytest.mark.parametrize(("heads", "divides"), [(1, True), (12, False)])
def test_attention_of_divided_keys(
    emulated_operators: Operators,
    launched_threads: Callable[[], int],
    heads: int,
    divides: bool,
) -> None:
    """Of one tile of queries on three multiprocessors, and of enough for them."""
    mask = torch.rand(100, 640) > 0.3
    call = attention.make(heads, rows=100, columns=640, head=32, mask=mask)
    outputs = forward(emulated_operators, call)
    exact = attention.exact_results(call)
    bounds = attention.bounds_of(call, exact)
    attention.assert_near(attention.RESULTS[:2], outputs, exact, bounds)
    # The last launch is of the combination where there are parts.
    assert launched_threads() == (64 if divides else 128)


@pytest.mark.usefixtures("unwritten_memory_is_not_zero")
@pytest.mark.parametrize("key_heads", [0, 2])
def test_attention_without_query_heads(emulated_operators: Operators, key_heads: int) -> None:
    """No matrix of scores has a part in the gradients of the key heads: they are zero."""
    query, key = torch.randn(2, 0, 3, 4), torch.randn(2, key_heads, 5, 4)
    options = (None, None, 0.0, False, None, True)
    outputs = emulated_operators.scaled_dot_product_attention_forward(
        query, key, key, *options, True
    )
    assert outputs[0].shape == query.shape
    gradients = emulated_operators.scaled_dot_product_attention_backward(
        query, query, key, key, *options[:2], *outputs, *options[2:], False
    )
    assert [gradient.shape for gradient in gradients[:3]] == [query.shape, key.shape, key.shape]
    assert all((gradient == 0).all() for gradient in gradients[1:3])


@pytest.mark.usefixtures("unwritten_memory_is_not_zero")
@pytest.mark.parametrize("key_heads", [0, 2])
def test_packed_attention_without_query_heads(
    emulated_operators: Operators, key_heads: int
) -> None:
    query, key = torch.randn(3, 0, 4), torch.randn(5, key_heads, 4)
    inputs = (query, key, key, torch.tensor([0, 3]), torch.tensor([0, 5]), None)
    options = (3, 5, 0.0, None, False)
    outputs = emulated_operators.scaled_dot_product_attention_varlen_forward(
        *inputs, *options, True
    )
    assert outputs[0].shape == query.shape
    gradients = emulated_operators.scaled_dot_product_attention_varlen_backward(
        query, *inputs, *outputs, *options
    )
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, key.shape]
    assert all((gradient == 0).all() for gradient in gradients[1:])


make = attention.make
MOST = 2**63 - 1
CALLS = {
    "plain": lambda: make(2, 3, rows=9, columns=70, head=5, value_head=6),
    "no leading dimension": lambda: make(rows=9, columns=70),
    "causal": lambda: make(2, rows=70, columns=66, is_causal=True),
    "scale": lambda: make(2, rows=3, columns=5, scale=-0.25),
    "wide heads": lambda: make(2, head=65, value_head=130),
    "wide values": lambda: make(2, head=5, value_head=130),
    "bool mask": lambda: make(2, 3, mask=torch.rand(3, 1, 7) > 0.4),
    "mask": lambda: make(2, 3, mask=torch.randn(2, 1, 5, 7)),
    "mask of keys": lambda: make(2, 3, mask=torch.randn(7)),
    "mask of queries": lambda: make(2, 3, mask=torch.randn(5, 1)),
    "mask of a single number": lambda: make(2, 3, mask=torch.randn(())),
    "mask with steps": lambda: make(2, 3, mask=torch.randn(2, 3, 5, 14)[..., ::2]),
    "dropout": lambda: make(2, 3, dropout=0.4),
    "everything dropped": lambda: make(2, 3, dropout=1.0),
    "groups": lambda: make(2, 6, key_lead=(2, 2), enable_gqa=True),
    "groups of one key head": lambda: make(2, 6, key_lead=(2, 1), enable_gqa=True),
    "groups of one query": lambda: make(2, 3, enable_gqa=True),
    "groups, mask of heads": lambda: make(
        2, 6, key_lead=(2, 2), enable_gqa=True, mask=torch.randn(6, 5, 7)
    ),
    "groups, mask, dropout": lambda: make(
        2, 4, key_lead=(2, 2), enable_gqa=True, mask=torch.randn(2, 1, 1, 7), dropout=0.3
    ),
    "query without heads": lambda: broadcast((2, 1), (2, 3), (2, 3)),
    "key without batch": lambda: broadcast((2, 3), (3,), (3,)),
    "all different": lambda: broadcast((1, 3), (2, 1), (3,)),
    "value with a batch of its own": lambda: broadcast((3,), (), (2, 1)),
    "heads inside": lambda: heads_inside(make(2, 3, rows=9, columns=70, head=8)),
    "window": lambda: make(2, 3, rows=70, columns=200, window=(66, 0)),
    "window, causal": lambda: make(rows=70, columns=200, window=(100, 140), is_causal=True),
    "window of all": lambda: make(2, 3, rows=9, columns=70, window=(MOST, MOST)),
    "window of all, few keys": lambda: make(2, rows=70, columns=9, window=(MOST, MOST)),
    "softcap": lambda: make(2, 3, softcap=0.7, mask=torch.randn(2, 1, 5, 7)),
    "softcap, wide heads": lambda: make(2, head=65, value_head=130, softcap=0.7),
    "slopes of heads": lambda: make(2, 3, slopes=torch.rand(3)),
    "slopes of batches": lambda: make(2, 3, slopes=torch.rand(2, 6)[:, ::2]),
    "slopes, groups": lambda: make(
        2, 6, key_lead=(2, 2), enable_gqa=True, slopes=torch.rand(2, 1).expand(2, 6)
    ),
    "one slope": lambda: make(slopes=torch.tensor(0.25)),
    "no keys": lambda: make(2, 3, columns=0),
    "no queries": lambda: make(2, 3, rows=0),
    "no batch": lambda: make(0, 3),
}


def broadcast(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> Call:
    call = Call(torch.randn(*query, 5, 6), torch.randn(*key, 7, 6), torch.randn(*value, 7, 4))
    return replace(call, grad_output=torch.randn(call.output_shape))


def heads_inside(call: Call) -> Call:
    def arrange(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)

    return replace(
        call, query=arrange(call.query), key=arrange(call.key), value=arrange(call.value)
    )


def converted(call: Call, dtype: torch.dtype) -> Call:
    def convert(tensor: Tensor | None) -> Tensor | None:
        return tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor

    names = ("query", "key", "value", "mask", "grad_output")
    return replace(call, **{each: convert(getattr(call, each)) for each in names})


@pytest.mark.parametrize(("dtype", "name"), some_of_each_dtype(FLOATS, CALLS))
def test_attention_is_that_of_the_kernels(
    cuda_emulator: Emulator,
    emulated_operators: Operators,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    dtype: torch.dtype,
) -> None:
    """To the last bit: what the host code passes is what the tests of the kernels pass."""
    monkeypatch.setenv("PKG_CUDA_FEW_QUERIES", "0")
    call = converted(CALLS[name](), dtype)
    outputs = forward(emulated_operators, call)
    # Two tiles of queries are too few for three multiprocessors, and there are two of keys.
    divides = name == "causal" and dtype == torch.float32
    options = {"copied_panels": True, "key_parts": 2} if divides else {}
    expected = attention.emulated_forward(cuda_emulator, call, **options)
    for output, each in zip(outputs, expected, strict=True):
        assert torch.equal(output, each.reshape(output.shape))

    gradients = backward(emulated_operators, call, outputs)
    if call.mask is None or not call.mask.is_floating_point():
        assert gradients[3].shape == (0,)
        gradients = gradients[:3]
    expected_gradients = attention.emulated_backward(cuda_emulator, call, expected)
    for gradient, each in zip(gradients, expected_gradients, strict=True):
        assert torch.equal(gradient, each)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name_of)
@pytest.mark.parametrize("few_queries", ["0", "1"])
def test_attention_agrees_with_the_cpu(
    emulated_operators: Operators,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    dtype: torch.dtype,
    few_queries: str,
) -> None:
    """Two right results are at most the sum of their errors apart.

    In half precision the CPU's kernels round weights that the CUDA kernels do not.
    """
    monkeypatch.setenv("PKG_CUDA_FEW_QUERIES", few_queries)
    call = converted(CALLS[name](), dtype)
    results = []
    for operators in (emulated_operators, torch.ops.pkg):
        outputs = forward(operators, call)
        results.append([*outputs[:2], *backward(operators, call, outputs)])
    if call.columns == 0:  # everything is zero, and no bound is needed
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        return
    exact = attention.exact_results(call)
    for bound, ours, theirs in zip(attention.bounds_of(call, exact), *results, strict=False):
        assert ours.dtype == theirs.dtype
        error = (ours.double() - theirs.double()).abs().reshape(bound.shape)
        assert ((error <= 2 * bound) | (ours == theirs).reshape(bound.shape)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize(
    "options", [{}, {"key_lead": (2, 2), "enable_gqa": True, "is_causal": True}], ids=str
)
def test_attention_forward_by_warpgroups(
    emulated_operators: Operators,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, object],
    dtype: torch.dtype,
) -> None:
    """Where the device has their products, and unless they are turned off; heads lie inside."""
    call = heads_inside(make(2, 6, rows=140, columns=150, head=64, dtype=dtype, **options))
    without = forward(emulated_operators, call)
    monkeypatch.setenv("PKG_EMULATED_CAPABILITY", "90")
    outputs = forward(emulated_operators, call)
    assert not torch.equal(outputs[1], without[1])  # sums in another order
    exact = attention.exact_results(call)
    bounds = attention.bounds_of(call, exact)
    for output, value, bound in zip(outputs[:2], exact, bounds, strict=False):
        assert ((output.reshape(value.shape).double() - value).abs() <= bound).all()
    monkeypatch.setenv("PKG_CUDA_WARPGROUPS", "0")
    for output, each in zip(forward(emulated_operators, call), without, strict=True):
        assert torch.equal(output, each)


def test_attention_by_copied_panels(
    emulated_operators: Operators,
    monkeypatch: pytest.MonkeyPatch,
    launched_threads: Callable[[], int],
) -> None:
    """Where these take less time on the emulated device, and unless they are turned off."""
    call = make(6, rows=128, columns=150, head=64)
    outputs = forward(emulated_operators, call)
    assert launched_threads() == 128
    monkeypatch.setenv("PKG_CUDA_COPIED_ATTENTION", "0")
    small = forward(emulated_operators, call)
    assert launched_threads() == 64
    assert all(torch.equal(*pair) for pair in zip(outputs, small, strict=True))


@pytest.mark.usefixtures("capability_90")
def test_gradients_by_copied_panels(
    emulated_operators: Operators,
    cuda_emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a block has the memory, and unless they are turned off: the same bits."""
    call = make(2, 8, rows=70, columns=70, head=72)
    outputs = forward(emulated_operators, call)
    gradients = backward(emulated_operators, call, outputs)
    options = {"shared_bytes": 227 * 1024, "joint": True, "copied_panels": True}
    copied = attention.emulated_backward(cuda_emulator, call, outputs, **options)
    assert all(torch.equal(*pair) for pair in zip(gradients, copied, strict=False))
    monkeypatch.setenv("PKG_CUDA_COPIED_ATTENTION", "0")
    others = backward(emulated_operators, call, outputs)
    assert all(torch.equal(*pair) for pair in zip(gradients, others, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize(
    "options", [{}, {"key_lead": (2, 2), "enable_gqa": True, "is_causal": True}], ids=str
)
def test_attention_backward_by_warpgroups(
    emulated_operators: Operators,
    monkeypatch: pytest.MonkeyPatch,
    launched_threads: Callable[[], int],
    options: dict[str, object],
    dtype: torch.dtype,
) -> None:
    """Where the device has their products, and unless they are turned off; heads lie inside."""
    call = heads_inside(make(2, 6, rows=70, columns=140, head=64, dtype=dtype, **options))
    outputs = forward(emulated_operators, call)
    without = backward(emulated_operators, call, outputs)
    monkeypatch.setenv("PKG_EMULATED_CAPABILITY", "90")
    gradients = backward(emulated_operators, call, outputs)
    assert launched_threads() == WARPGROUP_THREADS  # of the key's and the value's, the last
    exact = attention.exact_results(call)
    bounds = attention.bounds_of(call, exact)
    for gradient, value, bound in zip(gradients, exact[2:], bounds[2:], strict=False):
        assert ((gradient.reshape(value.shape).double() - value).abs() <= bound).all()
    monkeypatch.setenv("PKG_CUDA_WARPGROUPS", "0")
    for gradient, each in zip(backward(emulated_operators, call, outputs), without, strict=True):
        assert torch.equal(gradient, each)
    assert launched_threads() != WARPGROUP_THREADS


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0, "dropout": 0.2}], ids=["plain", "features"]
)
def test_attention_backward_by_one_kernel(
    emulated_operators: Operators,
    cuda_emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, object],
) -> None:
    """Where there are blocks for many rounds, and unless it is turned off."""
    options = {"rows": 70, "columns": 140, "head": 16, "dtype": torch.bfloat16, **options}
    call = make(2, 8, **options)
    outputs = forward(emulated_operators, call)
    gradients = backward(emulated_operators, call, outputs)
    joint = attention.emulated_backward(cuda_emulator, call, outputs, joint=True)
    assert all(torch.equal(*pair) for pair in zip(gradients, joint, strict=False))
    monkeypatch.setenv("PKG_CUDA_JOINT_GRADIENTS", "0")
    alone = backward(emulated_operators, call, outputs)
    assert not torch.equal(alone[0], gradients[0])  # sums in another order
    assert all(torch.equal(*pair) for pair in zip(alone[1:], gradients[1:], strict=True))


def test_attention_backward_by_one_kernel_of_warpgroups(
    emulated_operators: Operators,
    launched_threads: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where there are blocks for many rounds, and unless it is turned off."""
    monkeypatch.setenv("PKG_EMULATED_CAPABILITY", "90")
    call = make(1, 4, rows=130, columns=260, head=16, dtype=torch.bfloat16)
    few = make(1, 2, rows=130, columns=260, head=16, dtype=torch.bfloat16)
    for each, is_joint in ((call, True), (few, False)):
        each.key[..., 0] = 100  # for sums that cancel, and so depend on their order
        outputs = forward(emulated_operators, each)
        gradients = backward(emulated_operators, each, outputs)
        assert launched_threads() == WARPGROUP_THREADS
        with monkeypatch.context() as context:
            context.setenv("PKG_CUDA_JOINT_GRADIENTS", "0")
            alone = backward(emulated_operators, each, outputs)
        assert launched_threads() == WARPGROUP_THREADS
        assert torch.equal(alone[0], gradients[0]) != is_joint  # sums in another order
        assert all(torch.equal(*pair) for pair in zip(alone[1:], gradients[1:], strict=True))


@pytest.mark.parametrize(("options", "joint"), [({}, False), ({"window": (40, 30)}, True)])
def test_few_queries_of_many_keys_have_a_kernel_of_their_own(
    emulated_operators: Operators,
    cuda_emulator: Emulator,
    options: dict[str, object],
    joint: bool,
) -> None:
    """Unless they see few of them: blocks of keys that begin together wait for one another."""
    call = make(1, 4, rows=100, columns=300, head=8, dtype=torch.float16, **options)
    call.key[..., 0] = 100  # for sums that cancel, and so depend on their order
    outputs = forward(emulated_operators, call)
    gradients = backward(emulated_operators, call, outputs)
    for way in (False, True):
        others = attention.emulated_backward(cuda_emulator, call, outputs, joint=way)
        assert torch.equal(gradients[0], others[0]) == (way == joint)


@pytest.mark.usefixtures("capability_90")
def test_the_gradient_of_a_sum_is_copied(
    emulated_operators: Operators, launched_threads: Callable[[], int]
) -> None:
    """One number that was expanded; the kernels read rows of neighbours, and by warpgroups."""
    call = make(1, 2, rows=70, columns=70, head=16, dtype=torch.bfloat16)
    outputs = forward(emulated_operators, call)
    number = torch.full((), 0.5, dtype=torch.bfloat16).expand(call.output_shape)
    gradients = []
    for grad_output in (number, number.contiguous()):
        given = replace(call, grad_output=grad_output)
        gradients.append(backward(emulated_operators, given, outputs))
        assert launched_threads() == WARPGROUP_THREADS
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_a_float32_mask_of_halves_has_a_gradient(emulated_operators: Operators) -> None:
    call = make(2, 3, dtype=torch.float16, mask=torch.randn(5, 7))
    gradients = backward(emulated_operators, call, forward(emulated_operators, call))
    assert gradients[3].dtype == torch.float32
    exact = attention.exact_results(call)
    error = (gradients[3].double() - exact[-1]).abs()
    assert (error <= attention.bounds_of(call, exact)[-1]).all()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_dropout_mask(emulated_operators: Operators, dropout: float) -> None:
    for shape in [(2, 3, 5), (0, 3, 5), (1, 4, 64)]:
        result = emulated_operators.attention_dropout_mask(attention.SEED, *shape, dropout)
        expected = torch.ops.pkg.attention_dropout_mask(attention.SEED, *shape, dropout)
        assert torch.equal(result, expected)


def test_too_many_dimensions_are_refused_in_words(emulated_operators: Operators) -> None:
    # The outermost dimension has a stride and the others none: they are not one column of rows.
    shape = [1 if dim < 10 else 2 for dim in range(36)]
    a, b = torch.zeros([1] * 10 + [2] + [1] * 27).expand([*shape, 1, 1]), torch.zeros(1)
    with pytest.raises(RuntimeError, match="matmul: the inputs have 26 dimensions"):
        emulated_operators.matmul(a, b)
