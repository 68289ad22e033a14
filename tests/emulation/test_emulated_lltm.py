"""The kernels and the host code of lltm's CUDA operators, run on the CPU by the emulator."""

from __future__ import annotations

from fractions import Fraction

import pytest
import references
import torch
from emulator import Emulator
from test_emulated_counters import check_accesses
from test_emulated_large_product import plan_panels
from test_emulated_matmul import FLOATS, assert_product, name_of
from torch import Tensor

from pkg.testing import Sample
from pkg.testing.tolerance import expect

Operators = torch._ops._OpNamespace
# Of batch, features and states: around the tiles of 64, of 128 and of 32, of aligned rows and of
# others, and of several panels of both.
SHAPES = [(3, 5, 4), (64, 8, 64), (65, 9, 63), (2, 0, 33), (1, 70, 65), (130, 3, 31), (3, 136, 192)]
TYPES = [torch.float32, torch.float64, torch.bfloat16]


def make(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def arguments(shape: tuple[int, int, int], *steps: int) -> tuple[Tensor, ...]:
    batch, features, states = shape
    scale = max(features + states, 1) ** -0.5
    return (
        make(*steps, batch, features),
        make(3 * states, states + features, seed=1) * scale,
        make(3 * states, seed=2),
        make(batch, states, seed=3),
        make(batch, states, seed=4),
    )


def compare(results: tuple[Tensor, ...], reference: object, sample: Sample, name: str) -> None:
    wanted = expect(lambda each: list(reference(*each.args)), sample)
    for index, (result, expected) in enumerate(zip(results, wanted, strict=True)):
        expected.compare(result, f"result {index} of {name} of {sample}")


def assert_step(sample: Sample, new_h: Tensor, new_cell: Tensor, gates: Tensor) -> None:
    """The bound of a product (test_emulated_matmul.py); then that of its activations.

    The functions of a gate are computed to a few units of roundoff of the largest number among
    them, the cell, from gates that are not rounded. None is steeper than 1, a sigmoid than 1/4.
    """
    input, weights, bias, old_h, old_cell = (each.double() for each in sample.args)
    dtype = gates.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    unit = torch.finfo(wide).eps / 2
    operands = torch.cat([old_h, input], 1)
    magnitude = operands.abs() @ weights.abs().mT + bias.abs()
    # The reference, in float64, has errors of its own.
    gate_error = 1.01 * (operands.shape[1] + 1) * unit * magnitude * 2
    exact = operands @ weights.mT + bias
    in_gate, out_gate, candidate = exact.unflatten(1, (3, -1)).unbind(1)
    in_error, out_error, candidate_error = gate_error.unflatten(1, (3, -1)).unbind(1)
    grown = torch.nn.functional.elu(candidate)
    cell = old_cell + grown * torch.sigmoid(in_gate)
    size = cell.abs() + old_cell.abs() + candidate.abs() + 1
    cell_error = 16 * unit * size + 1.01 * (candidate_error + grown.abs() * in_error / 4)
    wanted = torch.tanh(cell) * torch.sigmoid(out_gate)
    error = 16 * unit * size + cell_error + 1.01 * out_error / 4
    for result, right, bound in (
        (gates, exact, gate_error),
        (new_cell, cell, cell_error),
        (new_h, wanted, error),
    ):
        rounding = torch.finfo(dtype).eps / 2 * (right.abs() + bound)
        rounding += torch.finfo(dtype).smallest_normal
        assert ((result.double() - right).abs() <= bound + rounding).all()


def transposed(matrix: Tensor) -> Tensor:
    return matrix.mT.contiguous().mT


def apart(matrix: Tensor) -> Tensor:
    """With other elements between those of a row, from an odd address on."""
    rows, columns = matrix.shape
    wide = make(rows * columns * 2 + 1).to(matrix.dtype)[1:].view(rows, columns, 2)
    wide[:, :, 0] = matrix
    return wide[:, :, 0]


def emulated_step(
    emulator: Emulator, sample: Sample, blocks: int, split_panels: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    input, weights, bias, old_h, old_cell = sample.args
    (batch, features), hidden = input.shape, old_h.shape[1]
    new_h, new_cell = torch.full((2, batch, hidden), 77, dtype=input.dtype)
    gates = torch.full((batch, 3 * hidden), 77, dtype=input.dtype)
    emulator.run(
        "lltm_step",
        ["new_h", "new_cell", "gates"],
        blocks,
        type=name_of(input.dtype),
        batch=batch,
        features=features,
        hidden=hidden,
        split_panels=split_panels,
        input=input,
        input_strides=input.stride(),
        weights=weights,
        weights_strides=weights.stride(),
        bias=bias,
        bias_stride=1,
        old_h=old_h,
        old_h_strides=old_h.stride(),
        old_cell=old_cell,
        old_cell_strides=old_cell.stride(),
        new_h=new_h,
        new_cell=new_cell,
        gates=gates,
    )
    return new_h, new_cell, gates


@pytest.mark.parametrize("dtype", TYPES, ids=name_of)
@pytest.mark.parametrize("split_panels", [0, 1, 3])
def test_a_step(cuda_emulator: Emulator, dtype: torch.dtype, split_panels: int) -> None:
    for shape in SHAPES:
        sample = Sample(arguments(shape)).converted(dtype)
        results = emulated_step(cuda_emulator, sample, 3, split_panels)
        assert_step(sample, *results)
        again = emulated_step(cuda_emulator, sample, 1, split_panels)
        assert all(map(torch.equal, results, again)), "results depend on the grid"


@pytest.mark.parametrize("dtype", TYPES, ids=name_of)
@pytest.mark.parametrize("split_panels", [0, 2])
def test_layouts_of_a_step(cuda_emulator: Emulator, dtype: torch.dtype, split_panels: int) -> None:
    for shape in ((66, 72, 64), (3, 9, 66)):
        dense = Sample(arguments(shape)).converted(dtype).args
        for layout in (transposed, apart):
            for changed in ((0, 3, 4), (1,), (0, 1, 3, 4)):
                each = Sample(tuple(layout(a) if i in changed else a for i, a in enumerate(dense)))
                assert_step(each, *emulated_step(cuda_emulator, each, 2, split_panels))


def test_loads_of_a_step(cuda_emulator: Emulator) -> None:
    """As cuda/lltm/gate_product.cuh says: seven for 24 products, and each byte once a tile."""
    batch, features, hidden = 128, 64, 128
    sample = Sample(arguments((batch, features, hidden))).converted(torch.bfloat16)
    input, weights, bias, old_h, old_cell = sample.args
    for each in (weights, transposed(weights)):
        emulated_step(cuda_emulator, Sample((input, each, bias, old_h, old_cell)), 2)
        counted = cuda_emulator.counters
        check_accesses(counted)
        assert Fraction(counted.matrix_loads, counted.products) == Fraction(7, 24)
        elements = (hidden // 64) * (input.numel() + old_h.numel())
        assert counted.copied_bytes == 2 * (elements + batch // 64 * weights.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_gradients_of_a_step(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    for batch, hidden in ((3, 4), (9, 33), (300, 31), (7, 64)):
        input, weights, bias, old_h, old_cell = arguments((batch, 0, hidden))
        forward = references.lltm_forward(input, weights, bias, old_h, old_cell)
        given = [make(*like.shape, seed=7 + i) for i, like in enumerate(forward)]
        hidden_, cells, gates = forward
        saved = (gates, hidden_, cells, input, weights, old_h)
        sample = Sample((*given, *saved, False, False, True)).converted(dtype)
        grads, (gates, _, cells, _, weights, _) = sample.args[:3], sample.args[3:9]
        outputs = {
            "grad_sums": torch.full((batch, 3 * hidden), 77, dtype=dtype),
            "bias_sums": torch.zeros(3 * hidden, dtype=dtype),
            "grad_old_cell": torch.full((batch, hidden), 77, dtype=dtype),
            "grad_bias": torch.full((3 * hidden,), 77, dtype=dtype),
        }
        named = dict(
            zip(("grad_hidden", "grad_cells", "grad_gates"), grads, strict=True),
            gates=gates,
            cells=cells,
        )
        cuda_emulator.run(
            "lltm_gradients",
            list(outputs),
            2,
            type=name_of(dtype),
            batch=batch,
            hidden=hidden,
            **named,
            **{f"{name}_strides": tensor.stride() for name, tensor in named.items()},
            **outputs,
        )
        assert torch.equal(outputs["bias_sums"], outputs["grad_bias"])

        def parts(*values: object) -> tuple[Tensor, Tensor]:
            results = references.lltm_backward(*values)
            return results[2], results[4]

        compare((outputs["grad_bias"], outputs["grad_old_cell"]), parts, sample, "gradients")
        bound = 1e-4 if dtype == torch.float32 else 1e-12
        sums = outputs["grad_sums"].double().sum(0)
        assert ((sums - outputs["grad_bias"].double()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", TYPES, ids=name_of)
@pytest.mark.parametrize("split_panels", [0, 1, 2])
def test_a_product_of_two_parts(
    cuda_emulator: Emulator, dtype: torch.dtype, split_panels: int
) -> None:
    panel = 64 if dtype == torch.bfloat16 else 8
    for rows, columns, depths in (
        (129, 5, (3, 9)),
        (3, 130, (panel, 0)),
        (4, 4, (1, 2 * panel + 1)),
        (5, 8, (2 * panel, 3 * panel - 2)),
    ):
        lefts = [make(depth, rows, seed=1).to(dtype) for depth in depths]  # read transposed
        rights = [make(depth, columns, seed=2).to(dtype) for depth in depths]
        results = []
        for blocks in (2, 1):
            c = torch.full((rows, columns + 3), 77, dtype=dtype)
            cuda_emulator.run(
                "lltm_product",
                ["c"],
                blocks,
                type=name_of(dtype),
                rows=rows,
                columns=columns,
                depths=depths,
                split_panels=split_panels,
                a0=lefts[0],
                a0_strides=(1, rows),
                a1=lefts[1],
                a1_strides=(1, rows),
                b0=rights[0],
                b0_strides=(columns, 1),
                b1=rights[1],
                b1_strides=(columns, 1),
                c=c,
                c_row_stride=columns + 3,
            )
            results.append(c)
        assert torch.equal(*results), "the result depends on the grid"
        assert_product(results[0][:, :columns], torch.cat(lefts).mT, torch.cat(rights))
        assert (results[0][:, columns:] == 77).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_cells(emulated_operators: Operators, dtype: torch.dtype) -> None:
    # The last is divided in every dtype, in float32 and float64 the input's gradient too.
    for shape in [*SHAPES[:3], (0, 5, 4), (3, 0, 4), (3, 5, 0), (3, 140, 60)]:
        sample = Sample(arguments(shape)).converted(dtype)
        compare(emulated_operators.lltm_forward(*sample.args), references.lltm_forward, sample, "")
        compare(emulated_operators.lltm(*sample.args), references.lltm, sample, "")
        check_backward(emulated_operators, sample)


@pytest.mark.parametrize(
    ("batch", "hidden"), [(7, 33), (838_860, 2560), (1_100_000, 2560), (2**22, 2048)]
)
def test_places_of_states_beyond_31_bits(cuda_emulator: Emulator, batch: int, hidden: int) -> None:
    """As a kernel that finishes a large step finds them, which is too large to be run here."""
    last = batch * hidden - 1
    indices = [0, last, last // 2, *range(max(last - 3 * hidden, 1), last, hidden // 3)]
    places = torch.full((len(indices), 2), -1)
    options = {"type": "float32", "batch": batch, "hidden": hidden, "indices": indices}
    cuda_emulator.run("lltm_places", ["places"], places=places, **options)
    assert places.tolist() == [[index // hidden, index % hidden] for index in indices]


# Batch, features, states; and rows and columns of a product among those of a cell and its gradients
# that is large on the emulated device, of 3 multiprocessors: that of a step, or of the weights.
LARGE = [
    (torch.float64, (256, 5, 128), (256, 384)),
    (torch.float64, (40, 304, 80), (240, 384)),
    (torch.float32, (256, 5, 120), (256, 360)),
    (torch.float32, (40, 170, 170), (510, 340)),
    (torch.float16, (130, 16, 48), (130, 144)),
    (torch.float16, (64, 200, 72), (216, 272)),
]


def assert_large(emulator: Emulator, dtype: torch.dtype, product: tuple[int, int]) -> None:
    if dtype == torch.float16:  # a tile for each multiprocessor
        assert -(-product[0] // 128) * -(-product[1] // 128) >= 3
    else:
        assert plan_panels(emulator, dtype, (1, *product, 4096, 3))[0] == "large"


@pytest.mark.parametrize(("dtype", "shape", "product"), LARGE)
def test_cells_of_large_products(
    emulated_operators: Operators,
    cuda_emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    product: tuple[int, int],
) -> None:
    """By matmul's kernels, of states and input that are joined."""
    assert_large(cuda_emulator, dtype, product)
    monkeypatch.setenv("PKG_EMULATED_CAPABILITY", "90")
    sample = Sample(arguments(shape)).converted(dtype)
    compare(emulated_operators.lltm_forward(*sample.args), references.lltm_forward, sample, "")
    compare(emulated_operators.lltm(*sample.args), references.lltm, sample, "")
    check_backward(emulated_operators, sample)
    input, weights, bias, old_h, old_cell = sample.args
    others = (apart(input), transposed(weights), bias, transposed(old_h), old_cell)
    compare(emulated_operators.lltm(*others), references.lltm, sample, "")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=name_of)
def test_gradients_of_sequences_by_large_products(
    emulated_operators: Operators,
    cuda_emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
) -> None:
    assert_large(cuda_emulator, dtype, (240, 384))
    monkeypatch.setenv("PKG_EMULATED_CAPABILITY", "90")
    sample = Sample(arguments((130, 304, 80), 3)).converted(dtype)
    check_gradients(emulated_operators, sample, (True, True, True))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_sequences(emulated_operators: Operators, dtype: torch.dtype, steps: int) -> None:
    # The steps of the last are divided in float32 and float64.
    for shape in [(3, 5, 4), (1, 9, 33), (3, 0, 4), *([(2, 3, 64)] if steps > 1 else [])]:
        sample = Sample(arguments(shape, steps)).converted(dtype)
        input, *rest = sample.args
        for layout in (input, input.transpose(0, 1).contiguous().transpose(0, 1)):
            each = Sample((layout, *rest))
            results = emulated_operators.lltm_sequence(*each.args)
            compare(results, references.lltm_sequence, each, "a sequence")
            check_backward(emulated_operators, each)


@pytest.mark.parametrize("steps", [(), (1,), (3,)], ids=str)
def test_gradients_without_states(emulated_operators: Operators, steps: tuple[int, ...]) -> None:
    """The input's are zero, and made by the first kernel of the call, which waits for no other."""
    sample = Sample(arguments((3, 5, 0), *steps))
    input, weights, _, old_h, _ = sample.args
    saved = [torch.empty(*steps, 3, 0, dtype=input.dtype) for _ in range(3)]
    given = (*saved, *saved, input, weights, old_h, True, True, True)
    gradient, *_ = emulated_operators.lltm_backward(*given)
    assert torch.equal(gradient, torch.zeros_like(input))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_gradients_of_long_sequences(emulated_operators: Operators, dtype: torch.dtype) -> None:
    """Of so many rows that the sums of the weights' gradient are divided, in both their parts."""
    sample = Sample(arguments((400, 3, 4), 3)).converted(dtype)
    check_gradients(emulated_operators, sample, (False, True, False))


def check_gradients(operators: Operators, sample: Sample, needs: tuple[bool, bool, bool]) -> None:
    """Those of a sequence, from the reference's forward pass."""
    input, weights, _, old_h, _ = sample.args
    hidden, cells, gates = references.lltm_forward(*sample.args)
    given = [make(*t.shape, seed=9).to(t.dtype) for t in (hidden, cells, gates)]
    each = Sample((*given, gates, hidden, cells, input, weights, old_h, *needs))
    results = operators.lltm_backward(*each.args)
    compare(results, references.lltm_backward, each, "the gradients")


def check_backward(operators: Operators, sample: Sample) -> None:
    input, weights, _, old_h, _ = sample.args
    hidden, cells, gates = operators.lltm_forward(*sample.args)
    given = [make(*t.shape, seed=9).to(t.dtype) for t in (hidden, cells, gates)]
    saved = (gates, hidden, cells, input, weights, old_h)
    for gradients in (given, [given[0], None, None]):
        for needs in ((True, True, True), (False, True, False), (True, False, True)):
            each = Sample((*gradients, *saved, *needs))
            results = operators.lltm_backward(*each.args)
            compare(results, references.lltm_backward, each, "the gradients")
