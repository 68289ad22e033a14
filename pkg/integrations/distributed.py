"""Tensor parallelism: our operators on DTensors, the tensors that lie on several processes.

:func:`register` tells DTensor how each operator may be split. From then on the styles of
``torch.distributed.tensor.parallel`` (``ColwiseParallel``, ``RowwiseParallel`` and the others) take
:class:`pkg.nn.Linear` as they take PyTorch's module, and a call with DTensors computes on each
process what that has, forward and backward::

    import pkg
    from torch.distributed.tensor import parallel

    pkg.integrations.distributed.register()
    styles = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    parallel.parallelize_module(model, mesh, styles)

Data parallelism, by ``DistributedDataParallel`` or by FSDP's ``fully_shard``, needs no rules: there
operators see plain tensors.

An argument that lies otherwise than any rule takes it is redistributed first, as DTensor does for
PyTorch's operators. An operator that cannot be split is computed by every process on the whole.
Dropout in attention is for plain tensors alone, and ``add_out`` is not known to DTensor of PyTorch
2.10, which takes no operator without results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..ops._sharding import SUMMAND, WHOLE, Description, Part, possible_splits

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.distributed.tensor.placement_types import Placement

_lock = threading.Lock()
_is_registered = False


def register() -> None:
    """Tells DTensor how each operator of :mod:`pkg.ops` may be split, for this process.

    May be called again, and from several threads. Without it a call with DTensors raises.

    Raises:
        ImportError: This PyTorch has no ``torch.distributed.tensor``.

    Example:
        >>> register()
    """
    global _is_registered
    try:
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError as error:
        raise ImportError(
            "pkg.integrations.distributed.register: this PyTorch was built without "
            f"torch.distributed.tensor ({error}); install one that has it"
        ) from error
    with _lock:
        if _is_registered:
            return
        for name in _operators():
            operator = getattr(torch.ops.pkg, name).default
            register_sharding(operator)(_rule(name, operator))
            _cache_by_all_arguments(operator)
        _is_registered = True


def _operators() -> list[str]:
    """The operators that have kernels: composite ones are taken apart before DTensor sees them."""
    composite = "CompositeImplicitAutograd"
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = torch._C._dispatch_get_all_op_names()
    ours = [name for name in names if name.startswith("pkg::")]
    return [name.removeprefix("pkg::") for name in ours if not has_kernel(name, composite)]


def _rule(name: str, operator: OpOverload) -> Callable[..., Any]:
    """What DTensor asks for the ways of a call: the placements of results and of arguments."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    schema = operator._schema
    results = len(schema.returns)

    def placement(part: Part) -> Placement:
        if isinstance(part, int):
            return Shard(part)
        return Partial() if part == SUMMAND else Replicate()

    def written_to(specs: Mapping[str, Any]) -> Iterator[tuple[str, Placement]]:
        """The arguments that are written to, which have to stay where they lie."""
        for argument in schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            placements = specs[argument.name].placements
            if len(set(placements)) > 1 or placements[0].is_partial():
                raise RuntimeError(
                    f"{name}: {argument.name} is written to and has the placements "
                    f"{tuple(placements)}; they must be alike in every dimension of the mesh, and "
                    "not Partial"
                )
            yield argument.name, placements[0]

    def rule(*values: Any, **named: Any) -> Sequence[tuple[list[Any], list[Any]]]:
        given = {
            **{each.name: value for each, value in zip(schema.arguments, values, strict=False)},
            **named,
        }
        specs = {key: value for key, value in given.items() if hasattr(value, "placements")}
        arguments = {
            each.name: given.get(each.name, each.default_value) for each in schema.arguments
        }
        described = {
            **arguments,
            **{
                key: Description(tuple(spec.shape), spec.tensor_meta.dtype)
                for key, spec in specs.items()
            },
        }
        mesh = next(iter(specs.values())).mesh
        ways = []
        for split in possible_splits(name, described, results, mesh.shape):
            parts = {key: placement(split.arguments.get(key, WHOLE)) for key in specs}
            if all(parts[key] == lies for key, lies in written_to(specs)):
                of_results = [placement(part) for part in split.results]
                ways.append((of_results, [parts.get(key) for key in given]))
        return ways

    return rule


def _cache_by_all_arguments(operator: OpOverload) -> None:
    """Lets DTensor remember its decision for the arguments that it was made for alone.

    ``register_sharding`` reckons that whole numbers matter, from the first of them on; an
    activation or a list of sizes would be taken for that of the call before. Only a number that is
    added or multiplied by changes nothing.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    arguments = operator._schema.arguments
    plain = [str(each.type) in ("Tensor", "float") for each in arguments]
    first = plain.index(False) if False in plain else len(plain)
    keywords = [each.name for each in arguments if each.kwarg_only]
    information = RuntimeSchemaInfo(first, keywords or None, needs_pytree=True)
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[operator] = information
