"""The state of a run in one safetensors file, which is read only where it is whole and fits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .model import GPT, Config, pytorch_operators
from .text import Vocabulary
from .training import Training

FORMAT = "pkg-kernels character GPT, version 1"


class CheckpointError(Exception):
    """A file that cannot be resumed from; the message says which and why."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on.

    Attributes:
        config: the shape of the model.
        vocabulary: its characters.
        step: how many steps it has been trained.
        tensors: float32, under ``weight.NAME``, and AdamW's ``exp_avg.NAME`` and
            ``exp_avg_sq.NAME``, for each NAME of the model's parameters.
    """

    config: Config
    vocabulary: Vocabulary
    step: int
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, training: Training, vocabulary: Vocabulary) -> Checkpoint:
        """The state of a run."""
        tensors = {}
        for name, parameter in training.model.named_parameters():
            state = training.optimizer.state.get(parameter, {})
            tensors[f"weight.{name}"] = parameter.detach().cpu().contiguous()
            for moment in ("exp_avg", "exp_avg_sq"):
                value = state.get(moment, torch.zeros_like(parameter))
                tensors[f"{moment}.{name}"] = value.cpu().contiguous()
        return cls(training.model.config, vocabulary, training.step, tensors)

    def restore(self, training: Training) -> None:
        """Put this state into a run of a model of the same config."""
        names = [name for name, _ in training.model.named_parameters()]
        training.model.load_state_dict({name: self.tensors[f"weight.{name}"] for name in names})
        training.step = self.step
        optimizer_state = training.optimizer.state_dict()
        optimizer_state["state"] = {
            index: {
                "step": torch.tensor(float(self.step)),
                "exp_avg": self.tensors[f"exp_avg.{name}"].clone(),
                "exp_avg_sq": self.tensors[f"exp_avg_sq.{name}"].clone(),
            }
            for index, name in enumerate(names)
        }
        training.optimizer.load_state_dict(optimizer_state)

    def _description(self) -> dict[str, str]:
        return {
            "format": FORMAT,
            "config": json.dumps(asdict(self.config)),
            "vocabulary": json.dumps(self.vocabulary.characters),
            "step": str(self.step),
        }

    def save(self, path: Path) -> None:
        """Write the file; one that is there is replaced at once, never left half written."""
        description = self._description()
        description["sha256"] = _digest(description, self.tensors)
        unfinished = path.with_name(path.name + ".unfinished")
        save_file(dict(self.tensors), unfinished, description)
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read a file.

        Raises:
            CheckpointError: when it cannot be read, is not of this program, is incomplete, or is
                not what was written.
        """
        description, tensors = _read(path)
        if description.get("format") != FORMAT:
            raise CheckpointError(f"{path} was not written by this program ({FORMAT})")
        if description.pop("sha256", None) != _digest(description, tensors):
            raise CheckpointError(f"{path} is corrupt: its contents do not have its checksum")
        try:
            checkpoint = cls(
                Config(**json.loads(description["config"])),
                Vocabulary(json.loads(description["vocabulary"])),
                int(description["step"]),
                tensors,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} does not describe a model: {error}") from None
        checkpoint._check_shapes(path)
        return checkpoint

    def _check_shapes(self, path: Path) -> None:
        if len(self.vocabulary) != self.config.vocabulary_size:
            raise CheckpointError(
                f"{path} lists {len(self.vocabulary)} characters for a model of "
                f"{self.config.vocabulary_size}"
            )
        with torch.device("meta"):
            parameters = dict(GPT(pytorch_operators(), self.config).named_parameters())
        expected = {
            f"{kind}.{name}": parameter.shape
            for kind in ("weight", "exp_avg", "exp_avg_sq")
            for name, parameter in parameters.items()
        }
        for name in sorted(expected.keys() ^ self.tensors.keys()):
            state = "lacks" if name in expected else "has a foreign"
            raise CheckpointError(f"{path} {state} tensor {name}")
        for name, shape in expected.items():
            tensor = self.tensors[name]
            if tensor.shape != shape or tensor.dtype != torch.float32:
                raise CheckpointError(
                    f"{path}: {name} is {tensor.dtype} {tuple(tensor.shape)}, where its model "
                    f"needs torch.float32 {tuple(shape)}"
                )


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no whole safetensors file: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def _digest(description: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}".encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()
