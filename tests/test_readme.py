"""Everything in README.md that can be run is run, and what it quotes is what the sources say."""

from __future__ import annotations

import ast
import doctest
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

import pkg
from pkg import _build_flags

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
# A block may say which file of the project it is, or where in a file it belongs: after the line
# that a list or a namespace opens with, whatever stands in it, or at the end.
FENCE = re.compile(
    r"^( *)```(\w+)(?: (\S+))?(?: after ([^\n]*)| (at the end))?\n(.*?)^\1```$",
    re.DOTALL | re.MULTILINE,
)

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
}
HERE = [
    "python examples/gpt.py --text README.md --steps 20",
    'python examples/gpt.py --resume examples/output/gpt.safetensors --steps 0 --prompt "class "',
    "python examples/optical_flow.py",
    "python -m pkg bench muladd --seconds 0.1 --threads 1,2 --json muladd.json "
    "--picture muladd.png",
    "make debug",
    "python -m pkg env",
    "python -m pkg env --capabilities",
    "PKG_CPU_CAPABILITY=$(python -m pkg env --capabilities | tail -n 1) python -m pkg env",
]
# What a command reads, and the one that writes it, which may have run in another process or not.
NEEDS = {HERE[1]: ("examples/output/gpt.safetensors", HERE[0])}
# Run by the test of the new operator, where what it compiles is compiled already.
WITH_THE_NEW_OPERATOR = "PKG_JIT=1 python -m pkg bench muladd --seconds 0.1"
# Its last steps.
GENERATE = "make generate"
FORMAT = "make format"
# Of the checkout, beside the files.
PARTS = (
    *("csrc", "pkg", "tests", "benchmarks", "examples", "docs", "tools", "build_backend"),
    *(".ci", ".github"),
)
PREREQUISITES = "apt-get install make g++ python3-dev python3-venv"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file that it is or goes into, its text."""

    language: str
    path: str | None
    after: str | None
    at_the_end: bool
    text: str
    line: int


def blocks() -> list[Block]:
    found = []
    for match in FENCE.finditer(README):
        indent, language, path, after, end, text = match.groups()
        lines = (line.removeprefix(indent) for line in text.splitlines(keepends=True))
        line = README.count("\n", 0, match.start()) + 1
        found.append(Block(language, path, after, bool(end), "".join(lines), line))
    return found


def commands() -> list[str]:
    return [
        command
        for block in blocks()
        if block.language == "sh"
        for command in block.text.strip().splitlines()
    ]


def shell(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a reader would, with the interpreter of this test as ``python``."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ours = ("PKG_CPU_CAPABILITY", "PKG_JIT", "MAKEFLAGS", "MAKELEVEL")
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    environment = {**inherited, "PATH": path, **variables}
    return subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


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
    run = [*HERE, WITH_THE_NEW_OPERATOR, GENERATE, FORMAT, PREREQUISITES]
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
        if ">>>" in block.text and not block.path:
            test = doctest.DocTestParser().get_doctest(
                block.text, {}, f"README.md:{block.line}", "README.md", block.line
            )
            result = doctest.DocTestRunner().run(test)
            assert result.failed == 0
            tested += result.attempted
    assert tested


def messages() -> Iterator[str]:
    """The strings of the loader and of the C++ binding, with … where a value is put in."""
    tree = ast.parse((ROOT / "pkg" / "_loader.py").read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant):
            yield str(node.value)
    for path in (ROOT / "csrc").glob("*.[ch]*"):
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
    names = re.findall(r"`([A-Z_]{3,})`", table)
    assert names
    sources = [ROOT / "setup.py", *(ROOT / "pkg").rglob("*.py")]
    text = "".join(path.read_text("utf-8") for path in sources)
    unused = {name for name in names if name not in text}
    assert unused <= {"CXX", "CUDA_HOME", "MAX_JOBS"}  # read by PyTorch


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


# With mul the gradient is computed; muladd is timed, beside the machine's limits.
KERNELS = {"mul", "muladd", "pointwise", "machine_limits"}


def put(folder: Path, block: Block) -> None:
    """Does what a reader does with a block: writes the file, or adds the lines to it."""
    assert block.path is not None
    path = folder / block.path
    if not block.after and not block.at_the_end:
        path.write_text(block.text, "utf-8")
        return
    text = path.read_text("utf-8")
    # A reader who has taken the steps runs these tests too.
    if f"\n{block.text}" in text:
        return
    lines = text.splitlines(keepends=True)
    index = len(lines)
    if block.after:
        (index,) = (i + 1 for i, line in enumerate(lines) if line.strip() == block.after)
    lines.insert(index, block.text)
    path.write_text("".join(lines), "utf-8")


def take_steps(folder: Path) -> None:
    """All steps of "Add an operator" but the last."""
    for block in blocks():
        if block.path:
            put(folder, block)
    done = shell(f"{GENERATE} RUN={shlex.quote(sys.executable)}", folder)
    assert done.returncode == 0, done.stdout + done.stderr


def formatter() -> str | None:
    """``make format`` with the tools of this environment, or of the path, and nothing installed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    clang_format = shutil.which("clang-format", path=path)
    if clang_format is None or shutil.which("make") is None:
        return None
    if find_spec("ruff") is None or find_spec("mypy") is None:
        return None
    tools = {"INSTALLED": "", "RUN": sys.executable, "VENV": str(Path(clang_format).parents[1])}
    return " ".join([FORMAT, *(f"{name}={shlex.quote(value)}" for name, value in tools.items())])


@pytest.fixture(scope="module")
def with_new_operator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout in which the steps of "Add an operator" were taken.

    Of the other operators it has the kernels that are run in it: the rest would take minutes to
    compile.
    """
    folder = tmp_path_factory.mktemp("operator")
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "output")
    for entry in ROOT.iterdir():
        if entry.is_file():
            shutil.copy(entry, folder)
        elif entry.name in PARTS:
            shutil.copytree(entry, folder / entry.name, ignore=ignored)
    for source in (folder / "csrc").glob("c*/*.c*"):
        if source.suffix in {".cpp", ".cu"} and source.stem not in KERNELS:
            source.unlink()
    take_steps(folder)
    if command := formatter():
        done = shell(command, folder)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.checkout
def test_the_steps_may_have_been_taken_before(with_new_operator: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(with_new_operator, again, ignore=shutil.ignore_patterns("build"))
    take_steps(again)
    for block in blocks():
        if block.path:
            text = (with_new_operator / block.path).read_text("utf-8")
            assert (again / block.path).read_text("utf-8") == text, block.path


@pytest.mark.checkout
def test_an_operator_added_by_the_steps_passes_its_tests(with_new_operator: Path) -> None:
    # With a build folder of its own: it is compiled from other sources than the user's. CUDA where
    # it can be run; that its kernel compiles, the next test shows.
    built = {"TORCH_EXTENSIONS_DIR": str(with_new_operator / "build")}
    built["PKG_BUILD_CUDA"] = str(int(torch.cuda.is_available()))
    # Of the whole suite, what is of the new operator, and the README's own tests but for the
    # commands, which are the same as without it, and the steps, which are these.
    tests = "(squared_difference or test_readme) and not (test_command or steps)"
    for command in (
        # The first one compiles, which takes as long as all the rest.
        'PKG_JIT=1 python -c "import torch; from pkg import _C; '
        '_C.squared_difference(torch.ones(3), torch.zeros(3))"',
        f"PKG_JIT=1 python -m pytest -q -p no:cacheprovider -k {shlex.quote(tests)}",
        "PKG_JIT=1 python -m pkg bench squared_difference --seconds 0.1",
        WITH_THE_NEW_OPERATOR,
    ):
        done = shell(command, with_new_operator, **built)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.checkout
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_the_cuda_kernel_of_the_steps_compiles(with_new_operator: Path) -> None:
    includes = [f"-isystem {path}" for path in cpp_extension.include_paths()]
    flags = [*_build_flags.nvcc_flags(threads=1), "-arch=sm_80", *includes]
    source = "csrc/cuda/squared_difference.cu"
    done = shell(f"nvcc {' '.join(flags)} -c {source} -o object.o", with_new_operator)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.checkout
@pytest.mark.skipif(formatter() is None, reason="no make or tools of make lint")
def test_the_files_of_the_steps_are_as_the_project_wants_them(with_new_operator: Path) -> None:
    # They were formatted: what a block of the README says is what stands there still.
    for block in blocks():
        if block.path:
            text = (with_new_operator / block.path).read_text("utf-8")
            assert block.text in text, f"line {block.line}"
    command = str(formatter()).replace("format", "lint", 1)
    done = shell(command, with_new_operator)
    assert done.returncode == 0, done.stdout + done.stderr
