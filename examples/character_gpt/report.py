"""What the reader sees: the progress, the tables, the curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .comparison import Claim
from .text import Corpus, Vocabulary
from .training import Training

# So many are drawn as points too, since a single one makes no line.
FEW_STEPS = 30


@dataclass(frozen=True)
class Result:
    """The figures of one set of operators."""

    name: str
    first_validation_loss: float
    last_validation_loss: float
    training_tokens_per_second: float | None
    generating_tokens_per_second: float | None


def describe(training: Training, corpus: Corpus, vocabulary: Vocabulary) -> str:
    """What is about to be trained, on what, and on which machine."""
    config = training.model.config
    weights = sum(parameter.numel() for parameter in training.model.parameters())
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' * (count > 1)}" if training.device.type == "cpu" else ""
    return (
        f"text: {corpus.characters:,} characters, {len(vocabulary)} different ones\n"
        f"model: {config.layers} layers, {config.heads} heads, width {config.width}, "
        f"context {config.context}; {weights:,} weights, {training.step} steps old\n"
        f"batch: {corpus.tokens_per_step:,} characters\n"
        f"device: {training.device}{threads}, {training.dtype}"
    )


def sample(prompt: str, text: str) -> Panel:
    """The prompt and what the model wrote after it."""
    return Panel(Text.assemble((prompt, "bold"), text), title="written after the prompt")


def progress_bar(console: Console) -> Progress:
    """A bar whose tasks have a total of 1 and a field `losses`."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("elapsed,"),
        TimeRemainingColumn(),
        TextColumn("left  {task.fields[losses]}"),
        console=console,
    )


def describe_losses(trainings: Iterable[Training]) -> str:
    """The last losses, for the progress bar."""
    return "loss " + ", ".join(f"{run.losses[-1]:.3f} ({run.name})" for run in trainings)


def result_table(ours: Result, theirs: Result) -> Table:
    """Loss and speed of both, and their ratio."""
    table = Table("", ours.name, theirs.name, f"{ours.name} / {theirs.name}")
    for column in table.columns[1:]:
        column.justify = "right"

    def row(words: str, pair: tuple[float | None, float | None], digits: int, ratio: bool) -> None:
        left, right = pair
        if left is not None and right is not None:
            last = f"{left / right:.2f}" if ratio else ""
            table.add_row(words, f"{left:,.{digits}f}", f"{right:,.{digits}f}", last)

    def both(field: str) -> tuple[float | None, float | None]:
        return getattr(ours, field), getattr(theirs, field)

    row("validation loss before, nats a character", both("first_validation_loss"), 4, False)
    row("validation loss after", both("last_validation_loss"), 4, False)
    row("training, tokens per second", both("training_tokens_per_second"), 0, True)
    row("generating, tokens per second", both("generating_tokens_per_second"), 0, True)
    return table


def claim_table(claims: Iterable[Claim]) -> Table:
    """What was claimed of the agreement, and whether it holds."""
    table = Table("agreement", "measured", "tolerance", "")
    table.columns[1].justify = table.columns[2].justify = "right"
    for claim in claims:
        verdict = "holds" if claim.holds else "[bold red]FAILS"
        table.add_row(claim.words, f"{claim.measured:.2e}", f"{claim.tolerance:.2e}", verdict)
    return table


def draw_curves(ours: Training, theirs: Training) -> Figure:
    """A picture of the losses of two runs, and of their difference, by step."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    steps = range(ours.step - len(ours.losses) + 1, ours.step + 1)
    marker = "." if len(steps) <= FEW_STEPS else None
    for run, width, color in ((theirs, 3, "tab:orange"), (ours, 1, "tab:blue")):
        losses.plot(
            steps,
            run.losses,
            label=run.name,
            linewidth=width,
            marker=marker,
            markersize=4 * width + 2,
            color=color,
        )
    losses.set_ylabel("training loss, nats a character")
    losses.legend()
    distances = _distances(ours.losses, theirs.losses)
    differences.semilogy(steps, distances, marker=marker, color="tab:gray")
    differences.set_ylabel("difference")
    differences.set_xlabel("step")
    # There is no half a step, and one alone has others beside it.
    differences.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if len(steps) == 1:
        differences.set_xlim(ours.step - 1, ours.step + 1)
    return figure


def save_curves(path: Path, ours: Training, theirs: Training) -> None:
    """Leave that picture in a file."""
    draw_curves(ours, theirs).savefig(path, dpi=120)


def _distances(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    # A logarithmic axis has no zero: equal losses are drawn a rounding of float32 apart.
    return [max(abs(left - right), 2**-24) for left, right in zip(ours, theirs, strict=True)]
