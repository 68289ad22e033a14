"""Operators in worker processes, pickled modules, and subinterpreters."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import pkg

METHODS = multiprocessing.get_all_start_methods()


def product_of(seed: int) -> torch.Tensor:
    """Large enough for several threads."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(192, 192, generator=generator)
    return pkg.ops.matmul(a, a)


class Products(Dataset):
    """A dataset whose items the workers compute with the package's operators."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return product_of(index)


@pytest.mark.parametrize("method", METHODS)
def test_workers_of_a_data_loader(method: str) -> None:
    product_of(0)  # the parent's threads have run
    loader = DataLoader(Products(), num_workers=2, multiprocessing_context=method)
    batches = list(loader)
    for index, batch in enumerate(batches):
        # One thread in a worker, perhaps several here: the order of sums may differ.
        torch.testing.assert_close(batch[0], product_of(index))


def test_a_pool_of_spawned_processes() -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.map_async(product_of, range(3)).get()
    for index, result in enumerate(results):
        torch.testing.assert_close(result, product_of(index))


@pytest.mark.parametrize("name", pkg.ops.__all__)
def test_public_functions_are_pickled_by_name(name: str) -> None:
    function = getattr(pkg.ops, name)
    assert pickle.loads(pickle.dumps(function)) is function


def test_a_module_is_pickled_with_its_parameters() -> None:
    layer = pkg.nn.Linear(7, 5, activation="gelu").eval().pack_weight()
    input = torch.randn(3, 7)
    with torch.no_grad():
        copy = pickle.loads(pickle.dumps(layer))
        assert not copy.is_packed
        assert torch.equal(copy(input), layer.unpack_weight()(input))


def triple(tensor: torch.Tensor) -> None:
    """In a process that shares the tensor's memory."""
    tensor.mul_(3)


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_sees_what_another_process_writes(method: str) -> None:
    layer = pkg.nn.Linear(7, 5, bias=False).eval()
    layer.share_memory()
    input = torch.randn(3, 7)
    with torch.no_grad():
        before = layer(input)
        process = torch.multiprocessing.get_context(method).Process(
            target=triple, args=(layer.weight.detach(),)
        )
        process.start()
        process.join(120)
        assert process.exitcode == 0
        torch.testing.assert_close(layer(input), 3 * before)


@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this PyTorch has no gloo",
)
def test_a_layer_sees_what_a_broadcast_writes(tmp_path: Path) -> None:
    # The second process receives the first one's weight, after a call with its own.
    code = """
        import sys
        import torch
        from torch import distributed
        import pkg
        rank, file = int(sys.argv[1]), sys.argv[2]
        store = distributed.FileStore(file, 2)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
        layer = pkg.nn.Linear(7, 5, bias=False).eval()
        torch.nn.init.constant_(layer.weight, rank + 1.0)
        input = torch.ones(3, 7)
        with torch.no_grad():
            assert (layer(input) == 7 * (rank + 1)).all()
            distributed.broadcast(layer.weight.detach(), 0)
            assert (layer.weight == 1).all()
            assert (layer(input) == 7).all(), layer(input)
        distributed.destroy_process_group()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            errors = process.communicate(timeout=120)[1]
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("first", ["", "import pkg"], ids=["alone", "imported before"])
def test_a_subinterpreter_is_refused_in_words(first: str) -> None:
    done = run(f"""
        {first}
        try:
            import _interpreters as interpreters
        except ModuleNotFoundError:
            import _xxsubinterpreters as interpreters
        other = interpreters.create()
        run = getattr(interpreters, "exec", None) or interpreters.run_string
        failed = run(other, "try:\\n import pkg\\nexcept ImportError as e: print(e, flush=True)")
        assert failed is None, failed
        interpreters.destroy(other)
    """)
    assert done.returncode == 0, done.stderr
    assert "cannot be imported into a subinterpreter" in done.stdout


@pytest.mark.skipif("fork" not in METHODS, reason="this system cannot fork")
def test_a_fork_before_and_after_the_import() -> None:
    # The child of a process whose threads have run may use one thread, as PyTorch's own may.
    done = run("""
        import os
        import torch
        child = os.fork()
        if child == 0:
            import pkg
            os._exit(0 if pkg.ops.mul(torch.ones(2), torch.ones(2)).sum() == 2 else 1)
        assert os.waitpid(child, 0)[1] == 0
        import pkg
        a = torch.randn(256, 256)
        pkg.ops.matmul(a, a)
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            os._exit(0 if torch.allclose(pkg.ops.matmul(a, a), a @ a, atol=1e-3) else 1)
        assert os.waitpid(child, 0)[1] == 0
    """)
    assert done.returncode == 0, done.stderr


NO_MEMORY = """
import resource
import torch
import pkg

torch.set_num_threads(1)
a, b = torch.randn(3000, 1000), torch.randn(1000, 3000)
pkg.ops.matmul(a[:1], b[:, :1])
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
for more in range(33 << 20, 42 << 20, 512 << 10):
    resource.setrlimit(resource.RLIMIT_AS, (held + more, -1))
    try:
        pkg.ops.matmul(a, b)
    except (MemoryError, RuntimeError) as error:
        assert "no memory for" in str(error), error
        print("refused")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_little_memory_is_said_in_words() -> None:
    told = subprocess.run(
        [sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, check=True
    )
    # First there is none for the result, then none for scratch.
    assert "refused" in told.stdout


NO_SCRATCH = """
import resource
import torch
import pkg
from pkg import _accelerate_routes, _accelerate_table

torch.set_num_threads(1)
_accelerate_table.put({"ratios": [9.0] * len(_accelerate_routes.table())})
a, b = torch.randn(64, 4096), torch.randn(4096, 4096).T
torch.mm(a, b)  # PyTorch has what it needs for its own from now on
pkg.accelerate()
torch.mm(a[:1], b[:, :1])
_accelerate_routes.take_counts()
made = 0
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
for more in range(0, 40 << 20, 512 << 10):
    resource.setrlimit(resource.RLIMIT_AS, (held + more, -1))
    try:
        torch.mm(a, b)
        made += 1
    except RuntimeError as error:
        assert "scratch" not in str(error), error
(mm,) = (each for each in _accelerate_routes.take_counts() if each.operator == "mm")
print(made, mm.taken, mm.left)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_pytorch_multiplies_where_there_is_no_memory_for_scratch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_SCRATCH], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    made, ours, left = map(int, done.stdout.split())
    assert 0 < ours < made
    assert made - ours <= left
