"""examples/tensor_parallel_gpt.py: it trains, saves, and goes on after a process was killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("numpy")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

PROGRAM = Path(__file__).resolve().parent.parent / "examples" / "tensor_parallel_gpt.py"
SMALL = [*("--context", "32"), *("--layers", "2"), *("--heads", "2"), *("--width", "32")]
TEXT = "".join(f"the square of {n} is {n * n}.\n" for n in range(400))


def start(
    processes: int, folder: Path, *arguments: str, restarts: int = 1
) -> subprocess.Popen[str]:
    text = folder / "squares.txt"
    text.write_text(TEXT, "utf-8")
    launcher = ["torch.distributed.run", "--standalone"]
    launcher += ["--max-restarts", str(restarts)]
    launcher += ["--nproc-per-node", str(processes), str(PROGRAM)]
    options = ["--text", str(text), "--output", str(folder / "output"), *SMALL]
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, *options, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def losses(folder: Path) -> list[float]:
    lines = (folder / "output" / "losses.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == list(range(len(records)))
    return [record["loss"] for record in records]


def finish(running: subprocess.Popen[str]) -> str:
    output, _ = running.communicate()
    assert running.returncode == 0, output
    return output


@pytest.mark.long
def test_losses_go_on_as_if_no_process_had_been_killed(tmp_path: Path) -> None:
    for name in ("whole", "killed", "alone"):
        (tmp_path / name).mkdir()
    steps = ["--steps", "40", "--save-every", "8"]
    finish(start(2, tmp_path / "whole", *steps))
    expected = losses(tmp_path / "whole")
    assert len(expected) == 40
    assert expected[-1] < expected[0] - 1

    running = start(2, tmp_path / "killed", *steps)
    assert running.stdout is not None
    pids: list[int] = []
    said = []
    for line in running.stdout:
        said.append(line)
        pids += [int(pid) for pid in re.findall(r"process (\d+) is", line)]
        if line.startswith("step 16"):
            assert len(pids) == 2, said
            os.kill(pids[1], signal.SIGKILL)
            break
    output = "".join(said) + finish(running)
    assert "going on from" in output
    assert len(re.findall(r"process \d+ is", output)) == 4
    assert losses(tmp_path / "killed") == expected

    # One process has the same weights and batches; its sums are in another order.
    finish(start(1, tmp_path / "alone", "--steps", "3"))
    torch.testing.assert_close(torch.tensor(losses(tmp_path / "alone")), torch.tensor(expected[:3]))


@pytest.mark.long
def test_what_does_not_fit_is_refused_in_words(tmp_path: Path) -> None:
    running = start(3, tmp_path, restarts=0)
    output, _ = running.communicate()
    assert running.returncode != 0
    assert "2 heads cannot be shared by 3 processes" in output


def test_it_says_how_to_start_it() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "start it by torchrun" in done.stderr
