"""Train a character-level GPT with PyTorch's operators and with those of pkg, side by side.

Both runs start from the same weights and read the same batches of the same text: a file of yours,
or the sources of Python's standard library. The program shows that the losses agree, how fast
each trains and generates text, and what it writes after a prompt. It leaves the loss curves
(losses.png) and the weights (gpt.safetensors, which --resume goes on from) in the output folder.
With --int4 it also rounds the weights to four bits, and shows what that costs and gains.

    python examples/gpt.py
    python examples/gpt.py --text my-novel.txt --prompt "It was"
    python examples/gpt.py --int4 32
    python examples/gpt.py --resume examples/output/gpt.safetensors --steps 0 --prompt "class "

The exit status is 0 when the two agree, 1 when they do not, 2 when there is nothing to run on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import median

import needs

with needs.words_for_missing_packages("gpt.py"):
    import torch
    from character_gpt import quantised, report
    from character_gpt.checkpoint import Checkpoint, CheckpointError
    from character_gpt.command_line import SHAPE, parse_arguments
    from character_gpt.comparison import compare_ends, compare_step, with_operators
    from character_gpt.generation import generate
    from character_gpt.model import GPT, Config, Operators, pkg_operators, pytorch_operators
    from character_gpt.text import Corpus, TextError, Vocabulary, read_text, standard_library
    from character_gpt.training import Schedule, Training, alternating, synchronized_clock
    from rich.console import Console

STEPS_PER_BLOCK = 5
VALIDATION_BATCHES = 8
GENERATION_ROUNDS = 3
# No further round after this: a slow machine is not kept waiting for a better median.
GENERATION_SECONDS = 20


class UsageError(Exception):
    """The arguments do not fit each other or the machine; the message says how."""


def choose_config(options: argparse.Namespace, checkpoint: Checkpoint | None, size: int) -> Config:
    """The shape of the model: what was asked for, else the checkpoint's, else the default."""
    asked = {name: getattr(options, name) for name in SHAPE if getattr(options, name)}
    if checkpoint is None:
        try:
            return Config(vocabulary_size=size, **{**SHAPE, **asked})
        except ValueError as error:
            raise UsageError(str(error)) from None
    for name, value in asked.items():
        trained = getattr(checkpoint.config, name)
        if value != trained:
            raise UsageError(f"{options.resume} holds a model of {name} {trained}, not {value}")
    return checkpoint.config


def choose_device(name: str) -> torch.device:
    """The device of that name, once it has been seen to work."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device {name!r} cannot be used: {reason}") from None
    return device


def train(
    trainings: list[Training], corpus: Corpus, steps: int, seconds: float, console: Console
) -> None:
    """Train all runs on the same batches, in turn, until the steps or the seconds are over."""
    first = trainings[0].step
    start = synchronized_clock(trainings[0].device)
    with report.progress_bar(console) as progress:
        task = progress.add_task("training", total=1.0, losses="")
        for round_ in alternating(len(trainings), steps, STEPS_PER_BLOCK):
            for index in round_:
                trainings[index].advance(corpus.training_batch(trainings[index].step))
            spent = (synchronized_clock(trainings[0].device) - start) / seconds
            progress.update(
                task,
                completed=max(spent, (trainings[0].step - first) / steps),
                losses=report.describe_losses(trainings),
            )
            if spent >= 1:
                break
    done = trainings[0].step - first
    if done < steps:
        console.print(
            f"trained for {seconds:g} seconds, all that --seconds gives: {done} of {steps} steps"
        )


def write(
    trainings: list[Training], prompt: torch.Tensor, options: argparse.Namespace
) -> tuple[list[int], list[float | None]]:
    """Let each set of operators write with the weights of the first run.

    Returns:
        The characters that the first wrote, and the characters a second of each.
    """
    models = [with_operators(trainings[0].model, run.model.operators) for run in trainings]
    written: list[list[int]] = [[] for _ in models]
    seconds: list[list[float]] = [[] for _ in models]
    for round_ in alternating(len(models), GENERATION_ROUNDS, 1):
        if sum(map(sum, seconds)) > GENERATION_SECONDS:
            break
        for index in round_:
            start = synchronized_clock(trainings[index].device)
            with trainings[index].autocast():
                written[index] = generate(
                    models[index], prompt, options.characters, options.temperature, options.seed
                )
            seconds[index].append(synchronized_clock(trainings[index].device) - start)
    if not options.characters:
        return [], [None for _ in models]
    return written[0], [options.characters / median(each) for each in seconds]


def prepare(
    options: argparse.Namespace, operators: list[Operators]
) -> tuple[list[Training], Corpus, Vocabulary]:
    """A run for each set of operators, all in the same state, and what they read."""
    if not options.prompt:
        raise UsageError("--prompt must have at least one character")
    device = choose_device(options.device)
    checkpoint = Checkpoint.load(options.resume) if options.resume else None
    text = read_text(options.text) if options.text else standard_library()
    vocabulary = checkpoint.vocabulary if checkpoint else Vocabulary.of(text)
    config = choose_config(options, checkpoint, len(vocabulary))
    corpus = Corpus(text, vocabulary, config.context, options.batch, options.seed)
    trainings = []
    for each in operators:
        torch.manual_seed(options.seed)
        training = Training(
            GPT(each, config).to(device), Schedule(options.rate), getattr(torch, options.dtype)
        )
        if checkpoint:
            checkpoint.restore(training)
        trainings.append(training)
    return trainings, corpus, vocabulary


def demonstrate(options: argparse.Namespace, operators: Operators, console: Console) -> bool:
    """Train, compare, write and save; whether the given operators agree with PyTorch's."""
    trainings, corpus, vocabulary = prepare(options, [operators, pytorch_operators()])
    ours, theirs = trainings
    console.print(report.describe(ours, corpus, vocabulary))
    held_out = corpus.validation_batches(VALIDATION_BATCHES)
    before = [run.validation_loss(held_out) for run in trainings]
    claims = compare_step(ours, theirs, held_out[0], "at the start")
    after = before
    training_speeds: list[float | None] = [None, None]
    if options.steps:
        train(trainings, corpus, options.steps, options.seconds, console)
        after = [run.validation_loss(held_out) for run in trainings]
        claims += compare_step(ours, theirs, held_out[0], "trained")
        claims += compare_ends(ours.losses, theirs.losses)
        training_speeds = [
            run.tokens_per_second(corpus.tokens_per_step, STEPS_PER_BLOCK) for run in trainings
        ]
    prompt = vocabulary.encode(options.prompt)
    four_bits = None
    if options.int4:
        four_bits = quantised.measure(ours, held_out, prompt, options.int4, options.characters)
        claims.append(four_bits.claim)
    written, writing_speeds = write(trainings, prompt, options)
    columns = zip(trainings, before, after, training_speeds, writing_speeds, strict=True)
    results = [report.Result(run.name, *figures) for run, *figures in columns]
    console.print(report.result_table(*results), report.claim_table(claims))
    if four_bits:
        console.print(str(four_bits))
    console.print(report.sample(options.prompt, vocabulary.decode(written)))
    save(options, trainings, vocabulary, console)
    return all(claim.holds for claim in claims)


def save(
    options: argparse.Namespace,
    trainings: list[Training],
    vocabulary: Vocabulary,
    console: Console,
) -> None:
    """Leave the weights of the first run and the curves of all in the output folder."""
    if not options.steps:
        return
    curves, weights = options.output / "losses.png", options.output / "gpt.safetensors"
    report.save_curves(curves, *trainings)
    Checkpoint.of(trainings[0], vocabulary).save(weights)
    console.print(f"loss curves: {curves}", f"weights: {weights}", sep="\n", soft_wrap=True)


def main(arguments: Sequence[str] | None = None, operators: Operators | None = None) -> int:
    """Run the program; the given operators take the place of those of pkg."""
    options = parse_arguments(__doc__, arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        agree = demonstrate(options, operators or pkg_operators(), Console())
    except (CheckpointError, ImportError, OSError, TextError, UsageError) as error:
        words = needs.explain(error) if isinstance(error, ImportError) else error
        print(f"gpt.py: {words}", file=sys.stderr)
        return 2
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
