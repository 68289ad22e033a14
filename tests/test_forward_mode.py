"""Forward mode, by itself and over and under reverse mode: every differentiable operator's.

``check_op`` compares tangents with gradients, for all samples; these ask that there are some, of
any order, and that what has none refuses in the place of giving zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize
from torch.nn import functional as F

import pkg

Function = Callable[..., Tensor]
Transform = Callable[..., Function]
Shape = tuple[int, ...]


def lltm(*tensors: Tensor) -> Tensor:
    return torch.cat(pkg.ops.lltm(*tensors), -1)


def lltm_sequence(*tensors: Tensor) -> Tensor:
    return torch.cat(pkg.ops.lltm_sequence(*tensors), -1)


def plain_lltm_sequence(
    input: Tensor, weights: Tensor, bias: Tensor, state: Tensor, cell: Tensor
) -> Tensor:
    hidden, cells = [], []
    for given in input:
        gates = F.linear(torch.cat([state, given], -1), weights, bias)
        in_gate, out_gate, candidate = gates.chunk(3, -1)
        cell = cell + F.elu(candidate) * in_gate.sigmoid()
        state = cell.tanh() * out_gate.sigmoid()
        hidden.append(state)
        cells.append(cell)
    return torch.cat([torch.stack(hidden), torch.stack(cells)], -1)


def plain_lltm(input: Tensor, *rest: Tensor) -> Tensor:
    return plain_lltm_sequence(input.unsqueeze(0), *rest)[0]


def softmax(scores: Tensor) -> Tensor:
    """Not torch.softmax, whose tangents have no gradient in PyTorch 2.13."""
    weights = scores.exp()
    return weights / weights.sum(-1, keepdim=True)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return pkg.ops.scaled_dot_product_attention(
        query, key, value, mask, enable_gqa=True, softcap=2.0
    )


def plain_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    key, value = (each.repeat_interleave(2, 1) for each in (key, value))
    scores = 2.0 * torch.tanh(query @ key.mT / query.shape[-1] ** 0.5 / 2.0) + mask
    return softmax(scores) @ value


STARTS = torch.tensor([0, 2, 5])


def packed_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return pkg.ops.scaled_dot_product_attention_varlen(
        query, key, value, STARTS, STARTS, 3, 3, causal=True
    )


def plain_packed_attention(*tensors: Tensor) -> Tensor:
    results = []
    for begin, end in ((0, 2), (2, 5)):
        query, key, value = (each[begin:end].transpose(0, 1) for each in tensors)
        scores = query @ key.mT / query.shape[-1] ** 0.5
        hidden = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)
        weights = softmax(scores.masked_fill(hidden, -torch.inf))
        results.append((weights @ value).transpose(0, 1))
    return torch.cat(results)


def rotary(input: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return pkg.ops.rotary_embedding(input, cos, sin, interleaved=True)


def plain_rotary(input: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = 2 * cos.shape[-1]
    x, y = input[..., :width:2], input[..., 1:width:2]
    turned = torch.stack([x * cos - y * sin, y * cos + x * sin], -1).flatten(-2)
    return torch.cat([turned, input[..., width:]], -1)


def correlation(a: Tensor, b: Tensor) -> Tensor:
    return pkg.ops.spatial_correlation_sample(a, b, patch_size=3)


def plain_correlation(a: Tensor, b: Tensor) -> Tensor:
    padded = F.pad(b, (1, 1, 1, 1))
    rows, columns = a.shape[-2:]
    shifts = [
        (a * padded[..., i : i + rows, j : j + columns]).sum(1) for i in range(3) for j in range(3)
    ]
    result: Tensor = torch.stack(shifts, 1).unflatten(1, (3, 3))
    return result


INT4_VALUES = torch.arange(256).view(8, 32) % 16
SCALES = torch.tensor([0.5, 0.25]).bfloat16().expand(1, 8, 2)


def int4_linear(input: Tensor, bias: Tensor | None, scales: Tensor = SCALES) -> Tensor:
    packed = pkg.ops.pack_tensor_core_tiled_layout(INT4_VALUES.int(), 2)
    return pkg.ops.int4_linear(input, packed, scales, 32, 2, bias)


def plain_int4_linear(input: Tensor, bias: Tensor) -> Tensor:
    return F.linear(input, ((INT4_VALUES - 8) * 0.5 + 0.25).to(input.dtype), bias)


def of_linear(activation: str | None, plain: Function) -> tuple[Function, Function, list[Shape]]:
    return (
        lambda x, weight, bias: pkg.ops.linear(x, weight, bias, activation),
        lambda x, weight, bias: plain(F.linear(x, weight, bias)),
        [(2, 3), (4, 3), (4,)],
    )


CELL: list[Shape] = [(2, 3), (6, 5), (6,), (2, 2), (2, 2)]
OPERATORS: dict[str, tuple[Function, Function, list[Shape]]] = {
    "mul": (pkg.ops.mul, torch.mul, [(2, 3), (3,)]),
    "muladd": (
        lambda a, b: pkg.ops.muladd(a, b, 2.0),
        lambda a, b: a * b + 2.0,
        [(2, 3), (2, 1)],
    ),
    "d_sigmoid": (pkg.ops.d_sigmoid, lambda z: z.sigmoid() * (1 - z.sigmoid()), [(2, 3)]),
    "matmul": (pkg.ops.matmul, torch.matmul, [(2, 2, 3), (3, 4)]),
    "linear": of_linear(None, lambda x: x),
    "linear, relu": of_linear("relu", F.relu),
    "linear, gelu": of_linear("gelu", F.gelu),
    "linear, gelu_tanh": of_linear("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
    "linear, silu": of_linear("silu", F.silu),
    "int4_linear": (int4_linear, plain_int4_linear, [(2, 32), (8,)]),
    "scaled_dot_product_attention": (
        attention,
        plain_attention,
        [(1, 2, 3, 2), (1, 1, 4, 2), (1, 1, 4, 3), (3, 4)],
    ),
    "scaled_dot_product_attention_varlen": (
        packed_attention,
        plain_packed_attention,
        [(5, 1, 2)] * 3,
    ),
    "lltm": (lltm, plain_lltm, CELL),
    "lltm_sequence": (lltm_sequence, plain_lltm_sequence, [(2, *CELL[0]), *CELL[1:]]),
    "rotary_embedding": (rotary, plain_rotary, [(2, 2, 5), (2, 2), (2, 2)]),
    "spatial_correlation_sample": (correlation, plain_correlation, [(1, 2, 3, 3)] * 2),
}


def case(name: str) -> tuple[Function, Function, tuple[Tensor, ...], tuple[Tensor, ...]]:
    torch.manual_seed(0)
    operator, plain, shapes = OPERATORS[name]
    tensors, tangents = (
        tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes) for _ in range(2)
    )
    return operator, plain, tensors, tangents


@pytest.mark.parametrize("name", OPERATORS)
def test_tangents(name: str) -> None:
    operator, plain, tensors, tangents = case(name)
    actual, expected = (jvp(each, tensors, tangents) for each in (operator, plain))
    torch.testing.assert_close(actual, expected)
    for place in range(len(tensors)):

        def of_one(function: Function, place: int = place) -> Tensor:
            def varied(tensor: Tensor) -> Tensor:
                return function(*tensors[:place], tensor, *tensors[place + 1 :])

            result: Tensor = jvp(varied, (tensors[place],), (tangents[place],))[1]
            return result

        torch.testing.assert_close(of_one(operator), of_one(plain))
    pushed = linearize(operator, *tensors)[1](*tangents)
    torch.testing.assert_close(pushed, expected[1])


@pytest.mark.parametrize("name", OPERATORS)
def test_any_order(name: str) -> None:
    operator, plain, tensors, _ = case(name)
    every = tuple(range(len(tensors)))

    def number(function: Function) -> Callable[..., Tensor]:
        return lambda *given: function(*given).pow(3).sum()

    def hessians(transform: Transform, function: Function) -> Tensor:
        return transform(number(function))(*tensors)

    def over(outer: Transform, inner: Transform) -> Transform:
        return lambda function: outer(inner(function, argnums=every), argnums=every)

    expected = hessians(over(jacrev, jacrev), plain)
    for transform in (over(jacfwd, jacrev), over(jacrev, jacfwd), over(jacfwd, jacfwd)):
        torch.testing.assert_close(hessians(transform, operator), expected)


@pytest.mark.parametrize("name", OPERATORS)
def test_finite_differences_and_batches(name: str) -> None:
    operator, _, tensors, _ = case(name)
    if name == "int4_linear":
        pytest.skip("what it rounds the input to has steps")
    leaves = [tensor.requires_grad_() for tensor in tensors]
    torch.autograd.gradcheck(
        operator, leaves, check_forward_ad=True, check_batched_forward_grad=True
    )
    torch.autograd.gradgradcheck(operator, leaves, check_fwd_over_rev=True)


@pytest.mark.parametrize("name", ["matmul", "linear, gelu", "scaled_dot_product_attention", "lltm"])
def test_third_order(name: str) -> None:
    operator, plain, tensors, tangents = case(name)

    def third(function: Function) -> Tensor:
        def along(first: Tensor) -> Tensor:
            def squares(given: Tensor) -> Tensor:
                return function(given, *tensors[1:]).square().sum()

            result: Tensor = jvp(grad(squares), (first,), (tangents[0],))[1]
            return result

        result: Tensor = jvp(along, (tensors[0],), (tangents[0],))[1]
        return result

    torch.testing.assert_close(third(operator), third(plain))


@pytest.mark.parametrize("name", OPERATORS)
def test_dual_tensors(name: str) -> None:
    operator, plain, tensors, tangents = case(name)
    with forward_ad.dual_level():
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        dual = [forward_ad.make_dual(*each) for each in zip(leaves, tangents, strict=True)]
        results = [forward_ad.unpack_dual(function(*dual)) for function in (operator, plain)]
        torch.testing.assert_close(*(result.tangent for result in results))
        # A tangent depends on the arguments, and autograd knows how.
        if name not in ("int4_linear", "rotary_embedding"):
            actual, expected = (
                torch.autograd.grad(result.tangent.square().sum(), leaves, materialize_grads=True)
                for result in results
            )
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", OPERATORS)
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    operator, plain, tensors, tangents = case(name)
    given = [tuple(each.to(dtype) for each in group) for group in (tensors, tangents)]
    pushed = jvp(operator, given[0], given[1])
    assert pushed[0].dtype == pushed[1].dtype == dtype
    wide = [tuple(each.double() for each in group) for group in given]
    expected = jvp(plain, wide[0], wide[1])[1]
    # Of a handful of terms, each rounded a few times; int4_linear's input is rounded too.
    bound = 16 * torch.finfo(dtype).eps * expected.abs().max()
    assert (pushed[1].double() - expected).abs().max() <= bound


@pytest.mark.parametrize("name", OPERATORS)
def test_a_gradient_of_zeros_without_memory(name: str) -> None:
    """Behind ``cat``, whose gradients are parts of one: they begin behind its first element."""
    operator, plain, tensors, tangents = case(name)
    every = tuple(range(len(tensors)))

    def second(function: Function) -> tuple[Tensor, ...]:
        def weighted(*given: Tensor) -> Tensor:
            twice = torch.cat([function(*given).flatten(), function(*given).flatten()])
            return (twice * torch.arange(len(twice))).sum()

        def pushed(*given: Tensor) -> Tensor:
            return jvp(weighted, given, tangents)[1]

        result: tuple[Tensor, ...] = grad(pushed, argnums=every)(*tensors)
        return result

    torch.testing.assert_close(second(operator), second(plain))


def test_modules_in_place_of_pytorchs() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)

    def second(given: Tensor) -> Tensor:
        of_row = hessian(lambda row: model(row).square().sum())
        result: Tensor = torch.vmap(of_row)(given)
        return result

    expected = second(x)
    pkg.replace_modules(model)
    assert isinstance(model[0], pkg.nn.Linear)
    torch.testing.assert_close(second(x), expected)


@contextmanager
def refused(words: str) -> Iterator[None]:
    with pytest.raises((NotImplementedError, RuntimeError), match=words):
        yield


def test_what_has_no_tangents_refuses() -> None:
    x = torch.randn(3, 32)
    packed = pkg.ops.pack_linear_weight(torch.randn(4, 32))
    with refused("packed_linear"):
        jvp(lambda x: pkg.ops.packed_linear(x, packed, 4), (x,), (x,))
    with refused("scales_and_zeros has a tangent"):
        scales = SCALES.clone()
        jvp(lambda s: int4_linear(x, None, s), (scales,), (scales,))
    slopes, query = torch.ones(1), torch.randn(1, 1, 3, 4)
    # The words stay in PyTorch 2.10, whose composite operators drop those of an error.
    with refused("alibi_slopes has a tangent|printed why on stderr"):
        jvp(
            lambda s: pkg.ops.scaled_dot_product_attention(query, query, query, alibi_slopes=s),
            *((slopes,), (slopes,)),
        )


def test_compiled() -> None:
    x, tangent = (torch.randn(3, 4, dtype=torch.float64) for _ in range(2))

    def function(given: Tensor) -> Tensor:
        result: Tensor = jvp(lambda x: pkg.ops.linear(x, x, None, "silu"), (given,), (tangent,))[1]
        return result

    torch.testing.assert_close(torch.compile(function, backend="aot_eager")(x), function(x))


def test_levels_that_a_compiled_program_enters() -> None:
    x, tangent = (torch.randn(3, 4) for _ in range(2))
    weight = torch.randn(5, 4)

    def pushed(linear: Function) -> Callable[[Tensor, Tensor], Tensor]:
        def function(x: Tensor, tangent: Tensor) -> Tensor:
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(x, tangent)
                return forward_ad.unpack_dual(linear(dual, weight)).tangent

        return function

    expected = pushed(F.linear)(x, tangent)
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(pushed(pkg.ops.linear), backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(x, tangent), expected)


@pytest.mark.parametrize("name", OPERATORS)
def test_tangents_have_memory_of_their_own(name: str) -> None:
    operator, _, tensors, tangents = case(name)
    operators = [operator]
    if name.startswith("linear"):  # without rows the bias is as large as the result
        operators.append(lambda x, *rest: operator(x[0], *rest))
    for each in operators:
        for place in range(len(tensors)):

            def doubled(varied: Tensor, function: Function = each, place: int = place) -> Tensor:
                return function(*tensors[:place], varied, *tensors[place + 1 :]).mul_(2)

            before = tangents[place].clone()
            jvp(doubled, (tensors[place],), (tangents[place],))
            assert torch.equal(tangents[place], before)


def test_compiled_autograd() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        pkg.ops.matmul(x, x.detach()).sum().backward()
    expected = x.detach().sum(1).expand(4, 4)
    torch.testing.assert_close(x.grad, expected)
