"""Matrix multiplication beside PyTorch, NumPy's BLAS and zentorch.

Squares, the projections of GPT-2 small and of Llama 8B with few and many rows, thin and transposed
operands, batches of small matrices. One row, as in decoding, and one column are bound by memory:
they go round copies of the matrix that no cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pkg import ops

from .harness import (
    OURS,
    Case,
    ForeignCall,
    Reference,
    copies_beyond_caches,
    each_in_turn,
    in_turn,
    numpy_function,
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8)
# Rows, columns and terms of the products that an ordinary run has in each dtype.
COMMON = {
    torch.float32: (8, 32, 64, 256, 1024),
    torch.float64: (64, 256, 1024),
    torch.bfloat16: (8, 64, 256, 1024),
    torch.float16: (64, 256, 1024),
    torch.int8: (64, 256, 1024),
}
SQUARES = (8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048, 4096)
GPT2 = ((768, 2304), (768, 768), (768, 3072), (3072, 768))
LLAMA = ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096))
ROWS = (1, 16, 512)
THIN = ((4096, 64, 64), (64, 4096, 64), (2048, 2048, 32), (64, 64, 16384))  # rows, columns, terms
SIDE = 4096  # of the matrix beside one row or one column, and of an outer product
BATCH, BATCHED = 512, 32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, dtype=dtype, device=device)
    return torch.randn(shape, device=device).to(dtype)


def _case(name: str, a: Tensor, b: Tensor, from_memory: bool = False) -> Case:
    """A product. From memory: the work is to read and write the matrices, not to multiply."""
    dtype, copies = a.dtype, 1
    pairs = [(a, b)]
    if from_memory:
        larger = max(a, b, key=Tensor.numel)
        copies = copies_beyond_caches(larger)
        for _ in range(copies - 1):
            # A copy with the strides of the original, as what is transposed stays so.
            pairs.append((a.clone(), b) if larger is a else (a, b.clone()))
    ours: Callable[..., Tensor] = ops.matmul
    pytorch: Callable[..., Tensor] = torch.matmul
    if dtype == torch.int8:
        ours, pytorch = partial(ops.matmul, out_dtype=torch.int32), torch._int_mm
    peers = {OURS: in_turn(ours, pairs), "PyTorch": in_turn(pytorch, pairs)}
    numpy = [numpy_function("matmul", *pair) for pair in pairs]
    if numpy[0]:
        peers["NumPy"] = each_in_turn([peer["NumPy"] for peer in numpy])
    columns, terms = b.shape[-1], a.shape[-1]
    elements = a.numel() // terms * columns
    bytes_moved = (a.numel() + b.numel()) * a.element_size()
    bytes_moved += elements * (4 if dtype == torch.int8 else a.element_size())
    zentorch = None
    if dtype in (torch.float32, torch.bfloat16):
        operator = "zentorch_mm" if a.dim() == 2 else "zentorch_bmm"
        zentorch = ForeignCall(operator, (a, b), copies=copies)
    return Case(
        f"{_name(dtype)}, {name}",
        peers,
        Reference(_plain, a, b),
        (bytes_moved if from_memory else 2 * elements * terms) / 1e9,
        "GB/s" if from_memory else "GFLOP/s",
        terms=terms,
        limit="memory" if from_memory else _name(dtype),
        zentorch=zentorch,
    )


def _plain(a: Tensor, b: Tensor) -> Tensor:
    # float64 holds sums of int8 exactly.
    return (a.double() @ b.double()).int() if a.dtype == torch.int8 else a @ b


def _square(n: int, dtype: torch.dtype, device: torch.device) -> Case:
    a, b = (_random(n, n, dtype=dtype, device=device) for _ in range(2))
    return _case(f"n = {n}", a, b)


def _projection(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device
) -> Case:
    """As in a linear layer: the weight is stored (outputs, inputs) and read transposed."""
    a = _random(rows, inputs, dtype=dtype, device=device)
    weight = _random(outputs, inputs, dtype=dtype, device=device)
    words = f"{rows} {'row' if rows == 1 else 'rows'}, {inputs} to {outputs}"
    return _case(words, a, weight.mT, from_memory=rows == 1)


def _transposed(kind: str, n: int, dtype: torch.dtype, device: torch.device) -> Case:
    operands = [_random(n, n, dtype=dtype, device=device) for _ in range(2)]
    a, b = (x.mT if letter == "t" else x for letter, x in zip(kind, operands, strict=True))
    return _case(f"n = {n}, {kind}", a, b)


def _thin(rows: int, columns: int, terms: int, dtype: torch.dtype, device: torch.device) -> Case:
    a = _random(rows, terms, dtype=dtype, device=device)
    b = _random(terms, columns, dtype=dtype, device=device)
    return _case(f"{rows} by {columns}, {terms} terms", a, b)


def _batch(dtype: torch.dtype, device: torch.device) -> Case:
    shape = (BATCH, BATCHED, BATCHED)
    a, b = (_random(*shape, dtype=dtype, device=device) for _ in range(2))
    return _case(f"{BATCH} times n = {BATCHED}", a, b)


def _column(dtype: torch.dtype, device: torch.device) -> Case:
    a = _random(SIDE, SIDE, dtype=dtype, device=device)
    return _case(
        f"1 column, {SIDE} by {SIDE}", a, _random(SIDE, 1, dtype=dtype, device=device), True
    )


def _outer(dtype: torch.dtype, device: torch.device) -> Case:
    a = _random(SIDE, 1, dtype=dtype, device=device)
    return _case(f"1 term, {SIDE} by {SIDE}", a, _random(1, SIDE, dtype=dtype, device=device), True)


# A function above, its arguments, and the dtype.
Recipe = tuple[Callable[..., Case], tuple[Any, ...], torch.dtype]


def _common() -> Iterator[Recipe]:
    for dtype, squares in COMMON.items():
        yield from ((_square, (n,), dtype) for n in squares)
    for dtype in (torch.float32, torch.bfloat16):
        yield from ((_projection, (rows, *GPT2[2]), dtype) for rows in ROWS[1:])
    yield from ((_projection, (1, *LLAMA[0]), dtype) for dtype in DTYPES)
    yield _transposed, ("tn", 512), torch.float32
    yield _batch, (), torch.float32


def _all() -> Iterator[Recipe]:
    for dtype in DTYPES:
        yield from ((_square, (n,), dtype) for n in SQUARES)
        for rows in ROWS:
            yield from ((_projection, (rows, *shape), dtype) for shape in (*GPT2, *LLAMA))
        yield from ((_thin, shape, dtype) for shape in THIN)
        yield _column, (), dtype
        yield _outer, (), dtype
        for kind in ("nt", "tn", "tt"):
            yield from ((_transposed, (kind, n), dtype) for n in (64, 512, 1024))
        if dtype != torch.int8:  # torch._int_mm has no batches
            yield _batch, (), dtype


def cases(device: torch.device) -> Iterator[Case]:
    """A few of every kind."""
    for function, arguments, dtype in _common():
        yield function(*arguments, dtype, device)


def full_cases(device: torch.device) -> Iterator[Case]:
    """The rest of the grid."""
    common = set(_common())
    for recipe in _all():
        if recipe not in common:
            function, arguments, dtype = recipe
            yield function(*arguments, dtype, device)


def gpu_cases(device: torch.device) -> Iterator[Case]:
    """Squares of every dtype, every layout of one of them, and a layer of Llama 8B."""
    for dtype in DTYPES:
        yield _square(SIDE, dtype, device)
    yield _square(2 * SIDE, torch.bfloat16, device)
    for kind in ("nt", "tn", "tt"):
        yield _transposed(kind, SIDE, torch.bfloat16, device)
    for rows in (*ROWS, SIDE):
        yield _projection(rows, *LLAMA[2], torch.bfloat16, device)
    yield _thin(2048, 2048, 16384, torch.bfloat16, device)
    yield _batch(torch.bfloat16, device)
