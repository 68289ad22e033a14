"""DTensor's rules of our operators, and training with them on several processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from operator_collection import operator_classes, registered_operators

import pkg
from pkg.ops import _sharding
from pkg.ops._sharding import SUMMAND, WHOLE, Description, possible_splits

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

CHECKS = Path(__file__).with_name("distributed_checks.py")
# Each collective operation waits for ten minutes at most; this is for what hangs otherwise.
MOST_SECONDS = 3600


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.long)])
def test_several_processes_compute_what_one_does(processes: int, tmp_path: Path) -> None:
    outputs = [(tmp_path / f"output{rank}").open("w+") for rank in range(processes)]
    group = [
        subprocess.Popen(
            [sys.executable, str(CHECKS), str(rank), str(processes), str(tmp_path)],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        for rank, output in enumerate(outputs)
    ]
    start = time.monotonic()
    try:
        # The others wait in vain for one that has failed.
        while any(each.poll() is None for each in group) and not any(each.poll() for each in group):
            assert time.monotonic() - start < MOST_SECONDS, "the processes wait for each other"
            time.sleep(0.1)
    finally:
        for each in group:
            each.kill()
            each.wait()
    said = []
    for output in outputs:
        output.seek(0)
        said.append(output.read())
        output.close()
    ended = [each.returncode for each in group]
    assert not any(ended), f"the processes ended with {ended}:\n" + "\n".join(said)


def test_every_operator_has_a_rule() -> None:
    pkg.integrations.distributed.register()
    rules = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    composite = "CompositeImplicitAutograd"
    for name in registered_operators():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"pkg::{name}", composite):
            assert getattr(torch.ops.pkg, name).default in rules, name
    assert set(_sharding._layouts) <= registered_operators()


@pytest.mark.parametrize("name", sorted(_sharding._layouts))
def test_a_layout_names_arguments_and_results_of_its_operator(name: str) -> None:
    schema = getattr(torch.ops.pkg, name).default._schema
    names = [argument.name for argument in schema.arguments]
    layout = _sharding._layouts[name]
    for sample in operator_classes()[name]().samples()[:50]:
        given = {each.name: each.default_value for each in schema.arguments}
        given.update(zip(names, sample.args, strict=False))
        given.update(sample.kwargs)
        arguments = {
            key: Description(value.shape, value.dtype) if isinstance(value, torch.Tensor) else value
            for key, value in given.items()
        }
        if arguments.get("dropout_seed") is not None:
            continue  # refused for DTensors
        line = layout if isinstance(layout, str) else layout(**arguments)
        left, _, right = line.partition("->")
        named = [each.replace("+", "").split()[0] for each in left.split(",")]
        assert set(named) <= set(names)
        assert len([each for each in right.split(",") if each.strip()]) == len(schema.returns)
        for split in possible_splits(name, arguments, len(schema.returns), [2]):
            assert len(split.results) == len(schema.returns)


def described(*shape: int) -> Description:
    return Description(shape, torch.float32)


def test_the_splits_of_a_linear_layer() -> None:
    arguments = {
        "input": described(5, 8),
        "weight": described(6, 8),
        "bias": described(6),
        "activation": None,
    }
    by_rows = {"input": 0, "weight": WHOLE, "bias": WHOLE}
    by_columns = {"input": WHOLE, "weight": 0, "bias": 0}
    by_inner = {"input": 1, "weight": 1, "bias": SUMMAND}
    splits = possible_splits("linear", arguments, 1, [2])[1:]
    assert [(each.results, each.arguments) for each in splits] == [
        ([0], by_rows),
        ([SUMMAND], by_inner),
        ([1], by_columns),
    ]
    # An activation of summands is not the activation of their sum.
    splits = possible_splits("linear", {**arguments, "activation": "relu"}, 1, [2])[1:]
    assert [each.results for each in splits] == [[0], [1]]


@pytest.mark.parametrize(
    ("heads", "key_heads", "processes", "is_split"),
    [
        (8, 2, [2], True),
        (8, 2, [4], True),  # DTensor itself splits nothing into more parts than there are elements
        (6, 3, [2], False),
        (8, 1, [4], True),
        (3, 3, [2], True),
        (24, 12, [2, 4], False),
        (8, 4, [2, 4], True),
    ],
)
def test_heads_are_split_where_each_has_its_keys(
    heads: int, key_heads: int, processes: list[int], is_split: bool
) -> None:
    arguments = {
        "query": described(1, heads, 5, 8),
        "key": described(1, key_heads, 5, 8),
        "value": described(1, key_heads, 5, 8),
        "attn_mask": None,
        "dropout_seed": None,
        "enable_gqa": True,
        "keeps_residual": True,
        "alibi_slopes": described(heads),
    }
    splits = possible_splits("scaled_dot_product_attention_forward", arguments, 3, processes)[1:]
    assert [each.results for each in splits] == [[1, 1, WHOLE]] * is_split
    for each in splits:
        assert each.arguments["key"] == (WHOLE if key_heads == 1 else 1)
        assert each.arguments["alibi_slopes"] == 0


def test_only_whole_tiles_of_a_packed_weight_are_split() -> None:
    def splits(rows: int, processes: int) -> list[list[int | str]]:
        arguments = {"w": Description((rows, 64), torch.int32), "inner_k_tiles": 2}
        found = possible_splits("pack_tensor_core_tiled_layout", arguments, 1, [processes])[1:]
        return [each.results for each in found]

    assert splits(16, 2) == [[0], [1]]
    assert splits(24, 2) == [[1]]
    assert splits(20, 2) == [[1]]
    assert splits(32, 4) == [[0]]


def test_an_operator_that_states_nothing_is_never_split() -> None:
    arguments = {"a": described(4, 4), "c": 1.0}
    assert possible_splits("stated_by_nobody", arguments, 2, [2]) == [
        ([WHOLE, WHOLE], {"a": WHOLE})
    ]


def test_the_import_is_silent_and_brings_nothing_along() -> None:
    code = (
        "import sys, pkg, pkg.integrations.distributed as distributed\n"
        "assert 'torch.distributed.tensor' not in sys.modules\n"
        "distributed.register(); distributed.register()\n"
        "assert 'torch.distributed.tensor' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""
