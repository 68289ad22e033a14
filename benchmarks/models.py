"""Whole models, unchanged, with ``pkg.accelerate()`` and without: training and forward passes.

Each way is a process of its own (``_apart.py``), and on the CPU alone: accelerate() is for that.
Training is forward, backward and a step of AdamW whose rate of learning is 0, so that every step
has the same result. Models of ``transformers`` and ``torchvision`` are made of a configuration,
with random weights, and are part of a full run where these packages are installed; a line says
where they are not. Peers of forward passes are ``torch.compile``, with ``--compiled``, and its
backend of zentorch, with ``--zentorch PYTHON``: that Python has to import this package too, and so
to be of the same version.

``tools/models_table.py`` makes README's table and picture of what ``--json`` wrote.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ._apart import ACCELERATED, PYTORCH, Apart
from ._case import OURS, Case

AUTOCAST = "autocast"


class Block(nn.Module):
    """A layer of a transformer: causal attention and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        joint = self.query_key_value(self.before_attention(x))
        split = joint.view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """Six layers 384 wide over a context of 256 characters."""

    vocabulary, context = 256, 256

    def __init__(self, layers: int = 6, width: int = 384, heads: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.vocabulary, width)
        self.place = nn.Parameter(torch.zeros(self.context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, self.vocabulary)

    def forward(self, text: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(self.embedding(text) + self.place))
        return scores


def perceptron() -> nn.Module:
    """Three layers, of the sizes of MNIST's examples."""
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def encoder() -> nn.Module:
    """PyTorch's own, whose forward pass has a fast path of its own in inference."""
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3)


class Vision(nn.Module):
    """A ViT-S/16 of three layers, for images of 224 x 224."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 384, 16, 16)
        self.encoder = encoder()
        self.head = nn.Linear(384, 1000)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        scores: Tensor = self.head(self.encoder(tokens).mean(1))
        return scores


def text(batch: int = 2) -> Tensor:
    """Characters for the GPT."""
    return torch.randint(GPT.vocabulary, (batch, GPT.context))


@dataclass(frozen=True)
class Recipe:
    """A model, what it gets, and in which dtype it runs."""

    model_name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    dtype: torch.dtype
    mode: str  # forward, train, autocast: train in float32 with products in dtype

    @property
    def name(self) -> str:
        """The model, what is done, and the dtype."""
        short = str(self.dtype).removeprefix("torch.")
        done = {"train": "training", AUTOCAST: "training, autocast to"}.get(self.mode, "forward")
        return f"{self.model_name}, {done} {short}"

    def case(self, device: torch.device) -> Case:
        """Both ways of running it, on the same weights and inputs, in a process each."""
        is_measured = device.type == "cpu"
        ways = {OURS: ACCELERATED, "PyTorch": PYTORCH}
        peers = {name: Apart(self.name, way) for name, way in ways.items()} if is_measured else {}
        torch.manual_seed(0)
        exact, inputs = self.make().to(device).double(), self.inputs().to(device)
        run = self._forward if self.mode == "forward" else self._train
        exactly = run(exact, _cast(inputs, exact), False)
        for peer in peers.values():
            peer.wait()
        limit = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16"}
        return Case(
            self.name,
            peers or dict.fromkeys(ways, exactly),
            exactly,
            _operations(exactly) / 1e9,
            "GFLOP/s",
            terms=None,
            limit=limit.get(self.dtype, "bfloat16"),
            kind=self.mode,
            compiles=self.mode == "forward",
        )

    def alone(self, backend: str | None = None) -> Callable[[], list[Tensor]]:
        """A step on the CPU, in the model's own precision; compiled, with a backend of that."""
        model, inputs = self.make(), self.inputs()
        run = self._forward if self.mode == "forward" else self._train
        model = model.to(self.dtype) if self.mode == "forward" else model
        if backend is not None:
            model.compile(backend=backend)
        return run(model, _cast(inputs, model), self.mode == AUTOCAST)

    def _forward(self, model: nn.Module, inputs: Tensor, _: bool) -> Callable[[], list[Tensor]]:
        model.eval()

        def run() -> list[Tensor]:
            with torch.inference_mode():
                return [_result(model(inputs))]

        return run

    def _train(
        self, model: nn.Module, inputs: Tensor, autocast: bool
    ) -> Callable[[], list[Tensor]]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        context = partial(torch.autocast, inputs.device.type, dtype=self.dtype)

        def run() -> list[Tensor]:
            optimizer.zero_grad()
            with context() if autocast else contextlib.nullcontext():
                result = _result(model(inputs))
            # Any loss does: this one's gradient is of the result's size.
            loss = result.to(next(model.parameters()).dtype).square().mean()
            loss.backward()
            optimizer.step()
            matrices = [each.grad for each in model.parameters() if each.dim() == 2]
            return [loss.detach(), *(each.clone() for each in matrices[-2:] if each is not None)]

        return run


def _cast(inputs: Tensor, model: nn.Module) -> Tensor:
    return inputs.to(next(model.parameters()).dtype) if inputs.is_floating_point() else inputs


def _result(returned: Any) -> Tensor:
    """The scores, of a model that returns more than a tensor."""
    for name in ("logits", "last_hidden_state"):
        if hasattr(returned, name):
            found: Tensor = getattr(returned, name)
            return found
    assert isinstance(returned, Tensor)
    return returned


def _operations(run: Callable[[], object]) -> float:
    # The encoder's fast path is one operator, of which the counter knows nothing.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with FlopCounterMode(display=False) as counter:
            run()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return float(counter.get_total_flops())


def recipes(full: bool) -> Iterator[Recipe]:
    """The GPT in every way; the other models in those that matter; with ``full`` foreign ones."""
    half = (torch.bfloat16, torch.float16)
    yield Recipe("GPT", GPT, text, torch.float32, "train")
    yield Recipe("GPT", GPT, text, torch.bfloat16, AUTOCAST)
    for dtype in (torch.float32, *half):
        yield Recipe("GPT", GPT, text, dtype, "forward")
    batch, images = partial(torch.randn, 128, 784), partial(torch.randn, 1, 3, 224, 224)
    sequences = partial(torch.randn, 2, 128, 384)
    yield Recipe("MLP", perceptron, batch, torch.float32, "train")
    yield Recipe("MLP", perceptron, batch, torch.bfloat16, AUTOCAST)
    yield Recipe("TransformerEncoder", encoder, sequences, torch.float32, "train")
    yield Recipe("TransformerEncoder", encoder, sequences, torch.bfloat16, AUTOCAST)
    for dtype in (torch.float32, *half):
        yield Recipe("TransformerEncoder", encoder, sequences, dtype, "forward")
        yield Recipe("ViT", Vision, images, dtype, "forward")
    if full:
        yield from _transformers()
        yield from _torchvision()


@cache
def _library(package: str, module: str) -> Any:
    """A module of a package; None, and a line that says why, where it cannot be had."""
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:  # as torchvision's, made for another PyTorch
        print(f"models: those of {package} are left out: {error}", file=sys.stderr)
        return None


def _transformers() -> Iterator[Recipe]:
    """Small ones of real architectures."""
    library = _library("transformers", "transformers")
    if library is None:
        return
    small = {"num_hidden_layers": 4, "hidden_size": 384, "num_attention_heads": 6}
    gated = {**small, "intermediate_size": 1024, "num_key_value_heads": 2, "vocab_size": 256}
    configurations = {
        "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {"n_layer": 4, "n_embd": 384, "n_head": 6}),
        "Llama": ("LlamaForCausalLM", "LlamaConfig", gated),
        "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**gated, "head_dim": 64}),
        "BERT": ("BertModel", "BertConfig", {**small, "intermediate_size": 1536}),
    }
    for name, (model, configuration, sizes) in configurations.items():

        def make(model: str = model, kind: str = configuration, sizes: Any = sizes) -> nn.Module:
            made: nn.Module = getattr(library, model)(getattr(library, kind)(**sizes))
            return made

        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield Recipe(name, make, partial(text, 1), dtype, "forward")
        yield Recipe(name, make, partial(text, 1), torch.bfloat16, AUTOCAST)
    for name, make in (("ResNet-18", resnet), ("MobileNetV2", mobilenet)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield Recipe(name, make, partial(torch.randn, 1, 3, 224, 224), dtype, "forward")
    spectrogram = partial(torch.randn, 1, 80, 3000)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield Recipe("Whisper encoder", whisper, spectrogram, dtype, "forward")


def resnet() -> nn.Module:
    """In float32 convolutions are left to PyTorch, and this must not get slower."""
    library = importlib.import_module("transformers")
    sizes = {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]}
    configuration = library.ResNetConfig(**sizes, layer_type="basic")
    made: nn.Module = library.ResNetForImageClassification(configuration)
    return made


def mobilenet() -> nn.Module:
    """The same, of convolutions within each channel."""
    library = importlib.import_module("transformers")
    made: nn.Module = library.MobileNetV2ForImageClassification(library.MobileNetV2Config())
    return made


def whisper() -> nn.Module:
    """The encoder of the size called tiny, for half a minute of sound."""
    library = importlib.import_module("transformers")
    sizes = {"d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6}
    configuration = library.WhisperConfig(**sizes, encoder_ffn_dim=1536)
    made: nn.Module = library.WhisperModel(configuration).encoder
    return made


def _torchvision() -> Iterator[Recipe]:
    """In float32 convolutions are left to PyTorch, and these must not get slower."""
    library = _library("torchvision", "torchvision.models")
    if library is None:
        return
    for name in ("resnet18", "mobilenet_v3_small"):
        images = partial(torch.randn, 1, 3, 224, 224)
        make = partial(getattr(library, name), weights=None)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield Recipe(name, make, images, dtype, "forward")
