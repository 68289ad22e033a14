"""What each process of a group runs for test_distributed.py; a check that fails is reported.

    python distributed_checks.py RANK PROCESSES FOLDER

Every process computes the single process's result too, from the same seed, and compares.
"""

from __future__ import annotations

import datetime
import itertools
import os
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from operator_collection import INFERENCE_ONLY, operator_classes, public_operators
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    parallel,
)
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

import pkg
from pkg.ops._sharding import SUMMAND, WHOLE, Description, possible_splits
from pkg.testing import Sample

# Seen with 2.10: DTensor takes no operator without results, keeps what a composite operator's error
# says to itself, and gathers a packed weight into one that is not contiguous.
RECENT = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
SAMPLES = 2
SPLIT_ALONE = 3
MINUTES = 10
MOST_ELEMENTS = 1 << 16
# Sums of so many terms in another order, each at most so many times the largest result.
MOST_TERMS = 4096
TOLERANCE = MOST_TERMS * MOST_TERMS * torch.finfo(torch.float64).eps

HALF = (torch.float16, torch.bfloat16)

Check = Callable[[], None]


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check_close(result: Any, expected: Any) -> None:
    results, wanted = pytree.tree_leaves(result), pytree.tree_leaves(expected)
    exact = [each for each in wanted if isinstance(each, Tensor) and each.dtype == torch.float64]
    finite = [each.detach()[each.isfinite()].abs().max() for each in exact if each.isfinite().any()]
    largest = max(map(float, finite), default=0.0)
    for each, want in zip(results, wanted, strict=True):
        if not isinstance(want, Tensor):
            assert not isinstance(each, Tensor)
            continue
        value = whole(each)
        assert value.dtype == want.dtype
        tolerance = TOLERANCE * largest if want.dtype == torch.float64 else 0.0
        torch.testing.assert_close(value, want, rtol=0, atol=tolerance, equal_nan=True)


def samples_of(tested: type) -> Iterator[Sample]:
    """Small ones, of as many kinds as there are."""
    kinds = set()
    torch.manual_seed(zlib.crc32(tested.__name__.encode()))
    for sample in tested().samples():
        if sample.random or sum(each.numel() for each in sample.tensors) > MOST_ELEMENTS:
            continue
        if drops(tested.op, sample):
            continue
        # What attention keeps for its gradient in half precision is empty otherwise.
        empty = [each for each in sample.tensors if each.numel() == 0 and each.shape != (0,)]
        if empty or sample.tensors[0].dtype in HALF:
            continue
        kind = tuple((each.dim(), each.dtype) for each in sample.tensors), len(sample.args)
        if kind not in kinds:
            kinds.add(kind)
            yield sample
        if len(kinds) == SAMPLES:
            return


def placements_to_try(
    name: str, operator: Any, sample: Sample, mesh: Any
) -> Iterator[tuple[list[Any], Any]]:
    """How the tensors of a sample may lie: as each rule has it, and each of them split alone."""
    schema = operator._schema
    names = [each.name for each in schema.arguments]
    given = {**dict(zip(names, sample.args, strict=False)), **sample.kwargs}
    described = {
        key: Description(value.shape, value.dtype) if isinstance(value, Tensor) else value
        for key, value in {
            each.name: given.get(each.name, each.default_value) for each in schema.arguments
        }.items()
    }
    tensors = [key for key, value in given.items() if isinstance(value, Tensor)]
    composite = "CompositeImplicitAutograd"
    ways = []
    if not torch._C._dispatch_has_kernel_for_dispatch_key(schema.name, composite):
        for split in possible_splits(name, described, len(schema.returns), mesh.shape):
            parts = [split.arguments.get(key, WHOLE) for key in tensors]
            # An argument cannot be given in summands here.
            results = None if SUMMAND in parts else split.results
            for key, part in zip(tensors, parts, strict=True):
                if isinstance(part, int) and given[key].shape[part] < mesh.size():
                    results = None  # which DTensor does not split
            ways.append((list(map(placement, parts)), results))
    all_alone = [(i, dim) for i, key in enumerate(tensors) for dim in range(given[key].dim())]
    for index, dim in all_alone[:: max(len(all_alone) // SPLIT_ALONE, 1)]:
        alone = [Replicate()] * len(tensors)
        alone[index] = Shard(dim)
        ways.append((alone, None))
    if mesh.ndim == 1:
        yield from (([[each] for each in way], results) for way, results in ways)
    else:
        # Pairs of the ways for either dimension of the mesh.
        for (first, _), (second, _) in list(itertools.product(ways, ways[::-1]))[::6]:
            yield [list(both) for both in zip(first, second, strict=True)], None


def drops(operator: Any, sample: Sample) -> bool:
    """Whether a seed of dropout is given, which is refused for DTensors."""
    names = [each.name for each in operator._schema.arguments]
    return dict(zip(names, sample.args, strict=False)).get("dropout_seed") is not None


def placement(part: int | str) -> Placement:
    if isinstance(part, int):
        return Shard(part)
    return Partial() if part == SUMMAND else Replicate()


def check_placements(result: Any, parts: Sequence[int | str] | None) -> None:
    """What lies as a rule has it is computed where it lies."""
    results = [each for each in pytree.tree_leaves(result) if isinstance(each, DTensor)]
    for each, part in zip(results, parts or (), strict=False):
        assert each.placements == (placement(part),), (each.placements, part)


def run_sample(operator: Any, sample: Sample, gradients: bool) -> Any:
    tensors = [each.detach() for each in sample.tensors]
    if gradients:
        for each in tensors:
            each.requires_grad_(each.is_floating_point())
    call = sample.with_tensors(tensors)
    result = operator(*call.args, **call.kwargs)
    if not gradients:
        return result
    outputs = [each for each in pytree.tree_leaves(result) if each.requires_grad]
    if not outputs:
        return result, []
    total = 0
    for output in outputs:
        weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
        if isinstance(output, DTensor):
            replicated = [Replicate()] * output.device_mesh.ndim
            weights = distribute_tensor(weights, output.device_mesh, replicated)
        total = total + (output * weights).sum()
    inputs = [each for each in tensors if each.requires_grad]
    return result, torch.autograd.grad(total, inputs, allow_unused=True)


def check_operator(name: str, mesh: Any) -> None:
    tested = operator_classes()[name]
    if name == "add_out":
        return  # it has a check of its own
    operator = tested.op
    public = name in public_operators() and name not in INFERENCE_ONLY
    tried, start = 0, time.process_time()
    for sample in samples_of(tested):
        gradients = public and sample.differentiable
        try:
            expected = run_sample(operator, sample, gradients)
        except RuntimeError:
            if not gradients:
                raise
            gradients = False  # of a kind that has none
            expected = run_sample(operator, sample, gradients)
        results = [each for each in pytree.tree_leaves(expected) if isinstance(each, Tensor)]
        if any(each.dtype in HALF for each in results) and not name.startswith("dequantize"):
            continue  # summands are rounded
        for placements, of_results in placements_to_try(name, operator, sample, mesh):
            remaining = iter(placements)
            spread = sample.map_tensors(
                lambda each, left=remaining: distribute_tensor(each, mesh, next(left))
            )
            try:
                result = run_sample(operator, spread, gradients)
                check_close(result, expected)
                check_placements(result[0] if gradients else result, of_results)
            except Exception as error:
                raise AssertionError(f"{name} {sample} as {placements}: {error}") from error
            tried += 1
    if "--times" in sys.argv:
        print(name, tried, round(time.process_time() - start, 2), flush=True)
    assert tried or name in ("attention_dropout_mask",), f"{name}: no sample was tried"


def check_add_out(mesh: Any) -> None:
    a, b = torch.randn(5, 4), torch.randn(4)
    for placement in (Replicate(), Shard(0), Shard(1)):
        spread = [placement] * mesh.ndim
        out = distribute_tensor(torch.zeros(5, 4), mesh, spread)
        local = out.to_local()
        addend = distribute_tensor(b, mesh, [Shard(0)] * mesh.ndim)
        pkg.ops.add_out(whole_everywhere(a, mesh), addend, out)
        assert out.to_local() is local or out.to_local().data_ptr() == local.data_ptr()
        assert out.placements == tuple(spread)
        assert torch.equal(out.full_tensor(), a + b)
    partial = DTensor.from_local(torch.zeros(5, 4), mesh, [Partial()] * mesh.ndim)
    a, b = whole_everywhere(a, mesh), whole_everywhere(b, mesh)
    with words("add_out: out is written to", "not Partial"):
        pkg.ops.add_out(a, b, partial)


def whole_everywhere(tensor: Tensor, mesh: Any) -> DTensor:
    return distribute_tensor(tensor, mesh, [Replicate()] * mesh.ndim)


@contextmanager
def words(*expected: str) -> Iterator[None]:
    said = None
    try:
        yield
    except RuntimeError as error:
        said = str(error)
    assert said is not None, f"nothing was raised, where {expected} was expected"
    for each in expected:
        assert each in said, (each, said)


def check_unregistered(mesh: Any) -> None:
    """Runs before register() is called."""
    a = whole_everywhere(torch.randn(4, 4), mesh)
    weights = whole_everywhere(torch.randn(12, 8), mesh)
    say = "call pkg.integrations.distributed.register() first"
    for requires_grad in (False, True):
        a.requires_grad_(requires_grad)
        with words("linear", say):
            pkg.ops.linear(a, a)
        with words("matmul", say):
            pkg.ops.matmul(a, a)
        with words("lltm", say):
            pkg.ops.lltm(a, weights, weights[:, 0], a, a)
    with words("quantize_rowwise", say):
        pkg.ops.quantize_rowwise(a.detach())


def check_refusals(mesh: Any) -> None:
    a = torch.randn(1, 2, 8, 4)
    spread = whole_everywhere(a, mesh)
    with words("some tensors are DTensors", "to_local()"):
        pkg.ops.scaled_dot_product_attention(spread, spread, a)
    with words("dropout_p is not 0 and query is a DTensor", "to_local()"):
        pkg.ops.scaled_dot_product_attention(spread, spread, spread, dropout_p=0.5)
    with words("linear: input of shape", "and weight of shape"):
        pkg.ops.linear(spread, whole_everywhere(torch.randn(5, 3), mesh))


def check_decisions_are_for_their_arguments(mesh: Any) -> None:
    """DTensor remembers by some of the arguments; one call must not get another one's shape."""
    rows = torch.randn(4, 8, dtype=torch.float64)
    weight = torch.randn(6, 8, dtype=torch.float64)
    images = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    heads = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    integers = torch.randint(-9, 9, (4, 8), dtype=torch.int8)
    calls: list[tuple[Any, ...]] = [
        *((pkg.ops.linear, rows, weight, None, each) for each in (None, "relu", "gelu", None)),
        *((pkg.ops.quantize_rowwise, rows, bits) for bits in (8, 4)),
        *((pkg.ops.spatial_correlation_sample, images, images, 1, p) for p in (1, 3, (1, 5))),
        *((pkg.ops.muladd, rows, rows, number) for number in (1.0, 2.0)),
        (pkg.ops.scaled_dot_product_attention, heads, heads, heads),
        (pkg.ops.scaled_dot_product_attention, heads, heads, heads, None, 0.0, True),
    ]
    for dim in range(2):
        for function, *arguments in calls:
            spread = [
                distribute_tensor(each, mesh, [Shard(dim)] * mesh.ndim)
                if isinstance(each, Tensor)
                else each
                for each in arguments
            ]
            check_close(function(*spread), function(*arguments))
            with torch.inference_mode():
                check_close(function(*spread), function(*arguments))
    left = distribute_tensor(integers, mesh, [Shard(0)] * mesh.ndim)
    product = pkg.ops.matmul(integers, integers.mT, out_dtype=torch.int32)
    check_close(pkg.ops.matmul(left, left.mT, out_dtype=torch.int32), product)


def check_uneven(mesh: Any) -> None:
    """Heads that do not divide, rows that do not fill a tile: redistributed, never wrong."""
    for heads, key_heads in ((3, 3), (6, 3), (6, 2), (4, 1), (6, 6)):
        query = torch.randn(3, heads, 7, 8, dtype=torch.float64)
        key = torch.randn(3, key_heads, 5, 8, dtype=torch.float64)
        expected = attend(query, key)
        for of_query, of_key in itertools.product((Shard(1), Shard(0), Replicate()), repeat=2):
            spread = (
                distribute_tensor(query, mesh, [of_query] * mesh.ndim),
                distribute_tensor(key, mesh, [of_key] * mesh.ndim),
            )
            check_close(attend(*spread), expected)
    for rows in (8, 24, 20, 32):
        w = torch.randint(0, 16, (rows, 64), dtype=torch.int32)
        packed = pkg.ops.pack_tensor_core_tiled_layout(w, 2)
        spread = distribute_tensor(w, mesh, [Shard(0)] * mesh.ndim)
        result = pkg.ops.pack_tensor_core_tiled_layout(spread, 2)
        assert torch.equal(result.full_tensor(), packed)
        result = pkg.ops.unpack_tensor_core_tiled_layout(result, 2)
        assert torch.equal(result.full_tensor()[:rows], w)


def attend(query: Tensor, key: Tensor) -> Any:
    query, key = (each.detach().requires_grad_() for each in (query, key))
    output = pkg.ops.scaled_dot_product_attention(
        query, key, key, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output, torch.autograd.grad(output.square().sum(), (query, key))


class Block(torch.nn.Module):
    """Attention and a perceptron, of our modules and operators."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.size = width // heads
        self.norm = torch.nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (pkg.nn.Linear(width, width) for _ in range(4))
        self.up = pkg.nn.Linear(width, 4 * width, activation="gelu")
        self.down = pkg.nn.Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        normed = self.norm(stream)
        query, key, value = (
            part(normed).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = pkg.ops.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.out(mixed.transpose(1, 2).flatten(2))
        return stream + self.down(self.up(stream))


def model_and_input() -> tuple[torch.nn.Module, Tensor]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(Block(), Block()).double()
    return model, torch.randn(4, 6, 16, dtype=torch.float64)


def styles(kind: str) -> dict[str, Any]:
    if kind == "sequence":
        # Between the layers each process has a part of the tokens.
        across = {"input_layouts": Shard(1), "use_local_output": False}
        to = {"output_layouts": Shard(1), "use_local_output": False}
        norm = {"norm": parallel.SequenceParallel()}
    else:
        across = {"use_local_output": kind == "local"}
        to = {}
        norm = {}
    column = {name: parallel.ColwiseParallel(**across) for name in ("query", "key", "value", "up")}
    return {**column, **norm, **{name: parallel.RowwiseParallel(**to) for name in ("out", "down")}}


def trained(model: torch.nn.Module, output: Tensor) -> dict[str, Tensor]:
    """The gradients, whole."""
    if isinstance(output, DTensor):
        output = output.full_tensor()
    output.square().mean().backward()
    return {name: whole(each.grad) for name, each in model.named_parameters()}


def check_tensor_parallel(mesh: Any, kind: str) -> None:
    reference, input = model_and_input()
    expected = trained(reference, reference(input))
    model, _ = model_and_input()
    for block in model:
        parallel.parallelize_module(block, mesh, styles(kind))
    fed = distribute_tensor(input, mesh, [Shard(1)]) if kind == "sequence" else input
    weight = model[0].up.weight
    assert weight.to_local().shape[0] * mesh.size() == weight.shape[0]
    output = model(fed)
    check_close(output, reference(input))
    check_close(trained(model, output), expected)


def check_data_parallel(_: Any) -> None:
    reference, input = model_and_input()
    expected = trained(reference, reference(input))
    model, _ = model_and_input()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    trained(wrapped, wrapped(input.chunk(dist.get_world_size())[dist.get_rank()]))
    check_close({name: each.grad for name, each in model.named_parameters()}, expected)


def step(model: torch.nn.Module, output: Tensor) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    trained(model, output)
    optimizer.step()
    return {name: whole(each) for name, each in model.named_parameters()}


def check_fully_sharded(mesh: Any) -> None:
    """On a mesh of two dimensions tensor-parallel along the second."""
    reference, input = model_and_input()
    expected = step(reference, reference(input))
    model, _ = model_and_input()
    data = mesh if mesh.ndim == 1 else mesh["data"]
    for block in model:
        if mesh.ndim == 2:
            parallel.parallelize_module(block, mesh["model"], styles("local"))
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    own = input.chunk(data.size())[data.get_local_rank()]
    check_close(step(model, model(own)), expected)


def checks(mesh: Any) -> Iterator[tuple[str, Check]]:
    if RECENT:
        yield "add_out", lambda: check_add_out(mesh)
        yield "refusals", lambda: check_refusals(mesh)
    yield "decisions", lambda: check_decisions_are_for_their_arguments(mesh)
    yield "uneven", lambda: check_uneven(mesh)
    for kind in ("local", "DTensor", "sequence"):
        line = mesh if mesh.ndim == 1 else mesh["model"]
        yield f"tensor parallel, {kind}", lambda k=kind, m=line: check_tensor_parallel(m, k)
    yield "data parallel", lambda: check_data_parallel(mesh)
    yield "fully sharded", lambda: check_fully_sharded(mesh)
    for name in sorted(operator_classes()):
        if name == "packed_linear" and not RECENT:
            continue
        yield name, lambda n=name: check_operator(n, mesh)


def main(rank: int, processes: int, folder: Path) -> int:
    dist.init_process_group(
        "gloo",
        init_method=(folder / "store").as_uri(),
        rank=rank,
        world_size=processes,
        timeout=datetime.timedelta(minutes=MINUTES),
    )
    torch.set_num_threads(1)
    shape = (2, processes // 2) if processes > 2 else (processes,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "model")[: len(shape)])
    check_unregistered(mesh)
    threads = [threading.Thread(target=pkg.integrations.distributed.register) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    pkg.integrations.distributed.register()
    failed = 0
    for name, check in checks(mesh):
        torch.manual_seed(0)
        try:
            check()
        except Exception:
            failed += 1
            print(f"{name} on {shape}:\n{traceback.format_exc()}", flush=True)
            if "--all" not in sys.argv:
                break  # the other processes may wait for this one
    if not failed:
        dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.flush()
    os._exit(status)  # threads of a group that failed would keep it
