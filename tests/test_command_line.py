"""``python -m pkg``: what cannot end well is refused before anything is measured."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import pkg
from pkg import __main__ as command


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said of arguments that are refused, in one line below the usage."""
    with pytest.raises(SystemExit) as end:
        command.main(arguments)
    assert end.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "load_benchmarks", lambda *_: pytest.fail("it runs"))
    monkeypatch.setattr(pkg, "doctor", lambda _: pytest.fail("it runs"))


OUTPUTS = [("bench", "mul", "--json"), ("bench", "mul", "--picture"), ("doctor", "--picture")]


@pytest.mark.parametrize("arguments", OUTPUTS)
def test_a_file_that_cannot_be_written(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    line = refused(capsys, *arguments, str(missing / "file.svg"))
    assert f"argument {arguments[-1]}: there is no folder {missing}" in line
    assert f"{tmp_path} is a folder" in refused(capsys, *arguments, str(tmp_path))


@pytest.mark.parametrize("arguments", OUTPUTS[1:])
def test_a_picture_of_an_ending_that_cannot_be_drawn(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    line = refused(capsys, *arguments, str(tmp_path / "picture.docx"))
    assert "Matplotlib draws no 'docx'; it must end in one of" in line
    assert ", svg, " in line


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert all(f"\n    {name} " in said.err for name in ("env", "bench", "new", "tune", "doctor"))


def test_files_that_can_be_written(tmp_path: Path) -> None:
    for name in ("a.png", "b.SVG", "c"):
        assert command.picture_file(str(tmp_path / name)) == tmp_path / name
    assert command.output_file("here.json") == Path("here.json")


@pytest.mark.parametrize("seconds", ["nan", "1e999", "inf", "0", "-1", "soon"])
def test_seconds_are_a_positive_number(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "bench", f"--seconds={seconds}")
    assert f"argument --seconds: '{seconds}' is no positive number" in line


def test_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = refused(capsys, "bench", "--device", "cuda")
    assert "'cuda' is not there: PyTorch" in line
    for device in ("abacus", "meta"):
        line = refused(capsys, "bench", "--device", device)
        assert f"'{device}' is no device that it can use; use cpu or cuda" in line
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "cuda:1 is the last" in refused(capsys, "bench", "--device", "cuda:2")
    assert command.device("cuda:1") == torch.device("cuda:1")
    assert command.device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("arguments", [["tune"], ["doctor"], ["bench", "mul"]])
def test_an_interruption_is_one_line(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["pkg", *arguments])
    monkeypatch.setattr(command.tune, "measure", interrupted)
    monkeypatch.setattr(command, "load_benchmarks", interrupted)
    monkeypatch.setattr(pkg, "doctor", interrupted)
    assert command.run() == 130
    assert capsys.readouterr().err == "pkg: interrupted\n"


def test_a_terminal_without_the_characters_gets_others() -> None:
    script = """
        import sys, pkg
        from pkg import __main__

        pkg.doctor = lambda picture: "mm 512" + chr(0xB3)
        sys.exit(__main__.main(["doctor"]))
    """
    ascii_only = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONIOENCODING"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**variables, **ascii_only},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "mm 512?"


def run_writing_to(file: int, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``python -m pkg``, its output to a file descriptor."""
    return subprocess.run(
        [sys.executable, *options],
        env={**os.environ, "PYTHONUNBUFFERED": "", **variables},
        stdout=file,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


WRITERS = [
    ("-m", "pkg", "env", "--capabilities"),
    ("-u", "-m", "pkg", "env", "--capabilities"),
    ("-m", "pkg", "--help"),
]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such pipes")
@pytest.mark.parametrize("options", WRITERS)
def test_a_reader_that_has_gone_ends_it_quietly(options: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run_writing_to(writer, *options)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("options", WRITERS)
def test_an_output_that_cannot_be_written_is_said_in_a_line(options: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = run_writing_to(full.fileno(), *options)
    expected = "pkg: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, expected)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_failed_import_is_said_where_its_report_cannot_be() -> None:
    with Path("/dev/full").open("w") as full:
        done = run_writing_to(full.fileno(), "-m", "pkg", "env", PKG_CPU_CAPABILITY="sse9")
    first, second = done.stderr.splitlines()
    assert done.returncode == 1
    assert "output cannot be written: No space" in first
    assert "import pkg fails: ImportError: PKG_CPU_CAPABILITY is 'sse9'" in second


def test_another_file_s_error_is_not_taken_for_the_output_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_: object) -> None:
        raise FileNotFoundError(2, "No such file", "model.bin")

    monkeypatch.undo()  # what keeps it from running
    monkeypatch.setattr(sys, "argv", ["pkg", "doctor"])
    monkeypatch.setattr(pkg, "doctor", fails)
    with pytest.raises(FileNotFoundError, match=r"model\.bin"):
        command.run()
