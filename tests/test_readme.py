"""Everything in README.md that can be run is run, and what it quotes is what the sources say."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tree_copies import (
    ROOT,
    copy_checkout,
    cuda_compilation,
    formatter,
    keep_kernels,
    lint_of,
    must_succeed,
    shell,
    texts_of,
    variables_of,
)

import pkg

README = (ROOT / "README.md").read_text("utf-8")
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)

# Too long for a test, or for an environment of their own: .ci/run has each of them.
IN_CI = {"make demo", "make test", "make bench", "pip install ."}
# These do what is done already, under other names: `make` installs what the build needs, then the
# checkout without isolation; and `pip install .` builds a wheel as `pip wheel` does, then installs
# it.
IN_OTHER_WORDS = {
    "pip install 'setuptools>=77' wheel ninja": (
        "Makefile",
        "$(PIP) install $(BUILD_REQUIREMENTS)",
    ),
    "pip install --no-build-isolation -e .": (
        "Makefile",
        "$(PIP) install -v --no-build-isolation -e '.[test,dev,bench,examples]'",
    ),
    "pip wheel --no-deps --wheel-dir dist .": (".ci/run", "pip install ."),
    "pip install dist/pkg_kernels-*.whl": (".ci/run", "make wheel"),
    # The same programs, the first with a smaller model.
    "python -m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 3 "
    "examples/tensor_parallel_gpt.py --steps 40": (
        "tests/test_tensor_parallel_example.py",
        'finish(start(2, tmp_path / "whole"',
    ),
    "python examples/export.py": ("tests/test_export_example.py", "run(tmp_path).splitlines()"),
}
HERE = [
    "python examples/gpt.py --text README.md --steps 20",
    'python examples/gpt.py --resume examples/output/gpt.safetensors --steps 0 --prompt "class "',
    "python examples/optical_flow.py",
    "python -m pkg bench muladd --cases float32 --seconds 0.1 --threads 1,2 --json muladd.json "
    "--picture muladd.png",
    "python -m pkg doctor",
    "make debug",
    "python -m pkg env",
    "python -m pkg env --capabilities",
    "PKG_CPU_CAPABILITY=$(python -m pkg env --capabilities | tail -n 1) python -m pkg env",
]
# What a command reads, and the one that writes it, which may have run in another process or not.
NEEDS = {HERE[1]: ("examples/output/gpt.safetensors", HERE[0])}
# Run by the test of the new operator, where what it compiles is compiled already.
WITH_THE_NEW_OPERATOR = "PKG_JIT=1 python -m pkg bench muladd --cases float32 --seconds 0.1"
# Writes an operator, its files and the line.
NEW = 'python -m pkg new scaled_product "scaled_product(Tensor a, Tensor b, float scale) -> Tensor"'
NAME = "scaled_product"
PREREQUISITES = "apt-get install make g++ python3-dev python3-venv"


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    text: str
    line: int


def blocks() -> list[Block]:
    found = []
    for match in FENCE.finditer(README):
        indent, language, text = match.groups()
        lines = (line.removeprefix(indent) for line in text.splitlines(keepends=True))
        line = README.count("\n", 0, match.start()) + 1
        found.append(Block(language, "".join(lines), line))
    return found


def commands() -> list[str]:
    return [
        command
        for block in blocks()
        if block.language == "sh"
        for command in block.text.strip().splitlines()
    ]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout by links, but with its own examples folder, into which the example writes."""
    folder = tmp_path_factory.mktemp("checkout")
    imported_from_here = Path(pkg.__file__).resolve().is_relative_to(ROOT)
    for entry in ROOT.iterdir():
        if entry.name == "examples":
            shutil.copytree(entry, folder / "examples", ignore=shutil.ignore_patterns("output"))
        elif entry.name != "pkg" or imported_from_here:
            (folder / entry.name).symlink_to(entry)
    return folder


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    for block in blocks():
        assert block.language in {"sh", "python", "cpp", "markdown"}, f"line {block.line}"


def test_every_command_is_run_somewhere() -> None:
    run = [*HERE, WITH_THE_NEW_OPERATOR, NEW, PREREQUISITES]
    assert sorted(commands()) == sorted([*run, *IN_CI, *IN_OTHER_WORDS])


@pytest.mark.checkout
@pytest.mark.parametrize("command", sorted(IN_CI))
def test_the_long_commands_are_in_the_ci_script(command: str) -> None:
    script = ROOT / ".ci" / "run"
    lines = [line.strip() for line in script.read_text("utf-8").splitlines()]
    whole = re.compile(rf"(^|[\s/;&(]){re.escape(command)}($|[\s;&)|])")
    assert any(whole.search(line) for line in lines if not line.startswith("#"))


@pytest.mark.checkout
@pytest.mark.parametrize("command", sorted(IN_OTHER_WORDS))
def test_what_the_other_commands_do_is_done(command: str) -> None:
    file, words = IN_OTHER_WORDS[command]
    lines = [line.strip() for line in (ROOT / file).read_text("utf-8").splitlines()]
    assert any(words in line for line in lines if not line.startswith("#"))


@pytest.mark.checkout
@pytest.mark.long
@pytest.mark.parametrize("command", HERE)
def test_command(command: str, checkout: Path) -> None:
    if command == "make debug" and shutil.which("make") is None:
        pytest.skip("no make")
    file, earlier = NEEDS.get(command, (None, None))
    needed = [earlier] if earlier and not (checkout / file).exists() else []
    for each in [*needed, command]:
        done = shell(each, checkout)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.strip()
    if command.startswith("PKG_CPU_CAPABILITY="):
        least = shell("python -m pkg env --capabilities", checkout).stdout.split()[-1]
        assert f"CPU capability loaded: {least}\n" in done.stdout


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="no Debian or Ubuntu")
def test_the_prerequisites_are_packages() -> None:
    known = shell("apt-cache policy make", ROOT).stdout
    if "Candidate" not in known:
        pytest.skip("no lists of packages here")
    done = shell(PREREQUISITES.replace("install", "install --simulate"), ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.checkout
@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("command", sorted(set(re.findall(r"`(make[^`]*)`", README))))
def test_make_knows_the_commands_in_the_text(command: str) -> None:
    done = shell(command.replace("make", "make --dry-run", 1), ROOT)
    assert done.returncode == 0, done.stderr


def test_examples() -> None:
    tested = 0
    for block in blocks():
        if ">>>" in block.text:
            test = doctest.DocTestParser().get_doctest(
                block.text, {}, f"README.md:{block.line}", "README.md", block.line
            )
            result = doctest.DocTestRunner().run(test)
            assert result.failed == 0
            tested += result.attempted
    assert tested


def messages() -> Iterator[str]:
    """The strings that an import raises and of the C++ binding, with … where a value is put in."""
    names = ("_loader.py", "_float32_matmul.py", "_float64_matmul.py")
    raising = [ROOT / "pkg" / name for name in names]
    trees = [ast.parse(path.read_text("utf-8")) for path in raising]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant):
            yield str(node.value)
    for path in (ROOT / "csrc").rglob("*.[ch]*"):
        yield re.sub(r'"\s*\n\s*"', "", path.read_text("utf-8"))


def import_errors() -> list[list[str]]:
    """The pieces of the messages in the table of import errors."""
    table = README.partition("## When the import fails")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return [re.findall(r"`([^`]+)`", row) for row in rows]


def test_the_table_of_import_errors_was_found() -> None:
    assert len(import_errors()) >= 5


@pytest.mark.checkout
@pytest.mark.parametrize("pieces", import_errors(), ids=lambda pieces: pieces[0])
def test_import_errors_say_what_the_table_says(pieces: list[str]) -> None:
    # The version is put into the message from a constant.
    pattern = re.compile(".*".join(map(re.escape, pieces)).replace(r"2\.10", "…"), re.DOTALL)
    assert any(pattern.search(message) for message in messages())


@pytest.mark.checkout
def test_environment_variables_are_in_the_sources() -> None:
    table = README.partition("## Environment variables")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([A-Z][A-Z0-9_]{2,})`", table))
    compiled = (ROOT / "csrc").rglob("*.[ch]*")  # and .cu
    sources = [ROOT / "setup.py", *(ROOT / "pkg").rglob("*.py"), *compiled]
    text = "".join(path.read_text("utf-8") for path in sources)
    unused = {name for name in named if name not in text}
    assert unused <= {"CXX", "CUDA_HOME", "MAX_JOBS"}  # read by PyTorch
    reads = r"""(?:environ\.get\(|environ\[|getenv\(|is_turned_off\()\s*f?["'](PKG_[A-Z0-9_]+)"""
    read = set(re.findall(reads, text))
    assert read
    assert read <= named


def test_the_table_of_operators_is_complete() -> None:
    table = README.partition("## Operators")[2].partition("\n## ")[0]
    signatures = re.findall(r"^\| `(\w+)\((.*?)\)`", table, re.MULTILINE)
    assert {name for name, _ in signatures} == set(pkg.ops.__all__)
    for name, parameters in signatures:
        names = re.findall(r"(\w+)(?:=[^,]+)?(?:, |$)", parameters)
        assert names == list(inspect.signature(getattr(pkg.ops, name)).parameters)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", FENCE.sub("", README)):
        assert (ROOT / target).exists(), target


@pytest.fixture(scope="module")
def with_new_operator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout in which "Add an operator" was done.

    A reader who has done it already runs these tests too.
    """
    folder = tmp_path_factory.mktemp("operator")
    copy_checkout(folder)
    if not (folder / "pkg" / "ops" / f"{NAME}.py").exists():
        must_succeed(NEW.replace("-m pkg new", "tools/new_operator.py"), folder)
    return folder


@pytest.mark.checkout
def test_a_new_operator_is_four_files_and_one_line(with_new_operator: Path) -> None:
    if (ROOT / "pkg" / "ops" / f"{NAME}.py").exists():
        pytest.skip("it is in this checkout")
    before, after = texts_of(ROOT), texts_of(with_new_operator)
    table = README.partition("## Add an operator")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `([^`]*)` \|", table, re.MULTILINE))
    new = set(after) - set(before)
    assert len(new) == 4
    assert named == new | {"csrc/library.cpp"}
    generated = {"pkg/_C.pyi", "pkg/ops/__init__.py"}
    assert {path for path in before if after[path] != before[path]} - generated == {
        "csrc/library.cpp"
    }
    lines = before["csrc/library.cpp"].splitlines()
    added = [line for line in after["csrc/library.cpp"].splitlines() if line not in lines]
    assert added == ['    "scaled_product(Tensor a, Tensor b, float scale) -> Tensor",']


# With mul the gradient is computed; muladd is timed, beside the machine's limits.
KERNELS = {NAME, "mul", "muladd", "pointwise", "machine_limits"}


@pytest.mark.checkout
@pytest.mark.long
def test_the_new_operator_passes_its_tests(with_new_operator: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(with_new_operator, tree)
    keep_kernels(tree, KERNELS)
    # Of the whole suite, what is of the new operator, and the README's own tests. Its commands and
    # examples are the same as without it, and so is what this command writes. The environment
    # variables are looked for in sources that this copy does not have any more.
    others = "test_command or new_operator or test_examples or environment_variables"
    tests = f"({NAME} or test_readme) and not ({others})"
    for command in (
        f"PKG_JIT=1 python -m pytest -q -p no:cacheprovider -k {shlex.quote(tests)}",
        f'PKG_JIT=1 python -c "import torch; from pkg import _C; '
        f'_C.{NAME}(torch.ones(3), torch.zeros(3), 0.5)"',
        WITH_THE_NEW_OPERATOR,
    ):
        must_succeed(command, tree, **variables_of(tree))


@pytest.mark.checkout
@pytest.mark.long
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_the_cuda_kernel_of_the_new_operator_compiles(with_new_operator: Path) -> None:
    must_succeed(cuda_compilation(f"csrc/cuda/{NAME}.cu"), with_new_operator)


@pytest.mark.checkout
@pytest.mark.long
@pytest.mark.skipif(formatter() is None, reason="no make or tools of make lint")
def test_the_files_of_the_new_operator_are_as_the_project_wants_them(
    with_new_operator: Path,
) -> None:
    before, after = texts_of(ROOT), texts_of(with_new_operator)
    for command in lint_of({path for path, text in after.items() if before.get(path) != text}):
        must_succeed(command, with_new_operator)
