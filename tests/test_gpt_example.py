"""examples/gpt.py: it trains, agrees with PyTorch, writes, resumes, and refuses in words."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
for needed in ("matplotlib", "rich", "safetensors"):
    pytest.importorskip(needed)

import gpt  # noqa: E402
from character_gpt import report  # noqa: E402
from character_gpt.checkpoint import Checkpoint  # noqa: E402
from character_gpt.comparison import with_operators  # noqa: E402
from character_gpt.generation import generate  # noqa: E402
from character_gpt.model import (  # noqa: E402
    GPT,
    Config,
    Operators,
    pkg_operators,
    pytorch_operators,
)
from character_gpt.quantised import LARGEST_LOSS, quantised  # noqa: E402
from character_gpt.text import (  # noqa: E402
    UNKNOWN,
    Corpus,
    Vocabulary,
    standard_library,
)
from character_gpt.training import Schedule, Training, alternating  # noqa: E402

import pkg  # noqa: E402

SMALL = [
    "--context",
    "32",
    "--layers",
    "2",
    "--heads",
    "2",
    "--width",
    "32",
    "--batch",
    "4",
    "--characters",
    "20",
    "--seed",
    "1",
]
TEXT = "".join(f"the square of {n} is {n * n}.\n" for n in range(400))
CONFIG = Config(vocabulary_size=11, context=16, layers=2, heads=2, width=16)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "squares.txt"
    path.write_text(TEXT, "utf-8")
    return path


@pytest.fixture(scope="module")
def trained(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six steps."""
    output = tmp_path_factory.mktemp("six")
    assert run(text_file, output, "--steps", "6") == 0
    return output


def run(text: Path, output: Path, *more: str, operators: Operators | None = None) -> int:
    """Run the program in this process."""
    return gpt.main(
        [*SMALL, "--text", str(text), "--output", str(output), *more], operators=operators
    )


def test_help_names_the_options() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "gpt.py"), "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    options = ("--text", "--prompt", "--temperature", "--resume", "--steps", "--seconds", "--dtype")
    assert all(option in done.stdout for option in options)


def test_a_run_learns_agrees_and_leaves_its_files(
    text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(text_file, tmp_path, "--steps", "120", "--prompt", "the square") == 0
    printed = capsys.readouterr().out
    assert "FAILS" not in printed
    assert "training, tokens per second" in printed
    assert "generating, tokens per second" in printed
    assert "the square" in printed
    row = {
        line.split("│")[1].strip(): line.split("│")[2:4]
        for line in printed.splitlines()
        if line.count("│") == 5
    }
    before = [float(x) for x in row["validation loss before, nats a character"]]
    after = [float(x) for x in row["validation loss after"]]
    assert max(after) < min(before) / 2
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert Checkpoint.load(tmp_path / "gpt.safetensors").step == 120


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 120])
def test_the_curves_have_whole_steps(steps: int) -> None:
    runs = [SimpleNamespace(step=steps, losses=[1.0] * steps, name=name) for name in "ab"]
    figure = report.draw_curves(*runs)
    figure.canvas.draw()
    for axes in figure.axes:
        low, high = axes.get_xlim()
        ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
        assert ticks
        assert all(tick == int(tick) for tick in ticks)
        # A single step is a point, since it makes no line.
        assert all((line.get_marker() == ".") == (steps < 120) for line in axes.get_lines())


def test_four_bits_cost_little_likelihood(
    text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(text_file, tmp_path, "--steps", "120", "--int4", "32") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "FAILS" not in printed
    found = re.search(r"validation loss ([\d.]+) \(([\d.]+) in full\), generating", printed)
    assert found is not None
    quantised, full = map(float, found.groups())
    assert full != quantised
    assert quantised - full <= LARGEST_LOSS
    file = str(tmp_path / "gpt.safetensors")
    assert run(text_file, tmp_path, "--steps", "0", "--resume", file, "--int4", "32") == 0


def test_the_quantised_model_has_no_other_weights(trained: Path) -> None:
    checkpoint = Checkpoint.load(trained / "gpt.safetensors")
    model = GPT(pkg_operators(), checkpoint.config)
    twin = quantised(model, 32)
    layers = [module for module in twin.modules() if isinstance(module, pkg.nn.Int4Linear)]
    assert len(layers) == 4 * checkpoint.config.layers
    assert torch.equal(twin.characters, model.characters)


def test_bfloat16_agrees_as_far_as_bfloat16_can(text_file: Path, tmp_path: Path) -> None:
    assert run(text_file, tmp_path, "--steps", "12", "--dtype", "bfloat16") == 0


def test_the_budget_of_seconds_stops_both_runs_at_one_step(text_file: Path, tmp_path: Path) -> None:
    assert run(text_file, tmp_path, "--steps", "100000", "--seconds", "1") == 0
    assert 0 < Checkpoint.load(tmp_path / "gpt.safetensors").step < 100000


def test_a_resumed_run_is_the_uninterrupted_one(
    trained: Path, text_file: Path, tmp_path: Path
) -> None:
    assert run(text_file, tmp_path, "--steps", "3") == 0
    file = tmp_path / "gpt.safetensors"
    assert run(text_file, tmp_path, "--steps", "3", "--resume", str(file)) == 0
    resumed, whole = Checkpoint.load(file), Checkpoint.load(trained / "gpt.safetensors")
    assert resumed.step == whole.step == 6
    for name, tensor in whole.tensors.items():
        assert torch.equal(resumed.tensors[name], tensor), name


def test_without_steps_a_resumed_run_only_writes(
    trained: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(trained / "gpt.safetensors")
    assert run(text_file, tmp_path, "--steps", "0", "--resume", file, "--prompt", "two") == 0
    assert "two" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def truncate_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:40])


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)


def overwrite_with_text(file: Path) -> None:
    file.write_text("these are no weights")


def make_empty(file: Path) -> None:
    file.write_bytes(b"")


def remove(file: Path) -> None:
    file.unlink()


def replace_by_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def save_foreign(file: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(3)}, file)


def rewrite(file: Path, change: Callable[[dict[str, Tensor]], None], **config: int) -> None:
    """Write a file that has its checksum but not the tensors of its model."""
    old = Checkpoint.load(file)
    tensors = dict(old.tensors)
    change(tensors)
    new_config = Config(**{**vars(old.config), **config})
    Checkpoint(new_config, old.vocabulary, old.step, tensors).save(file)


def drop_a_tensor(file: Path) -> None:
    rewrite(file, lambda tensors: tensors.__delitem__("weight.norm.weight"))


def add_a_tensor(file: Path) -> None:
    rewrite(file, lambda tensors: tensors.__setitem__("weight.more", torch.zeros(1)))


def reshape_a_tensor(file: Path) -> None:
    rewrite(file, lambda tensors: tensors.__setitem__("weight.norm.weight", torch.zeros(3)))


def change_a_dtype(file: Path) -> None:
    rewrite(
        file,
        lambda tensors: tensors.__setitem__("weight.norm.weight", torch.zeros(32).double()),
    )


def claim_more_characters(file: Path) -> None:
    rewrite(file, lambda tensors: None, vocabulary_size=1000)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (truncate, "no whole safetensors file"),
        (truncate_header, "no whole safetensors file"),
        (flip_a_bit, "corrupt"),
        (overwrite_with_text, "no whole safetensors file"),
        (make_empty, "no whole safetensors file"),
        (remove, "cannot be read"),
        (replace_by_a_folder, "cannot be read"),
        (save_foreign, "not written by this program"),
        (drop_a_tensor, "lacks tensor weight.norm.weight"),
        (add_a_tensor, "foreign tensor weight.more"),
        (reshape_a_tensor, "(3,)"),
        (change_a_dtype, "torch.float64"),
        (claim_more_characters, "characters for a model of 1000"),
    ],
)
def test_a_file_that_cannot_be_resumed_is_refused_in_words(
    trained: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    words: str,
) -> None:
    file = tmp_path / "spoilt.safetensors"
    file.write_bytes((trained / "gpt.safetensors").read_bytes())
    spoil(file)
    assert run(text_file, tmp_path, "--steps", "1", "--resume", str(file)) == 2
    message = capsys.readouterr().err
    assert words in message
    assert str(file) in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--resume", "{file}", "--layers", "3"], "layers 2, not 3"),
        (["--width", "33"], "33 cannot be shared by 2 heads"),
        (["--width", "2"], "odd"),
        (["--prompt", ""], "--prompt"),
        (["--device", "abacus"], "'abacus' cannot be used"),
        (["--text", "{folder}/absent.txt"], "absent.txt cannot be read"),
        (["--text", "{folder}/binary"], "not UTF-8"),
        (["--text", "{folder}/short.txt"], "at least 660"),
        (["--output", "{folder}/short.txt"], "short.txt"),
    ],
)
def test_what_cannot_be_run_is_refused_in_words(
    trained: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "short.txt").write_text("too short")
    filled = [
        argument.format(file=trained / "gpt.safetensors", folder=tmp_path) for argument in arguments
    ]
    assert run(text_file, tmp_path / "output", *filled) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--steps", "-1"], ["--batch", "0"], ["--dtype", "int8"]])
def test_impossible_figures_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        gpt.main(arguments)
    assert refusal.value.code == 2


def rounded_linear(input: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(input.bfloat16(), weight.bfloat16()).to(input.dtype)


def rounded_linear_gelu(input: Tensor, weight: Tensor) -> Tensor:
    return functional.gelu(rounded_linear(input, weight))


def missing_mask(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value)


class WrongGradient(torch.autograd.Function):
    """The identity, with a gradient that is a thousandth too large."""

    @staticmethod
    def forward(ctx: object, input: Tensor) -> Tensor:
        return input.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 1.001


def linear_with_wrong_gradient(input: Tensor, weight: Tensor) -> Tensor:
    return WrongGradient.apply(functional.linear(input, weight))


@pytest.mark.parametrize(
    "operators",
    [
        replace(pytorch_operators(), name="rounded", linear=rounded_linear),
        replace(pytorch_operators(), name="rounded gelu", linear_gelu=rounded_linear_gelu),
        replace(pytorch_operators(), name="unmasked", attention=missing_mask),
        replace(pytorch_operators(), name="gradient", linear=linear_with_wrong_gradient),
    ],
    ids=lambda operators: operators.name,
)
def test_wrong_operators_are_found(
    text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], operators: Operators
) -> None:
    assert run(text_file, tmp_path, "--steps", "3", operators=operators) == 1
    assert "FAILS" in capsys.readouterr().out


@pytest.mark.parametrize(
    "operators", [pkg_operators(), pytorch_operators()], ids=["pkg", "PyTorch"]
)
def test_writing_with_the_cache_is_reading_everything_anew(operators: Operators) -> None:
    torch.manual_seed(0)
    exact = GPT(pytorch_operators(), CONFIG)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter *= 10  # so that the likeliest character is clearly the likeliest
    prompt, count = [3, 1, 4, 1], 2 * CONFIG.context
    expected, first = list(prompt), 0
    with torch.no_grad():
        for _ in range(count):
            if len(expected) - first > CONFIG.context:  # the later half goes on
                first = len(expected) - CONFIG.context // 2
            expected.append(int(exact(torch.tensor([expected[first:]]))[0, -1].argmax()))
    written = generate(with_operators(exact, operators), torch.tensor(prompt), count, 0.0, seed=0)
    assert prompt + written == expected


@pytest.mark.parametrize(
    "operators", [pkg_operators(), pytorch_operators()], ids=["pkg", "PyTorch"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_sequences_are_read_with_a_cache(operators: Operators, dtype: torch.dtype) -> None:
    model = GPT(operators, CONFIG).to(dtype)
    tokens = torch.arange(3 * CONFIG.context).reshape(3, -1) % 11
    with torch.inference_mode():
        whole = model(tokens)
        caches = model.new_caches()
        parts = [model(part, caches) for part in tokens.split([5] + [1] * 11, 1)]
    # As far apart as two sums of the same terms in two orders.
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=4 * torch.finfo(dtype).eps, rtol=0)


def test_writing_goes_on_past_the_context_and_depends_on_the_seed() -> None:
    torch.manual_seed(0)
    model = GPT(pytorch_operators(), CONFIG)
    prompt = torch.arange(11).repeat(5)
    first, again, other = (generate(model, prompt, 50, 1.0, seed) for seed in (0, 0, 1))
    assert len(first) == 50
    assert first == again != other


def test_vocabulary_reads_what_it_knows() -> None:
    vocabulary = Vocabulary.of("héllo 🐍")
    assert vocabulary.decode(vocabulary.encode("hé🐍").tolist()) == "hé🐍"
    assert vocabulary.decode(vocabulary.encode("\0hx\U0010ffff").tolist()) == (
        f"{UNKNOWN}h{UNKNOWN}{UNKNOWN}"
    )
    with pytest.raises(ValueError, match="ordered set"):
        Vocabulary("ba")


def test_batches_are_of_the_seed_and_the_step_and_keep_off_the_held_out_text() -> None:
    text = "a" * 900 + "b" * 100
    corpus = Corpus(text, Vocabulary.of(text), context=8, batch=3, seed=5)
    assert torch.equal(corpus.training_batch(7), corpus.training_batch(7))
    assert all((corpus.training_batch(step) == 0).all() for step in range(20))
    held_out = corpus.validation_batches(2)
    assert [tuple(batch.shape) for batch in held_out] == [(3, 9), (3, 9)]
    assert all((batch == 1).all() for batch in held_out)


def test_the_default_text_is_python() -> None:
    text = standard_library()
    assert text == standard_library()
    assert "\ndef " in text


@pytest.mark.parametrize("steps", [1, 5, 12])
def test_runs_take_turns(steps: int) -> None:
    rounds: Iterator[list[int]] = alternating(2, steps, 5)
    taken = [run for round_ in rounds for run in round_]
    assert taken.count(0) == taken.count(1) == steps
    assert taken[:2] == ([0, 1] if steps == 1 else [0, 0])


def test_the_rate_rises_then_falls() -> None:
    schedule = Schedule(peak=1.0, warm_up=10)
    rates = [schedule.rate(step) for step in range(40)]
    assert rates[9] == max(rates) == 1.0
    assert rates[39] == pytest.approx(0.5)


def test_the_median_step_leaves_the_first_ones_out() -> None:
    training = Training(GPT(pytorch_operators(), CONFIG), Schedule(1.0))
    training.seconds = [9.0, 9.0, 1.0, 2.0, 1.0]
    assert training.tokens_per_second(100, warm_up=2) == 100
