"""What each process of a group runs for test_distributed.py; a check that fails is reported.

    python distributed_checks.py RANK PROCESSES FOLDER

Every process computes the single process's result too, from the same seed, and compares.
"""

from __future__ import annotations

import datetime
import itertools
import os
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from operator_collection import INFERENCE_ONLY, operator_classes, public_operators
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree

import pkg
from pkg.ops._sharding import Description, possible_splits
from pkg.testing import Sample

SAMPLES = 2
SPLIT_ALONE = 3
MOST_ELEMENTS = 1 << 16
# Sums of so many terms, in another order, of which each is at most so many times the largest result.
MOST_TERMS = 4096
TOLERANCE = MOST_TERMS * MOST_TERMS * torch.finfo(torch.float64).eps

HALF = (torch.float16, torch.bfloat16)

Check = Callable[[], None]


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check_close(result: Any, expected: Any) -> None:
    results, wanted = pytree.tree_leaves(result), pytree.tree_leaves(expected)
    for each, want in zip(results, wanted, strict=True):
        if not isinstance(want, Tensor):
            assert each is None or not isinstance(each, Tensor)
            continue
        value = whole(each)
        assert value.shape == want.shape, (value.shape, want.shape)
        assert value.dtype == want.dtype
        finite = want.detach()[want.isfinite()] if want.dtype == torch.float64 else want[:0]
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        torch.testing.assert_close(
            value, want, rtol=0, atol=TOLERANCE * largest, equal_nan=True
        )


def samples_of(tested: type) -> Iterator[Sample]:
    """Small ones, of as many kinds as there are."""
    kinds = set()
    torch.manual_seed(zlib.crc32(tested.__name__.encode()))
    for sample in tested().samples():
        if sample.random or sum(each.numel() for each in sample.tensors) > MOST_ELEMENTS:
            continue
        if any(each.numel() == 0 for each in sample.tensors):
            continue
        kind = tuple((each.dim(), each.dtype) for each in sample.tensors), len(sample.args)
        if kind not in kinds:
            kinds.add(kind)
            yield sample
        if len(kinds) == SAMPLES:
            return


def placements_to_try(name: str, operator: Any, sample: Sample, mesh: Any) -> Iterator[list[Any]]:
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
    seen = []
    try:
        splits = possible_splits(name, described, len(schema.returns), mesh.shape)
    except TypeError:
        splits = []  # a composite operator
    for split in splits:
        parts = [split.arguments.get(key) for key in tensors]
        seen.append([Shard(part) if isinstance(part, int) else Replicate() for part in parts])
    all_alone = [(i, dim) for i, key in enumerate(tensors) for dim in range(given[key].dim())]
    for index, dim in all_alone[:: max(len(all_alone) // SPLIT_ALONE, 1)]:
        alone = [Replicate()] * len(tensors)
        alone[index] = Shard(dim)
        if alone not in seen:
            seen.append(alone)
    if mesh.ndim == 1:
        yield from ([[each] for each in one] for one in seen)
    else:
        # Pairs of the ways for either dimension of the mesh.
        for first, second in itertools.islice(itertools.product(seen, seen[::-1]), 0, None, 3):
            yield [list(both) for both in zip(first, second, strict=True)]


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
        for placements in placements_to_try(name, operator, sample, mesh):
            remaining = iter(placements)
            spread = sample.map_tensors(
                lambda each, left=remaining: distribute_tensor(each, mesh, next(left))
            )
            try:
                check_close(run_sample(operator, spread, gradients), expected)
            except Exception as error:
                raise AssertionError(f"{name} {sample} as {placements}: {error}") from error
            tried += 1
    if "--times" in sys.argv:
        print(name, tried, round(time.process_time() - start, 2), flush=True)
    assert tried or name in ("attention_dropout_mask",), f"{name}: no sample was tried"


def checks(meshes: list[Any]) -> Iterator[tuple[str, Check]]:
    for mesh in meshes:
        for name in sorted(operator_classes()):
            yield f"{name} on {tuple(mesh.shape)}", lambda n=name, m=mesh: check_operator(n, m)


def main(rank: int, processes: int, folder: Path) -> int:
    dist.init_process_group(
        "gloo",
        init_method=(folder / "store").as_uri(),
        rank=rank,
        world_size=processes,
        timeout=datetime.timedelta(minutes=10),
    )
    torch.set_num_threads(1)
    pkg.integrations.distributed.register()
    shapes = [(processes,)] if processes == 2 else [(2, processes // 2)]
    meshes = [init_device_mesh("cpu", shape) for shape in shapes]
    failed = []
    for name, check in checks(meshes):
        torch.manual_seed(0)
        try:
            check()
        except Exception:
            failed.append(f"{name}:\n{traceback.format_exc()}")
            if "--all" not in sys.argv:
                break
    print("\n".join(failed), flush=True)
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
