"""The options of ``examples/gpt.py``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

OUTPUT = Path(__file__).resolve().parent.parent / "output"
SHAPE = {"context": 256, "layers": 4, "heads": 4, "width": 128}


def parse_arguments(description: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; `description` is what ``--help`` begins with."""
    parser = argparse.ArgumentParser(
        prog="gpt.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    reading = parser.add_argument_group("text")
    reading.add_argument(
        "--text", type=Path, metavar="FILE", help="text in UTF-8 (default: the standard library)"
    )
    reading.add_argument("--batch", type=positive, default=4, help="sequences in a batch (4)")
    model = parser.add_argument_group("model (a resumed one keeps its shape)")
    for name, value in SHAPE.items():
        model.add_argument(f"--{name}", type=positive, help=f"default {value}")
    training = parser.add_argument_group("training")
    training.add_argument(
        "--steps", type=natural, default=1000, help="steps to take with either operators (1000)"
    )
    training.add_argument(
        "--seconds",
        type=float,
        default=60,
        help="stop both runs together after so many seconds of training (60)",
    )
    training.add_argument("--rate", type=float, default=3e-3, help="peak learning rate (0.003)")
    training.add_argument("--seed", type=natural, default=0, help="of every random choice (0)")
    training.add_argument("--resume", type=Path, metavar="FILE", help="go on from gpt.safetensors")
    writing = parser.add_argument_group("writing")
    writing.add_argument("--prompt", default="def ", help='what to continue ("def ")')
    writing.add_argument("--characters", type=natural, default=500, help="how many to write (500)")
    writing.add_argument(
        "--temperature", type=float, default=0.7, help="0: always the likeliest character (0.7)"
    )
    writing.add_argument(
        "--int4",
        type=int,
        choices=(32, 64, 128, 256),
        metavar="GROUP",
        help="also measure the model with weights of four bits, in groups of so many (32 to 256)",
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", default="cpu", help="cpu (the default), cuda, cuda:1, …")
    machine.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="what the operators compute in; the weights are float32 (float32)",
    )
    machine.add_argument("--threads", type=positive, help="of the CPU (default: PyTorch's choice)")
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, metavar="FOLDER", help=f"default {OUTPUT}"
    )
    return parser.parse_args(arguments)


def natural(text: str) -> int:
    """An integer from 0 up."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def positive(text: str) -> int:
    """An integer from 1 up."""
    value = natural(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 is too few")
    return value
