"""Writes what has to be text and follows from other files: run it by ``make generate``.

- ``pkg/_C.pyi``, the types of the compiled module's functions, from the schemas of
  ``csrc/library.cpp``;
- ``pkg/ops/__init__.py``, the public operators, from the files beside it;
- the table of operators in ``README.md``, from the signatures and the ``TABLE`` of these files.

It imports nothing of the package, which may not be built yet. ``--check`` writes nothing and says
what is stale.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCHEMAS = "csrc/library.cpp"
MARKER = "# From here on made by `make generate`, from the schemas of csrc/library.cpp.\n"
TABLE_BEGIN = "<!-- made by `make generate` -->\n"
TABLE_END = "<!-- end -->\n"
TABLE_HEAD = "| operator | computes | dtypes | gradients |\n| --- | --- | --- | --- |\n"

PYTHON_TYPES = {
    "Tensor": "Tensor",
    "float": "float",
    "int": "int",
    "SymInt": "int",
    "bool": "bool",
    "str": "str",
    "ScalarType": "torch.dtype",
}


def schemas(root: Path = ROOT) -> dict[str, str]:
    """The schema of every operator by its name, in the order of ``csrc/library.cpp``."""
    text = (root / SCHEMAS).read_text("utf-8")
    listed = text.split("kSchemas[] = {", 1)[1].split("\n};", 1)[0]
    listed = re.sub(r"//.*", "", listed)
    # The compiler joins texts that no comma parts.
    entries = re.findall(r'((?:"[^"]*"\s*)+)(?:,|$)', listed)
    texts = ["".join(re.findall(r'"([^"]*)"', entry)) for entry in entries]
    return {text.split("(", 1)[0]: text for text in texts if text}


def python_type(text: str) -> str:
    """A type of a schema, as Python writes it: ``SymInt[2]``, ``Tensor?``, ``Tensor(a!)``."""
    match = re.fullmatch(r"(\w+)(\(\w+!?\))?(\[(\d*)\])?(\?)?", text)
    if match is None or match[1] not in PYTHON_TYPES:
        sys.exit(f"no operator has a parameter of type {text} yet: tools/generate.py, PYTHON_TYPES")
    name = PYTHON_TYPES[match[1]]
    if match[3]:
        size = int(match[4] or 0)
        name = f"{name} | tuple[{', '.join([name] * size)}]" if size else f"list[{name}]"
    return f"{name} | None" if match[5] else name


def stub(schema: str) -> str:
    """A function of ``pkg/_C.pyi``."""
    match = re.fullmatch(r"(\w+)\((.*)\) -> (.+)", schema)
    if match is None:
        sys.exit(f"{SCHEMAS}: '{schema}' is no schema: name(Type argument, ...) -> Type")
    name, inside, result = match.groups()
    parameters = []
    for parameter in re.split(r",\s*", inside) if inside else []:
        if parameter == "*":
            parameters.append("*")
            continue
        kind, _, rest = parameter.partition(" ")
        parameters.append(
            f"{rest.split('=')[0]}: {python_type(kind)}" + (" = ..." if "=" in rest else "")
        )
    if result.startswith("("):
        types = [python_type(each.split(" ")[0]) for each in result[1:-1].split(", ") if each]
        returned = f"tuple[{', '.join(types)}]" if types else "None"
    else:
        returned = python_type(result)
    line = f"def {name}({', '.join(parameters)}) -> {returned}: ..."
    if len(line) <= 100:
        return line
    inner = f"    {', '.join(parameters)}"
    if len(inner) > 100:
        inner = "".join(f"    {parameter},\n" for parameter in parameters).rstrip("\n")
    return f"def {name}(\n{inner}\n) -> {returned}: ..."


def binding_stub(root: Path = ROOT) -> str:
    """The text of ``pkg/_C.pyi``; what stands before the marker is written by hand."""
    head = (root / "pkg/_C.pyi").read_text("utf-8").split(MARKER)[0]
    return head + MARKER + "\n".join(stub(schema) for schema in schemas(root).values()) + "\n"


def public_modules(root: Path = ROOT) -> list[str]:
    """The operators that have a file in ``pkg/ops``."""
    files = (root / "pkg/ops").glob("[a-z]*.py")
    return sorted(file.stem for file in files if file.stem in schemas(root))


def operators_init(root: Path = ROOT) -> str:
    """The text of ``pkg/ops/__init__.py``."""
    names = public_modules(root)
    helpers = {"pack_int4": ("pack_int4", "unpack_int4")}  # in plain PyTorch, not in __all__
    lines = [
        '"""The operators: functions of tensors, on the CPU and on CUDA, one module each."""',
        "",
        "# Made by `make generate`.",
        "",
    ]
    for module in sorted([*names, *helpers]):
        if module in helpers:
            lines += [f"from .{module} import {name} as {name}" for name in helpers[module]]
        else:
            lines.append(f"from .{module} import {module}")
    lines += ["", "__all__ = [", *(f'    "{name}",' for name in names), "]", ""]
    return "\n".join(lines)


def table_row(file: Path) -> str:
    """A row of README's table: the signature, and the module's ``TABLE``."""
    tree = ast.parse(file.read_text("utf-8"))
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == file.stem]
    values = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TABLE"
    ]
    if len(functions) != 1 or len(values) != 1:
        sys.exit(f"{file}: it needs a function {file.stem} and its TABLE, as the others have")
    arguments = functions[0].args
    for argument in (*arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    cells = (f"`{file.stem}({ast.unparse(arguments)})`", *values[0])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def readme(root: Path = ROOT) -> str:
    """The text of ``README.md`` with its table made anew."""
    text = (root / "README.md").read_text("utf-8")
    before, rest = text.split(TABLE_BEGIN, 1)
    _, after = rest.split(TABLE_END, 1)
    names = [name for name in schemas(root) if name in public_modules(root)]
    rows = "".join(table_row(root / "pkg/ops" / f"{name}.py") for name in names)
    return f"{before}{TABLE_BEGIN}\n{TABLE_HEAD}{rows}\n{TABLE_END}{after}"


def generated(root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Each file that is made, and the text that it must have."""
    yield root / "pkg/_C.pyi", binding_stub(root)
    yield root / "pkg/ops/__init__.py", operators_init(root)
    yield root / "README.md", readme(root)


def main() -> None:
    """Writes the files, or with ``--check`` names those that are stale."""
    stale = [(path, text) for path, text in generated() if path.read_text("utf-8") != text]
    names = ", ".join(str(path.relative_to(ROOT)) for path, _ in stale)
    if "--check" in sys.argv[1:]:
        sys.exit(f"stale: {names}. Run make generate" if stale else 0)
    for path, text in stale:
        path.write_text(text, "utf-8")
    print(f"wrote {names}" if stale else "all is as it should be")


if __name__ == "__main__":
    main()
