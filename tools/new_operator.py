"""Writes the files of a new elementwise operator: ``python -m pkg new``.

    python tools/new_operator.py scaled "scaled(Tensor x, float alpha) -> Tensor"

It takes one or two tensors and any numbers, and multiplies them all to start from; what comes out
builds, works and passes its test. It writes

- ``csrc/cpu/scaled.cpp``: the formula, once for every device, and what dtypes it takes;
- ``csrc/cuda/scaled.cu``: compiles that formula for CUDA;
- ``pkg/ops/scaled.py``: the public function, tracing, the gradient, vmap;
- ``tests/ops/test_scaled.py``: a reference and the samples,

puts the schema into ``csrc/library.cpp`` and then writes what ``make generate`` does. All or
nothing: a refusal leaves the tree as it was. It imports nothing of the package, which may not be
built yet.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import keyword
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
SCHEMAS = "csrc/library.cpp"
CPP_COLUMNS, PYTHON_COLUMNS = 80, 100
MOST_PARAMETERS = 16  # csrc/host/formula.h

CPP_TYPES = {"Tensor": "Tensor", "float": "Float", "int": "Int", "bool": "Bool"}
# An example of each, exact in every dtype.
SAMPLE_VALUES = {"float": "0.75", "int": "3", "bool": "True"}
DOCTEST_VALUES = {"float": "2.0", "int": "3", "bool": "True"}
MEANINGS = {
    "float": "A number; no gradient flows to it.",
    "int": "A whole number; no gradient flows to it.",
    "bool": "A truth, 1 or 0; no gradient flows to it.",
}

CPP_KEYWORDS = """
alignas alignof and_eq asm auto bitand bitor bool case catch char class compl concept const
consteval constexpr constinit const_cast decltype default delete do double dynamic_cast enum
explicit export extern false float for friend goto inline int long mutable namespace new noexcept
not_eq nullptr operator or_eq private protected public register reinterpret_cast requires short
signed sizeof static static_assert static_cast struct switch template this thread_local throw true
typedef typeid typename union unsigned using virtual void volatile wchar_t xor xor_eq
"""
# What the files say already.
TAKEN_IN_FILES = """
annotations pkg math torch ctx grad slope inputs output operator reference staticmethod tuple list
fake_pointwise reduce_to register_fake register_gradients register_pointwise_vmap register_sharding
unary_errors unary_samples binary_errors binary_samples
"""


class RefusedError(Exception):
    """Why no operator was written, in words."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a schema: its type, name and default as they stand there."""

    type: str
    name: str
    default: str | None

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor, and not a number."""
        return self.type == "Tensor"

    @property
    def python(self) -> str:
        """As Python declares it."""
        return f"{self.name}: {self.type}" + (f" = {self.default}" if self.default else "")

    @property
    def cpp_factor(self) -> str:
        """As a factor in C++, which does not multiply vectors by a bool."""
        return f"Float({self.name})" if self.type == "bool" else self.name


@dataclass(frozen=True)
class Operator:
    """An operator to be written."""

    name: str
    parameters: tuple[Parameter, ...]

    @property
    def tensors(self) -> list[str]:
        """The names of its tensors."""
        return [each.name for each in self.parameters if each.is_tensor]

    @property
    def numbers(self) -> list[str]:
        """The names of its numbers, truths among them."""
        return [each.name for each in self.parameters if not each.is_tensor]

    @property
    def terms(self) -> list[str]:
        """What is multiplied to start from: all, and a lone tensor by itself."""
        alone = len(self.parameters) == 1
        return self.tensors + (self.tensors if alone else self.numbers)

    @property
    def schema(self) -> str:
        """The schema, written as the others are."""
        parameters = (
            f"{each.type} {each.name}" + (f"={each.default}" if each.default else "")
            for each in self.parameters
        )
        return f"{self.name}({', '.join(parameters)}) -> Tensor"

    def values(self, of_type: Mapping[str, str]) -> list[str]:
        """A value for each number."""
        return [of_type[each.type] for each in self.parameters if not each.is_tensor]


def parsed(name: str, schema: str, taken: Iterable[str]) -> Operator:
    """The operator that a name and a schema ask for.

    Raises:
        RefusedError: It cannot be made; the message says why.
    """
    check_name("the operator", name)
    if re.fullmatch(r"[a-z]\w*", name) is None:
        raise RefusedError(f"the operator's name is '{name}'; it must begin with a small letter")
    match = re.fullmatch(r"\s*([^\s(]*)\s*\((.*)\)\s*->\s*(.+?)\s*", schema, re.DOTALL)
    if match is None:
        raise RefusedError(
            f"'{schema}' is no schema; it must be like '{name}(Tensor x, float alpha) -> Tensor'"
        )
    named, inside, result = match.groups()
    if named != name:
        raise RefusedError(f"the name is '{name}' but the schema is of '{named}'; write one name")
    if name in taken:
        raise RefusedError(f"{SCHEMAS} has an operator '{name}' already; take another name")
    if result != "Tensor":
        raise RefusedError(
            f"'{name}' returns {result}; an elementwise operator returns one Tensor. "
            "docs/adding_a_kernel.md shows one of another kind"
        )
    parameters = [parameter(text.strip()) for text in inside.split(",")] if inside.strip() else []
    check_parameters(name, parameters)
    return Operator(name, tuple(parameters))


def check_name(of: str, name: str) -> None:
    """Refuses a name that Python or C++ would, or that the files use for something else."""
    if not name.isascii() or not name.isidentifier():
        raise RefusedError(f"the name of {of} is '{name}'; it must be an identifier, like my_op")
    if keyword.iskeyword(name) or name in CPP_KEYWORDS.split():
        raise RefusedError(f"the name of {of} is '{name}', a word of Python or C++; take another")
    if name in TAKEN_IN_FILES.split() or name in CPP_TYPES or name in CPP_TYPES.values():
        raise RefusedError(f"the name of {of} is '{name}', which its files use; take another")
    if name.startswith("_") or "__" in name:
        raise RefusedError(
            f"the name of {of} is '{name}'; it must not begin with an underscore or have two"
        )


def parameter(text: str) -> Parameter:
    """A parameter of a schema.

    Raises:
        RefusedError: It is none, or of a type that is not elementwise.
    """
    if text == "*":
        raise RefusedError(
            "'*' makes parameters keyword-only; write them without it, then edit the schema"
        )
    match = re.fullmatch(r"(\S+)\s+(\w+)\s*(?:=\s*(\S+))?", text)
    if match is None:
        raise RefusedError(f"'{text}' is no parameter; it must be like 'float alpha' or 'int n=1'")
    kind, name, default = match.groups()
    check_name("a parameter", name)
    if kind not in CPP_TYPES:
        raise RefusedError(
            f"the parameter {name} is of type {kind}; it must be one of {', '.join(CPP_TYPES)}. "
            "docs/adding_a_kernel.md has the files of an operator with others; csrc/cpu/linear.cpp "
            "takes a str (csrc/host/text.h) and what may be None, "
            "csrc/cpu/spatial_correlation_sample.cpp lists"
        )
    if default is not None:
        default = checked_default(kind, name, default)
    return Parameter(kind, name, default)


def checked_default(kind: str, name: str, default: str) -> str:
    """A default, as Python writes it."""
    try:
        value = ast.literal_eval(default)
    except (ValueError, SyntaxError):
        value = None
    wanted = {"float": (float, int), "int": (int,), "bool": (bool,)}.get(kind, ())
    if not isinstance(value, wanted) or isinstance(value, bool) != (kind == "bool"):
        needs = "cannot have a default" if kind == "Tensor" else f"must have a {kind} for one"
        raise RefusedError(f"the parameter {name} has the default '{default}'; a {kind} {needs}")
    return repr(float(value)) if kind == "float" else repr(value)


def check_parameters(name: str, parameters: Sequence[Parameter]) -> None:
    """Refuses a list of parameters that is not one or two tensors and then numbers."""
    names = [each.name for each in parameters]
    doubled = sorted({each for each in names if names.count(each) > 1})
    if doubled:
        raise RefusedError(f"'{name}' has two parameters {doubled[0]}; give each its own name")
    if name in names:
        raise RefusedError(f"'{name}' has a parameter of its own name; take another")
    kinds = [each.is_tensor for each in parameters]
    if sum(kinds) not in (1, 2):
        raise RefusedError(f"'{name}' has {sum(kinds)} tensors; it must have one or two")
    if kinds != sorted(kinds, reverse=True):
        raise RefusedError(f"'{name}' has a number before a tensor; put the tensors first")
    given = [each.default is not None for each in parameters]
    if given != sorted(given):
        raise RefusedError(f"'{name}' has a parameter without a default after one that has one")
    if len(parameters) > MOST_PARAMETERS:
        raise RefusedError(
            f"'{name}' has {len(parameters)} parameters; a formula takes {MOST_PARAMETERS}"
        )


def filled(head: str, items: Sequence[str], separator: str, tail: str) -> str:
    """A C++ list that is broken where a line is full and goes on below its first item."""
    lines = [head]
    for index, item in enumerate(items):
        text = item + (tail if index == len(items) - 1 else separator)
        space = " " if lines[-1].strip() and index else ""
        if index and len(lines[-1] + space + text) > CPP_COLUMNS:
            lines.append(" " * len(head) + text)
        else:
            lines[-1] += space + text
    return "\n".join(lines)


def call(head: str, items: Sequence[str], tail: str = "") -> str:
    """A Python call or definition, on one line or as the formatter breaks it."""
    line = f"{head}({', '.join(items)}){tail}"
    margin = " " * (len(head) - len(head.lstrip()))
    if len(line) <= PYTHON_COLUMNS:
        return line
    within = f"{margin}    {', '.join(items)}"
    if len(within) > PYTHON_COLUMNS:
        within = "\n".join(f"{margin}    {item}," for item in items)
    return f"{head}(\n{within}\n{margin}){tail}"


def product(head: str, terms: Sequence[str]) -> str:
    """A Python statement that ends with a product."""
    line = f"{head}{' * '.join(terms)}"
    margin = " " * (len(head) - len(head.lstrip()))
    if len(line) <= PYTHON_COLUMNS:
        return line
    within = f"{margin}    {' * '.join(terms)}"
    if len(within) > PYTHON_COLUMNS:
        within = f"\n{margin}    * ".join([f"{margin}    {terms[0]}", *terms[1:]])
    return f"{head}(\n{within}\n{margin})"


def choice(value: str, condition: str) -> str:
    """A value or None, as an item of a list that is indented by eight."""
    parts = [value, f"if {condition}", "else None"]
    line = " ".join(parts)
    return line if len(line) + 9 <= PYTHON_COLUMNS else "\n        ".join(parts)


def words(text: str, indent: int, columns: int = PYTHON_COLUMNS, more: int = 0) -> str:
    """Words in lines, all indented, those after the first by ``more`` as well."""
    lines = [" " * indent]
    for word in text.split():
        space = " " if lines[-1].strip() else ""
        if space and len(lines[-1]) + len(space + word) > columns:
            lines.append(" " * (indent + more) + word)
        else:
            lines[-1] += space + word
    return "\n".join(lines)


def cpp_source(operator: Operator) -> str:
    """``csrc/cpu/<name>.cpp``."""
    parameters = [f"{CPP_TYPES[each.type]} {each.name}" for each in operator.parameters]
    items = [operator.name, "Takes::kFloating", *parameters]
    about = words(
        f"{operator.name}: {' * '.join(operator.terms)} in one pass, computed in float32 for half "
        "precision and rounded once.",
        0,
        CPP_COLUMNS - len("// "),
    )
    factors = {each.name: each.cpp_factor for each in operator.parameters}
    head = filled("PKG_ELEMENTWISE(", items, ",", ") {")
    body = filled("  return ", [factors[each] for each in operator.terms], " *", ";")
    short = f"{head} {body.strip()} }}"
    return "\n".join(
        [
            *(f"// {line}" for line in about.splitlines()),
            '#include "host/elementwise.h"',
            "",
            "namespace pkg {",
            "",
            *([short] if len(short) <= CPP_COLUMNS else [head, body, "}"]),
            "",
            "}  // namespace pkg",
            "",
        ]
    )


def cuda_source(operator: Operator) -> str:
    """``csrc/cuda/<name>.cu``."""
    return f'#define PKG_ON_CUDA\n#include "cpu/{operator.name}.cpp"\n'


def example(operator: Operator) -> list[str]:
    """The lines of the example in the docstring: a call, and what it prints."""
    tensors = [[1.0, 2.0], [3.0, 4.0]][: len(operator.tensors)]
    arguments = [f"torch.tensor({each})" for each in tensors] + operator.values(DOCTEST_VALUES)
    scale = 1.0
    for value in operator.values(DOCTEST_VALUES):
        scale *= float(ast.literal_eval(value))
    first, second = tensors[0], tensors[-1]
    alone = len(operator.parameters) == 1
    other = second if len(tensors) == 2 or alone else [1.0, 1.0]
    texts = [f"{a * b * scale:.0f}." for a, b in zip(first, other, strict=True)]
    width = max(map(len, texts))
    shown = call(f"        >>> {operator.name}", arguments)
    lines = shown.splitlines()
    lines[1:] = [line.replace(" " * 8, "        ... ", 1) for line in lines[1:]]
    return [*lines, f"        tensor([{', '.join(each.rjust(width) for each in texts)}])"]


def docstring(operator: Operator) -> list[str]:
    """The lines of the public function's, indented."""
    first, two = operator.tensors[0], len(operator.tensors) == 2
    meanings = []
    for each in operator.parameters:
        if not each.is_tensor:
            meaning = MEANINGS[each.type]
        elif each.name == first:
            meaning = "Any shape; float16, bfloat16, float32 or float64."
        else:
            meaning = f"A shape that broadcasts with ``{first}``'s, on the same device."
        meanings.append(words(f"{each.name}: {meaning}", 8, more=4))
    returned = (
        "The product, of the broadcast shape and the promoted dtype."
        if two
        else f"The product, of the shape and dtype of ``{first}``."
    )
    raised = (
        "The shapes do not broadcast, a dtype is not floating, or the devices differ."
        if two
        else f"``{first}`` is not floating."
    )
    return [
        '    """Multiplies all its arguments elementwise, in one pass.',
        *("", "    Args:", *meanings),
        *("", "    Returns:", f"        {returned} Half precision is rounded once."),
        *("", "    Raises:", words(f"RuntimeError: {raised}", 8, more=4)),
        *("", "    Example:", *example(operator)),
        '    """',
    ]


def gradient_source(operator: Operator) -> list[str]:
    """What ``pkg/ops/<name>.py`` has for the gradient, in lines."""
    tensors, numbers = operator.tensors, operator.numbers
    lines = []
    if numbers:
        lines += [
            "def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:",
            *(["    ctx.save_for_backward(*inputs[:2])"] if len(tensors) == 2 else []),
            f"    ctx.numbers = inputs[{len(tensors)}:]",
            *("", ""),
        ]
    lines.append("def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:")
    if len(tensors) == 2:
        lines.append(f"    {', '.join(tensors)} = ctx.saved_tensors")
    elif not numbers:
        lines.append(f"    ({tensors[0]},) = ctx.saved_tensors")
    slope = "grad"
    if numbers:
        slope = "slope"
        if len(numbers) == 1:
            lines.append(f"    ({numbers[0]},) = ctx.numbers")
        else:
            line = f"    {', '.join(numbers)} = ctx.numbers"
            listed = "".join(f"        {each},\n" for each in numbers)
            lines.append(
                line if len(line) <= PYTHON_COLUMNS else f"    (\n{listed}    ) = ctx.numbers"
            )
        lines.append(product("    slope = ", ["grad", *numbers]))
    if len(tensors) == 2:
        results = [
            choice(f"reduce_to({slope} * {other}, {each})", f"ctx.needs_input_grad[{index}]")
            for index, (each, other) in enumerate(zip(tensors, tensors[::-1], strict=True))
        ]
    elif numbers:
        results = ["slope"]
    else:
        results = [f"2 * grad * {tensors[0]}"]
    results += ["None"] * len(numbers)
    if len(results) == 1:
        lines.append(f"    return ({results[0]},)")
    else:
        lines += ["    return (", *(f"        {each}," for each in results), "    )"]
    return lines


def python_source(operator: Operator) -> str:
    """``pkg/ops/<name>.py``."""
    name, tensors, numbers = operator.name, operator.tensors, operator.numbers
    names = [each.name for each in operator.parameters]
    parameters = [each.python for each in operator.parameters]
    plain = [f"{each.name}: {each.type}" for each in operator.parameters]
    two = len(tensors) == 2
    helpers = ["fake_pointwise", *(["reduce_to"] if two else [])]
    helpers += ["register_fake", "register_gradients"]
    dtype = f"torch.result_type({', '.join(tensors)})" if two else f"{tensors[0]}.dtype"
    stand_in = [f'"{name}"', tensors[0], tensors[-1], dtype]
    stand_in += ["then_number=True"] if numbers else []
    computes = f"`{' * '.join(operator.terms)}`"
    if len(computes) > 60:
        computes = "the product of its arguments"
    layout = [f"{each} ..." for each in tensors]
    register = [f'"{name}"', "_backward"]
    register += ["setup_context=_setup_context"] if numbers else []
    lines = [
        f'"""``{name}``: a product, elementwise."""',
        "",
        "from __future__ import annotations",
        "",
        "from typing import Any",
        "",
        "import torch",
        "from torch import Tensor",
        "",
        "from ._call import operator",
        f"from ._registration import {', '.join(helpers)}",
        "from ._sharding import register_sharding",
        "from ._vmap import register_pointwise_vmap",
        "",
        f'TABLE = ("{computes}", "floating", "yes")',
        '"""What README\'s table says of it: what it computes, dtypes, gradients."""',
        *("", ""),
        "@operator",
        call(f"def {name}", parameters, " -> Tensor:"),
        *docstring(operator),
        call(f"    return torch.ops.pkg.{name}.default", names),
        *("", ""),
        f'@register_fake("{name}")',
        call("def _fake", plain, " -> Tensor:"),
        call("    return fake_pointwise", stand_in),
        *("", ""),
        *gradient_source(operator),
        *("", ""),
        call("register_gradients", register),
        f'register_pointwise_vmap("{name}")',
        call("register_sharding", [f'"{name}"', f'"{", ".join(layout)} -> ..."']),
        "",
    ]
    return "\n".join(lines)


def test_source(operator: Operator) -> str:
    """``tests/ops/test_<name>.py``."""
    name, tensors = operator.name, operator.tensors
    plain = [
        f"{each.name}: {'torch.Tensor' if each.is_tensor else each.type}"
        for each in operator.parameters
    ]
    kind = "binary" if len(tensors) == 2 else "unary"
    title = "".join(part.capitalize() for part in name.split("_"))
    values = operator.values(SAMPLE_VALUES)
    texts = [f'"{each}"' for each in tensors]
    named = f"names=({', '.join(texts)}{',' if len(texts) == 1 else ''})"
    lines = [
        "from __future__ import annotations",
        "",
        "import torch",
        "from operator_tests import OperatorTests",
        f"from pointwise_samples import {kind}_errors, {kind}_samples",
        "",
        "import pkg",
        "from pkg.testing import ErrorSample, Sample",
        *("", ""),
        call("def reference", plain, " -> torch.Tensor:"),
        product("    return ", operator.terms),
        *("", ""),
        f"class Test{title}(OperatorTests):",
        f"    op = torch.ops.pkg.{name}.default",
        "    reference = staticmethod(reference)",
        f"    function = staticmethod(pkg.ops.{name})",
        "",
        "    def samples(self) -> list[Sample]:",
        call(f"        return {kind}_samples", values),
        "",
        "    def errors(self) -> list[ErrorSample]:",
        call(f"        return {kind}_errors", [f'"{name}"', *values, named]),
        "",
    ]
    return "\n".join(lines)


def with_schema(text: str, operator: Operator) -> str:
    """``csrc/library.cpp`` with the schema at the end of its list."""
    before, end, after = text.partition("\n};")
    if not end or "kSchemas[]" not in before:
        raise RefusedError(f"{SCHEMAS} has no list kSchemas[] to put the schema into")
    lines = []
    line = ""
    for word in operator.schema.split(" "):
        # Four spaces, two quotes and a comma.
        if line and len(line + word) + 7 > CPP_COLUMNS:
            lines.append(line)
            line = ""
        line += f"{word} "
    lines.append(line.rstrip())
    return before + "\n" + "\n".join(f'    "{each}"' for each in lines) + "," + end + after


def generator() -> ModuleType:
    """``tools/generate.py``."""
    path = Path(__file__).with_name("generate.py")
    specification = importlib.util.spec_from_file_location("generate", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def write(name: str, schema: str, root: Path = ROOT) -> tuple[list[Path], list[Path]]:
    """Writes an operator.

    Args:
        name: Its name.
        schema: Its schema, of that name.
        root: The checkout.

    Returns:
        The files that are new, and those that were changed.

    Raises:
        RefusedError: The operator cannot be made. Nothing was written.
    """
    generate = generator()
    operator = parsed(name, schema, generate.schemas(root))
    new = {
        root / "csrc" / "cpu" / f"{name}.cpp": cpp_source(operator),
        root / "csrc" / "cuda" / f"{name}.cu": cuda_source(operator),
        root / "pkg" / "ops" / f"{name}.py": python_source(operator),
        root / "tests" / "ops" / f"test_{name}.py": test_source(operator),
    }
    there = [str(path.relative_to(root)) for path in new if path.exists()]
    if there:
        raise RefusedError(f"there is {', '.join(there)} already; take another name")
    library = root / SCHEMAS
    # What was there, to be put back where something fails.
    before = {path: path.read_bytes() for path, _ in generate.generated(root)}
    before[library] = library.read_bytes()
    texts = {library: with_schema(library.read_text("utf-8"), operator), **new}
    try:
        for path, text in texts.items():
            path.write_text(text, "utf-8")
        for path, text in list(generate.generated(root)):
            path.write_text(text, "utf-8")
    except BaseException:
        for path in new:
            path.unlink(missing_ok=True)
        for path, content in before.items():
            path.write_bytes(content)
        raise
    changed = [path for path, content in before.items() if path.read_bytes() != content]
    return list(new), changed


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the operator that the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pkg new", description="Write the files of a new elementwise operator."
    )
    parser.add_argument("name", help="of the operator: my_op")
    parser.add_argument("schema", help="'my_op(Tensor x, float alpha) -> Tensor'")
    options = parser.parse_args(arguments)
    try:
        new, changed = write(options.name, options.schema)
    except RefusedError as error:
        print(f"pkg new: {error}", file=sys.stderr)
        return 2
    for path in new:
        print(f"wrote    {path.relative_to(ROOT)}")
    for path in changed:
        print(f"changed  {path.relative_to(ROOT)}")
    print(
        "It multiplies its arguments; write your formula, reference and gradient. Then build and "
        "test it:\n"
        "  pip install --no-build-isolation --no-deps -e .\n"
        f"  python -m pytest tests/ops/test_{options.name}.py\n"
        "PKG_CPU_LEVELS=native PKG_BUILD_CUDA=native before the first builds what this machine "
        "runs alone."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
