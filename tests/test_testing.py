"""check_op passes a correct operator, and finds the one thing wrong with each of many others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
import toy_operators as toy
from torch import Tensor

from pkg.testing import CHECKS, ErrorSample, OperatorCheckError, Sample, check_op
from pkg.testing.choices import choices


def values(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


SAMPLES = [
    Sample((values(3, 4), values(3, 4), 0.5), family="matrices"),
    Sample((values(5, 7), values(5, 7), 0.5), family="matrices"),
    Sample((values(2, 3, 4), values(4), -1.0), name="broadcast"),
    Sample((values(0, 4), values(4), 1.0), name="empty"),
    Sample((values(17, 33), values(17, 33), 1.0), values_only=True),
]
ERRORS = [
    ErrorSample((values(*[1] * 6), values(1), 0.0), match="at most 5 dimensions, but it has 6"),
]


def check(op: torch._ops.OpOverload, **options: Any) -> Any:
    options = {"reference": toy.reference, "errors": ERRORS, **options}
    return check_op(op, options.pop("samples", SAMPLES), **options)


def assert_found(op: torch._ops.OpOverload, name: str, message: str, **options: Any) -> None:
    """The check of this name fails, in words that name the check, a sample and what is wrong."""
    with pytest.raises(OperatorCheckError, match=message) as failure:
        check(op, checks=[name], **options)
    assert f"[{name}] sample" in str(failure.value)


def test_a_correct_operator_passes_every_check(device: torch.device) -> None:
    report = check(toy.make(), device=device)
    assert tuple(report.runs) == CHECKS
    assert all(report.runs.values())
    assert report.absent == ()


def wrong_at_the_end(a: Tensor, b: Tensor, c: float) -> Tensor:
    result = toy.forward(a, b, c)
    if result.numel() > 500:
        result.view(-1)[-1] += 1
    return result


def computed_in_half(a: Tensor, b: Tensor, c: float) -> Tensor:
    return (a.half() * b.half() + c).to(torch.result_type(a, b))


def nan_flushed(a: Tensor, b: Tensor, c: float) -> Tensor:
    return toy.forward(a, b, c).nan_to_num()


def as_if_contiguous(a: Tensor, b: Tensor, c: float) -> Tensor:
    def misread(tensor: Tensor) -> Tensor:
        strides = torch.empty(tensor.shape, device="meta").stride()
        return tensor.as_strided(tensor.shape, strides)

    return toy.forward(misread(a), b, c)


def write_before_start(a: Tensor, b: Tensor, c: float) -> Tensor:
    if a.storage_offset():
        a.as_strided((1,), (1,), a.storage_offset() - 1).fill_(0)
    return toy.forward(a, b, c)


def input_modified(a: Tensor, b: Tensor, c: float) -> Tensor:
    result = toy.forward(a, b, c)
    a.data.mul_(2)
    return result


def undeclared_write(a: Tensor, b: Tensor, c: float) -> Tensor:
    result = toy.forward(a, b, c)
    a.add_(1)
    return result


def noisy(a: Tensor, b: Tensor, c: float) -> Tensor:
    return toy.forward(a, b, c) * (1 + 1e-7 * torch.rand((), device=a.device))


_scratch = torch.zeros(())


def shared_scratch(a: Tensor, b: Tensor, c: float) -> Tensor:
    global _scratch
    _scratch = mine = toy.forward(a, b, c)
    # Until another thread writes into it; the last one that works waits for nobody.
    while _scratch is mine and is_one_of_several_workers():
        time.sleep(1e-4)
    return _scratch.clone()


def is_one_of_several_workers() -> bool:
    """Whether this is a thread of the check of threads, and others of them still run."""
    workers = [thread for thread in threading.enumerate() if thread.name.endswith("(work)")]
    return threading.current_thread() in workers and len(workers) > 1


def wrong_dtype(a: Tensor, b: Tensor, c: float) -> Tensor:
    return toy.forward(a, b, c).float()


def returns_an_input(a: Tensor, b: Tensor, c: float) -> Tensor:
    return a


VALUE_DEFECTS: list[tuple[Callable[..., Tensor], str, str]] = [
    (wrong_at_the_end, "values", r"float32: output must be within .* 1 of 561 elements"),
    (computed_in_half, "values", r"torch.float32: output must be within 2 times the plain"),
    (nan_flushed, "values", r"must be infinite or NaN where the reference is"),
    (wrong_dtype, "values", r"output has dtype torch.float32; the reference gives torch.bfloat16"),
    (as_if_contiguous, "layouts", r"all transposed: output must be"),
    (write_before_start, "layouts", r"a was modified: \d+ bytes, the first -\d bytes"),
    (input_modified, "layouts", r"a was modified"),
    (undeclared_write, "registration", "schema"),
    (returns_an_input, "registration", "alias"),
    (noisy, "determinism", "a repeated call differs in tensor 0"),
    (shared_scratch, "threads", "4 threads over 4 samples"),
]


@pytest.mark.parametrize(
    ("forward", "name", "message"), VALUE_DEFECTS, ids=[case[0].__name__ for case in VALUE_DEFECTS]
)
def test_a_wrong_kernel_is_found(forward: Callable[..., Tensor], name: str, message: str) -> None:
    with_nan = values(3, 4)
    with_nan[1, 1] = float("nan")
    samples = [*SAMPLES, Sample((with_nan, values(4), 0.0), name="NaN", values_only=True)]
    assert_found(toy.make(forward=forward), name, message, samples=samples)


def backward_without_factor(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_a, grad_b, _ = toy.backward(ctx, grad)
    return grad_a, grad_b if grad_b is None else grad_b * 1.01, None


def backward_only_for_both(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_a, grad_b, _ = toy.backward(ctx, grad)
    return grad_a, grad_b if all(ctx.needs_input_grad[:2]) else grad_b * 0, None


def backward_once(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return tuple(g if g is None else g.detach() + 0 * grad.sum() for g in toy.backward(ctx, grad))


def backward_in_bfloat16(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return tuple(g if g is None else g.bfloat16().to(g.dtype) for g in toy.backward(ctx, grad))


GRADIENT_DEFECTS: list[tuple[Callable[..., Any], str, str]] = [
    (backward_without_factor, "gradients", "gradient 1 must be within"),
    (backward_without_factor, "gradcheck", "Jacobian mismatch"),
    (backward_without_factor, "func", "gradient 1 must be within"),
    (backward_without_factor, "compile", "gradient 1 must be within"),
    (backward_only_for_both, "gradients", r"for tensors \[1\]: gradient must be within"),
    (backward_in_bfloat16, "gradients", r"float64: gradient 0 must be within"),
    (backward_once, "gradgradcheck", "Jacobian mismatch"),
]


@pytest.mark.parametrize(
    ("backward", "name", "message"),
    GRADIENT_DEFECTS,
    ids=[f"{case[0].__name__}-{case[1]}" for case in GRADIENT_DEFECTS],
)
def test_a_wrong_gradient_is_found(backward: Callable[..., Any], name: str, message: str) -> None:
    assert_found(toy.make(backward=backward), name, message)


def test_dropped_tangents_are_found() -> None:
    assert_found(toy.make(forward_mode_refused=False), "jvp", "forward mode and backward differ")
    assert_found(toy.make(forward_mode_goes_on=False), "jvp", "over a gradient differs")


def jvp(ctx: Any, of_a: Tensor, of_b: Tensor, _: None) -> Tensor:
    a, b = ctx.saved_tensors
    return of_a * b + a * of_b


def jvp_of_one(ctx: Any, of_a: Tensor, of_b: Tensor, _: None) -> Tensor:
    return of_a * ctx.saved_tensors[1]


def jvp_that_fails(ctx: Any, *tangents: Tensor) -> Tensor:
    raise RuntimeError("shapes do not match")


def test_tangents() -> None:
    check(toy.make(jvp=jvp), checks=["jvp"])
    assert_found(toy.make(jvp=jvp_of_one), "jvp", "forward mode and backward differ")
    assert_found(toy.make(jvp=jvp_that_fails), "jvp", "shapes do not match")


def fake_strides(a: Tensor, b: Tensor, c: float) -> Tensor:
    result = torch.mul(a, b)
    return result.mT.contiguous().mT if result.dim() > 1 else result


def fake_dtype(a: Tensor, b: Tensor, c: float) -> Tensor:
    return torch.mul(a, b).to(torch.float64)


def fake_on_cpu(a: Tensor, b: Tensor, c: float) -> Tensor:
    return torch.empty(torch.broadcast_shapes(a.shape, b.shape), dtype=a.dtype)


def fake_specialised(a: Tensor, b: Tensor, c: float) -> Tensor:
    return torch.mul(a, b) if a.shape[0] != 3 else torch.mul(b, a)


def fake_missing(a: Tensor, b: Tensor, c: float) -> Tensor:
    raise NotImplementedError("no fake kernel")


FAKE_DEFECTS: list[tuple[Callable[..., Any], str, str]] = [
    (fake_strides, "fake", "result 0 is .* of real tensors it is"),
    (fake_dtype, "fake", "float64.* of real tensors it is .*float32"),
    (fake_on_cpu, "meta", "cpu.* of real tensors it is .*meta"),
    (fake_strides, "meta", "result 0 is"),
    (fake_missing, "fake", "no fake kernel"),
    (fake_missing, "compile", "no fake kernel"),
    (fake_missing, "export", "no fake kernel"),
    (fake_dtype, "registration", "Dtypes torch.float32 and torch.float64"),
    (fake_missing, "inductor", "no fake kernel"),
    (fake_specialised, "compile_dynamic", "was compiled anew"),
    (fake_specialised, "export", "family 'matrices'"),
]


@pytest.mark.parametrize(
    ("fake", "name", "message"),
    FAKE_DEFECTS,
    ids=[f"{case[0].__name__}-{case[1]}" for case in FAKE_DEFECTS],
)
def test_a_wrong_fake_kernel_is_found(fake: Callable[..., Any], name: str, message: str) -> None:
    assert_found(toy.make(fake=fake), name, message)


def test_a_wrong_batching_rule_is_found() -> None:
    def ignores_dim(tensor: Tensor, dim: int | None, dims: int) -> Tensor:
        return toy.with_batch_first(tensor, None if dim is None else 0, dims)

    def without_ones(tensor: Tensor, dim: int | None, dims: int) -> Tensor:
        return tensor if dim is None else tensor.movedim(dim, 0)

    assert_found(toy.make(batch_first=ignores_dim), "vmap", r"in_dims \(2, 2\): ")
    assert_found(toy.make(batch_first=without_ones), "vmap", r"broadcast .* in_dims \(0, 0\)")


def test_autocast_is_held_to_its_policy(device: torch.device) -> None:
    plain, casting = toy.make(), toy.make(autocast=torch.float32)
    check(plain, checks=["autocast"], autocast="unchanged", device=device)
    half = [Sample((values(3, 4).half(), values(3, 4).half(), 1.0))]
    check(casting, checks=["autocast"], autocast="float32", samples=half, device=device)
    assert_found(plain, "autocast", "has dtype torch.float32 under autocast", autocast="lower")
    assert_found(casting, "autocast", "under autocast", autocast="unchanged", samples=half)


def test_errors_are_held_to_their_words() -> None:
    def silent(a: Tensor, b: Tensor, c: float) -> Tensor:
        return a * b + c

    def mumbling(a: Tensor, b: Tensor, c: float) -> Tensor:
        if a.dim() > 5:
            raise RuntimeError("invalid argument")
        return a * b + c

    def of_another_type(a: Tensor, b: Tensor, c: float) -> Tensor:
        if a.dim() > 5:
            raise KeyError("a must have at most 5 dimensions, but it has 6")
        return a * b + c

    assert_found(toy.make(forward=silent), "errors", "no RuntimeError was raised")
    assert_found(toy.make(forward=mumbling), "errors", "'invalid argument' does not match")
    assert_found(toy.make(forward=of_another_type), "errors", "KeyError")


def test_nothing_is_skipped_in_silence() -> None:
    op = toy.make()
    dense = [SAMPLES[0], SAMPLES[1]]
    assert_found(op, "samples", "no sample for 'empty'", samples=dense)
    assert_found(op, "samples", "no sample for 'families'", samples=SAMPLES[2:])
    assert_found(op, "samples", "no sample for 'errors'", errors=[])
    assert_found(op, "samples", "'empty' is declared absent", without={"empty"})
    assert_found(op, "samples", "mutates", mutates={"a"})
    assert_found(op, "gradcheck", "no sample is fit for this check", samples=SAMPLES[4:])
    report = check(op, samples=dense, without={"empty", "vmap"}, checks=["samples", "vmap"])
    assert report.absent == ("empty", "vmap")
    assert "without empty, vmap" in str(report)


def test_lacking_gradients_must_be_declared_and_true() -> None:
    without = toy.make(differentiable=False, forward=torch.no_grad()(toy.forward))
    through_the_kernel = toy.make(differentiable=False)
    assert_found(through_the_kernel, "registration", "autograd")
    check(without, without={"gradients"}, checks=["gradients", "gradcheck", "func"])
    assert_found(toy.make(), "gradients", "a backward pass succeeded", without={"gradients"})
    assert_found(
        toy.make(), "gradgradcheck", "second derivative is declared", without={"gradgradcheck"}
    )


def test_unknown_names_are_refused() -> None:
    for option in ("checks", "without", "nondifferentiable_inputs"):
        with pytest.raises(ValueError, match=f"{option} names \\['speling'\\]; known are"):
            check(toy.make(), **{option: ["speling"]})
    with pytest.raises(ValueError, match="autocast names"):
        check(toy.make(), autocast="speling")


def test_a_mutated_argument_is_compared_and_guarded() -> None:
    def check_writer(write: Callable[[Tensor, Tensor], None], **options: Any) -> None:
        name = f"{write.__name__}_{id(write)}"
        toy.library.define(f"{name}(Tensor a, *, Tensor(a!) out) -> ()")
        operator = getattr(torch.ops.toy, name).default

        def count_write(a: Tensor, *, out: Tensor) -> None:
            torch.autograd.graph.increment_version(out)
            with torch._C._AutoDispatchBelowADInplaceOrView():
                operator(a, out=out)

        toy.library.impl(name, lambda a, *, out: write(a, out), "CPU")
        toy.library.impl(name, count_write, "ADInplaceOrView")
        torch.library.register_fake(operator, lambda a, *, out: None)
        check_op(
            operator,
            [Sample((values(3, 5),), {"out": values(3, 5)})],
            reference=lambda a, *, out: out.copy_(a * 2),
            mutates={"out"},
            without={"gradients", "empty", "families", "errors", "vmap"},
            **options,
        )

    def right(a: Tensor, out: Tensor) -> None:
        out.copy_(a * 2)

    def wrong(a: Tensor, out: Tensor) -> None:
        out.copy_(a * 2)
        out[-1, -1] += 1

    def past_the_end(a: Tensor, out: Tensor) -> None:
        out.copy_(a * 2)
        size = out.untyped_storage().nbytes() // out.element_size()
        if size > 15:
            out.as_strided((1,), (1,), size - 1).fill_(0)

    check_writer(right)
    with pytest.raises(OperatorCheckError, match="output must be within"):
        check_writer(wrong, checks=["values"])
    with pytest.raises(OperatorCheckError, match="a write outside out"):
        check_writer(past_the_end, checks=["layouts"])


def test_a_random_operator_is_compared_under_one_seed() -> None:
    @torch.library.custom_op("toy::jitter", mutates_args=())
    def jitter(a: Tensor) -> Tensor:
        return a + torch.rand_like(a)

    jitter.register_fake(torch.empty_like)
    jitter.register_autograd(lambda ctx, grad: grad.clone())
    samples = [Sample((values(3, 4),), random=True)]
    without = {"gradcheck", "empty", "families", "errors"}
    checks = ["registration", "determinism", "fake", "compile", "export"]
    report = check_op(
        jitter._opoverload, samples, reference=torch.clone, without=without, checks=checks
    )
    assert tuple(report.runs) == tuple(checks)


@pytest.mark.parametrize("count", range(1, 9))
def test_any_three_items_are_chosen_in_every_combination(count: int) -> None:
    chosen = [set(each) for each in choices(range(count))]
    assert all(chosen)
    assert len(chosen) == len({frozenset(each) for each in chosen})
    assert set(range(count)) in chosen
    for three in combinations(range(count), min(count, 3)):
        met = {tuple(item in each for item in three) for each in chosen}
        # To choose none of all is no choice.
        assert len(met) == 2 ** len(three) - (count <= 3)
