"""The parts of pkg.testing: tolerances, exact products, sentinels, samples."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from samples import FLOATING, normal
from torch import Tensor

from pkg.testing import (
    LAYOUTS,
    ErrorSample,
    Expected,
    Sample,
    copy_of,
    expanded,
    expect,
    guarded,
    same_bits,
    tolerance,
    ulp,
)
from pkg.testing.exact import AccurateProducts, power_of_two
from pkg.testing.tolerance import rounding_of_a_sum


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product in rational arithmetic, rounded once."""

    def dot(row: list[float], column: list[float]) -> float:
        return float(sum(Fraction(x) * Fraction(y) for x, y in zip(row, column, strict=True)))

    rows, columns = a.tolist(), b.T.tolist()
    return torch.tensor([[dot(r, c) for c in columns] for r in rows], dtype=torch.float64)


@pytest.mark.parametrize("inner", [1, 2, 50, 3000])
def test_products_are_exact_to_the_last_place(inner: int) -> None:
    a, b = normal(3, inner) * normal(3, inner, seed=1).exp(), normal(inner, 4) * 1e3
    b[:, 0] *= 1e150
    b[:, 1] *= 1e-150
    expected = exact_product(a, b)
    with AccurateProducts():
        products = [a @ b, (a[None] @ b[None])[0], torch.stack([a @ b[:, i] for i in range(4)], 1)]
        products.append(torch.stack([torch.stack([r @ c for c in b.T]) for r in a]))
    for product in products:
        assert ((product - expected).abs() <= ulp(expected, torch.float64)).all()


def test_powers_of_two_are_exact() -> None:
    exponents = torch.arange(-1022, 1024)
    assert power_of_two(exponents).tolist() == [2.0**e for e in exponents.tolist()]
    assert power_of_two(torch.tensor(1024)) == torch.inf


def test_products_of_what_cannot_be_cut_are_the_plain_ones() -> None:
    a, b = normal(4, 5), normal(5, 3)
    a[0, 0], a[1, 1], a[2, 2] = torch.nan, torch.inf, 1e305
    with AccurateProducts():
        product, empty = a @ b, a[:, :0] @ b[:0]
    plain = a @ b
    assert same_bits(product[:2].isfinite(), plain[:2].isfinite())
    assert product[2:].isfinite().all()
    assert torch.equal(empty, torch.zeros(4, 3).double())


def test_gradients_go_through_accurate_products() -> None:
    a, b = normal(3, 4).requires_grad_(), normal(4, 5)
    with AccurateProducts():
        (gradient,) = torch.autograd.grad((a @ b).sum(), a)
    torch.testing.assert_close(gradient, b.sum(1).expand(3, 4))


@pytest.mark.parametrize("dtype", FLOATING)
def test_ulp_is_the_distance_to_the_next_value(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    values = [1.0, 1.5, 2.0, 3.0, -4.0, 1000.0, limits.smallest_normal, limits.max]
    assert ulp(torch.tensor(values).double(), dtype)[0] == limits.eps
    for value in values:
        unit = float(ulp(torch.tensor(value, dtype=torch.float64), dtype))
        exact = torch.tensor(value, dtype=dtype).double()
        toward_zero = (exact.abs() - unit).to(dtype).double()
        assert toward_zero < exact.abs()
        assert exact.abs() - toward_zero <= unit
    smallest = limits.smallest_normal * limits.eps
    assert float(ulp(torch.tensor(0.0).double(), dtype)) == smallest


@pytest.mark.parametrize("dtype", FLOATING)
def test_the_bound_admits_twice_the_plain_error_and_no_more(dtype: torch.dtype) -> None:
    sample = Sample((normal(40, 60).to(dtype), normal(60, 40).to(dtype)))
    (expected,) = expect(lambda given: [given.args[0] @ given.args[1]], sample)
    exact = expected.exact.to(dtype)
    expected.compare(exact, "exact")
    expected.compare(expected.plain, "plain")
    bound = 3 * expected.plain_error if dtype == torch.float64 else 2 * expected.plain_error
    wrong = expected.exact.clone()
    wrong[7, 9] += bound + 2 * max(ulp(wrong, dtype)[7, 9], rounding_of_a_sum(wrong, dtype))
    with pytest.raises(AssertionError, match=r"1 of 1600 elements are not; at \[7, 9\]"):
        expected.compare(wrong.to(dtype), "output")


@pytest.mark.parametrize("dtype", FLOATING)
def test_a_large_result_is_compared_in_parts_by_the_same_rule(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = Sample((normal(40, 60).to(dtype), normal(60, 40).to(dtype)))

    def product() -> Expected:
        return expect(lambda given: [given.args[0] @ given.args[1]], sample)[0]

    whole = product()
    monkeypatch.setattr(tolerance, "_PART", 100)
    parts = product()
    assert parts.plain_error == whole.plain_error
    floor = rounding_of_a_sum(whole.exact, dtype)
    # Accepted only with the rounding that the largest result allows, which is in another part.
    least = int(whole.exact.abs().argmin())
    factor = 3 if dtype == torch.float64 else 2
    largest = max(whole.plain_error, *whole.nearby_errors())
    for error, right in ((0.8, True), (2.5, False)):
        off = whole.exact.clone()
        off.view(-1)[least] += factor * largest + error * floor
        if right:
            parts.compare(off.to(dtype), "output")
        else:
            with pytest.raises(AssertionError, match="1 of 1600 elements are not"):
                parts.compare(off.to(dtype), "output")


@pytest.mark.parametrize("dtype", FLOATING)
def test_neighbours_are_evaluated_until_the_result_passes(dtype: torch.dtype) -> None:
    sample = Sample((normal(3, 40).to(dtype), normal(40, 2).to(dtype)))
    evaluated = 0

    def product(given: Sample) -> list[Tensor]:
        nonlocal evaluated
        evaluated += 1
        return [given.args[0] @ given.args[1]]

    (expected,) = expect(product, sample)
    before = evaluated
    expected.compare(expected.plain, "plain")
    assert evaluated == before, "none where the sample itself is enough"
    with pytest.raises(AssertionError, match="output must be within"):
        expected.compare(expected.plain + 1, "output")
    # Six elements each: the most inputs, the sample among them, and each plain and exact.
    assert evaluated == before + 2 * 63
    assert len(list(expected.nearby_errors())) == 63
    assert evaluated == before + 2 * 63, "each once"


def test_the_bound_grows_until_the_result_is_within() -> None:
    asked: list[float] = []

    def errors() -> Iterator[float]:
        for error in (1.0, 0.5, 3.0, 8.0):
            asked.append(error)
            yield error

    exact = torch.zeros(4, dtype=torch.float64)
    for off, needed in ((1e-9, []), (1.9, [1.0]), (5.9, [1.0, 0.5, 3.0]), (15.9, None), (17, None)):
        expected = Expected(exact, exact.float(), 1e-8, errors)
        asked.clear()
        if off > 16:
            with pytest.raises(AssertionError, match="within 2 times the plain error 8 plus"):
                expected.compare(exact.float() + off, "output")
        else:
            expected.compare(exact.float() + off, "output")
        assert asked == ([1.0, 0.5, 3.0, 8.0] if needed is None else needed)


def test_what_is_infinite_or_nan_must_be_so() -> None:
    values = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, 7e4, 6e4])
    (expected,) = expect(lambda given: [given.args[0] * 1], Sample((values.half(),)))
    expected.compare(values.half(), "output")
    inf, nan = torch.inf, torch.nan
    for position, wrong in ((0, nan), (1, 1.0), (2, inf), (3, inf), (5, inf)):
        changed = values.half()
        changed[position] = wrong
        with pytest.raises(AssertionError, match=rf"infinite or NaN .* at \[{position}\]"):
            expected.compare(changed, "output")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (2, 3, 4, 5), (0, 3), (3, 1)])
def test_a_layout_keeps_the_values(layout: object, shape: tuple[int, ...]) -> None:
    values = normal(*shape)
    placed = layout.place(values)
    assert torch.equal(placed.tensor, values)
    placed.assert_untouched("the tensor")
    copy = copy_of(placed.tensor)
    assert torch.equal(copy, values)
    assert copy.stride() == placed.tensor.stride()
    assert copy.storage_offset() == placed.tensor.storage_offset()
    if values.numel():
        placed.tensor.view(torch.int64)[...] = 0
        placed.assert_untouched_around("the tensor")
        with pytest.raises(AssertionError, match="the tensor was modified"):
            placed.assert_untouched("the tensor")


def test_every_byte_beside_a_tensor_is_watched() -> None:
    for step in (-64, -1, 6, 69):
        placed = guarded(torch.zeros(2, 3), misalign=1)
        placed.buffer[placed.tensor.storage_offset() + step] = 1
        with pytest.raises(AssertionError, match=f"4 bytes, the first {4 * step} bytes"):
            placed.assert_untouched("input")
        with pytest.raises(AssertionError, match="a write outside out"):
            placed.assert_untouched_around("out")
    gaps = guarded(torch.zeros(2, 3), strides=(7, 2))
    gaps.buffer[gaps.tensor.storage_offset() + 1] = 1
    with pytest.raises(AssertionError, match="a write outside out"):
        gaps.assert_untouched_around("out")


def test_alignment_is_broken_as_asked() -> None:
    for misalign in (0, 1, 3):
        address = guarded(torch.zeros(5), misalign=misalign).tensor.data_ptr()
        assert address % 64 == 4 * misalign


def test_an_expanded_tensor_repeats_its_first_slice() -> None:
    values = normal(3, 4)
    for axis in (0, 1):
        placed = expanded(values, axis)
        assert placed.tensor.stride(axis) == 0
        assert torch.equal(placed.tensor, values.narrow(axis, 0, 1).expand(3, 4))


def test_a_sample_converts_templates_alone() -> None:
    mask, index = torch.ones(2).bool(), torch.ones(2)
    sample = Sample((normal(2), [mask, index], 2.0), {"last": normal(3)}, name="call")
    half = sample.converted(torch.float16)
    assert [t.dtype for t in half.tensors] == [torch.half, torch.bool, torch.float32, torch.half]
    assert str(half) == "call (float16[2], [bool[2], float32[2]], 2.0, last=float16[3])"
    assert sample.converted(None) is sample
    assert same_bits(sample.with_tensors(sample.tensors).kwargs["last"], sample.kwargs["last"])


def test_same_bits_tells_zeros_apart() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert not same_bits(torch.zeros(2), torch.zeros(3))
    assert not same_bits(torch.zeros(2), torch.zeros(2).int())
    assert same_bits(torch.zeros(0), torch.zeros(0))


def test_the_bits_of_a_single_element_are_compared_whatever_its_stride() -> None:
    one = torch.tensor([1.0, 2.0])[::2]
    assert one.stride() == (2,)
    assert same_bits(one, torch.tensor([1.0]))
    assert not same_bits(one, torch.tensor([2.0]))


def test_what_is_to_be_refused_lies_on_another_device_as_it_did() -> None:
    memory = torch.ones(20)
    out = torch.ones(2, 3, requires_grad=True)
    sample = ErrorSample((memory[1:12:2], memory[:6], torch.ones(3).expand(2, 3)), {"out": out})
    moved = sample.to(torch.device("meta"))
    strided, first, expanded_one = moved.args
    assert {each.device.type for each in (*moved.args, moved.kwargs["out"])} == {"meta"}
    assert strided.untyped_storage()._cdata == first.untyped_storage()._cdata
    assert strided.untyped_storage()._cdata != expanded_one.untyped_storage()._cdata
    assert (strided.stride(), strided.storage_offset()) == ((2,), 1)
    assert expanded_one.stride() == (0, 1)
    assert moved.kwargs["out"].requires_grad
    assert sample.to(torch.device("cpu")).args[0] is sample.args[0]
