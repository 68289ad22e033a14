"""accelerate() draws what PyTorch draws for dropout, sooner."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import accelerate_tables
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pkg
from pkg import _accelerate_dropout, _accelerate_routes
from pkg.accelerate import Report

THEIRS = _accelerate_routes.original(_accelerate_dropout.BERNOULLI)
assert THEIRS is not None
LEAST = _accelerate_dropout.LEAST_ELEMENTS

draws = pytest.mark.usefixtures("drawn_as_pytorch")


@pytest.fixture
def drawn_as_pytorch() -> None:
    if not _accelerate_dropout.draws_as_pytorch(THEIRS):
        pytest.skip("PyTorch draws by MKL here")


@pytest.fixture(autouse=True)
def some_table() -> Iterator[None]:
    """One by which nothing else is taken."""
    with accelerate_tables.in_use(0.0):
        yield


def counted(report: Report, operator: str) -> tuple[int, int]:
    found = [each for each in report.counts if each.operator == operator]
    return sum(each.taken for each in found), sum(each.left for each in found)


def after(words: int, seed: int = 3) -> torch.Generator:
    """A generator that has drawn so many words."""
    generator = torch.Generator().manual_seed(seed)
    if words:
        torch.empty(words, dtype=torch.int32).random_(generator=generator)
    return generator


def theirs(tensor: Tensor, p: float, generator: torch.Generator | None = None) -> None:
    assert THEIRS is not None
    THEIRS(_accelerate_routes.CPU_KEYS, tensor, p, generator=generator)


@draws
@pytest.mark.parametrize("words", [0, 1, 2, 623, 624, 625, 1247])
@pytest.mark.parametrize("count", [1, 2, 311, 312, 313, 624, 19968, 19969, 60001])
def test_the_same_draws_from_every_place_in_a_block(count: int, words: int) -> None:
    """Elements and state; those behind it are drawn from several chunks."""
    for p in (0.0, 1e-20, 0.1, 1 / 3, 0.9, 1.0):
        ours, expected = (torch.empty(count) for _ in range(2))
        ours_from, expected_from = after(words), after(words)
        _accelerate_dropout.draw(ours, p, ours_from)
        theirs(expected, p, expected_from)
        assert torch.equal(ours, expected)
        assert torch.equal(ours_from.get_state(), expected_from.get_state())


@draws
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", _accelerate_dropout._DTYPES)
def test_every_dtype(dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours, expected = (torch.empty(70000, dtype=dtype) for _ in range(2))
        with pkg.accelerate(report=True) as block:
            assert ours.bernoulli_(0.7, generator=after(1)) is ours
            assert counted(block.report(), "bernoulli_") == (1, 0)
    finally:
        torch.set_num_threads(before)
    theirs(expected, 0.7, after(1))
    assert torch.equal(ours, expected)


@draws
def test_all_that_is_drawn_stays_what_it_was() -> None:
    """Of the default generator, before and behind dropout too; of odd numbers of normal ones."""
    x = torch.randn(3, 5000)

    def drawn() -> list[Tensor]:
        torch.manual_seed(11)
        made = [torch.randn(17), F.dropout(x, 0.4), torch.rand(3), F.dropout(x.bfloat16(), 0.1)]
        made += [F.dropout1d(x.view(3, 5000, 1), 0.5), F.alpha_dropout(x, 0.2, True)]
        return [*made, torch.randn(5), torch.randperm(9)]

    expected = drawn()
    with pkg.accelerate(report=True) as block:
        assert all(map(torch.equal, drawn(), expected))
        taken, _ = counted(block.report(), "bernoulli_")
    assert taken >= 3
    assert all(map(torch.equal, drawn(), expected))


@draws
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(LEAST - 1),
        lambda: torch.empty(0),
        lambda: torch.empty(200, 100).mT,
        lambda: torch.empty(20000)[::2],
        lambda: torch.empty(2, 8, 50, 50).contiguous(memory_format=torch.channels_last),
    ],
    ids=["few", "none", "transposed", "strided", "channels last"],
)
def test_what_is_left_to_pytorch(make: Callable[[], Tensor]) -> None:
    ours, expected = make(), make()
    with pkg.accelerate(report=True) as block:
        ours.bernoulli_(0.3, generator=after(0))
        assert counted(block.report(), "bernoulli_")[0] == 0
    theirs(expected, 0.3, after(0))
    assert torch.equal(ours, expected)


@draws
@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_errors_are_pytorch_s(p: float) -> None:
    x = torch.empty(2 * LEAST)
    with pytest.raises(RuntimeError, match="bernoulli_ expects p to be in") as expected:
        x.bernoulli_(p)
    with pkg.accelerate(), pytest.raises(RuntimeError) as told:
        x.bernoulli_(p)
    assert str(told.value) == str(expected.value)
    with pkg.accelerate(), pytest.raises(RuntimeError, match="leaf Variable"):
        x.requires_grad_().bernoulli_(0.5)


@draws
def test_threads_draw_apart() -> None:
    """Each draw is one that PyTorch would have made, and none is made twice."""
    draws_of_each, count = 40, LEAST
    made: list[Tensor] = []

    def work() -> None:
        made.extend(torch.empty(count).bernoulli_(0.5) for _ in range(draws_of_each))

    torch.manual_seed(2)
    with pkg.accelerate():
        threads = [threading.Thread(target=work) for _ in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    torch.manual_seed(2)
    pkg.accelerate(False)
    expected = [torch.empty(count).bernoulli_(0.5) for _ in range(3 * draws_of_each)]
    assert {bytes(each.bool().numpy()) for each in made} == {
        bytes(each.bool().numpy()) for each in expected
    }
