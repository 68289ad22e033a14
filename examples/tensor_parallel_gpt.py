"""Train a character-level GPT whose layers are split among processes, and survive losing one.

Each process holds its share of the weights and of the optimiser's state; pkg's operators compute on
that (pkg.integrations.distributed). Every few steps all save a checkpoint together, by
torch.distributed.checkpoint. Where a process dies, torchrun starts all of them again, and they go
on from the last checkpoint: the losses (losses.jsonl in the output folder) are the same to the last
bit as without. The same command goes on from there later, with more --steps, and on another number
of processes too; --restart begins anew.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/tensor_parallel_gpt.py
    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel_gpt.py --text my-novel.txt

The exit status is 2 when the arguments do not fit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import needs

with needs.words_for_missing_packages("tensor_parallel_gpt.py"):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoints
    from character_gpt.command_line import SHAPE, natural, positive
    from character_gpt.model import Config
    from character_gpt.parallel import ParallelGPT
    from character_gpt.text import Corpus, TextError, Vocabulary, read_text, standard_library
    from character_gpt.training import Schedule
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh

OUTPUT = Path(__file__).resolve().parent / "output" / "tensor_parallel"
KEPT = 2


class UsageError(Exception):
    """The arguments do not fit each other or the processes; the message says how."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tensor_parallel_gpt.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="text in UTF-8 (default: the standard library)"
    )
    parser.add_argument("--batch", type=positive, default=4, help="sequences in a batch (4)")
    for name, value in SHAPE.items():
        parser.add_argument(f"--{name}", type=positive, default=value, help=f"default {value}")
    parser.add_argument("--steps", type=natural, default=200, help="steps in all (200)")
    parser.add_argument(
        "--save-every", type=positive, default=20, help="steps from one checkpoint to the next (20)"
    )
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate (0.003)")
    parser.add_argument("--seed", type=natural, default=0, help="of every random choice (0)")
    parser.add_argument("--restart", action="store_true", help="forget the checkpoints there are")
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, metavar="FOLDER", help=f"default {OUTPUT}"
    )
    return parser.parse_args(arguments)


class Run:
    """A model in training, and where its checkpoints and losses are.

    Args:
        model: on the processes of the default group.
        schedule: of the learning rate.
        folder: of the output; all processes write there.
    """

    def __init__(self, model: ParallelGPT, schedule: Schedule, folder: Path) -> None:
        self.model = model
        self.schedule = schedule
        self.folder = folder
        self.step = 0
        self.losses: list[float] = []
        # One by one: some of the parameters are DTensors and some are not.
        self.optimizer = torch.optim.AdamW(
            model.parameters(), schedule.peak, betas=(0.9, 0.99), weight_decay=0.1, foreach=False
        )

    def advance(self, batch: torch.Tensor) -> None:
        """One step on a batch, int64 (batch, context + 1), the same on every process."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.rate(self.step)
        loss = self.model.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        self.losses.append(loss.item())

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step, "losses": self.losses}

    def save(self) -> None:
        """A checkpoint of this step. Only a whole one has the file .metadata, written last."""
        checkpoints.save(self._state(), checkpoint_id=self.folder / f"step-{self.step:06}")
        if dist.get_rank() == 0:
            lines = (
                json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(self.losses)
            )
            (self.folder / "losses.jsonl").write_text("\n".join(lines) + "\n")
            for old in whole_checkpoints(self.folder)[:-KEPT]:
                shutil.rmtree(old)
        dist.barrier()

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint; what it holds is spread over the processes there are now."""
        state = self._state()
        checkpoints.load(state, checkpoint_id=checkpoint)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step, self.losses = state["step"], list(state["losses"])


def whole_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that were written to the end, the oldest first."""
    return sorted(each.parent for each in folder.glob("step-*/.metadata"))


def agreed(choose: Any) -> Any:
    """What the first process chooses, on all of them: files may change meanwhile."""
    chosen = [choose() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(chosen)
    return chosen[0]


def prepare(options: argparse.Namespace) -> tuple[Run, Corpus]:
    processes = dist.get_world_size()
    if options.heads % processes:
        raise UsageError(f"{options.heads} heads cannot be shared by {processes} processes")
    text = read_text(options.text) if options.text else standard_library()
    vocabulary = Vocabulary.of(text)
    shape = {name: getattr(options, name) for name in SHAPE}
    try:
        config = Config(vocabulary_size=len(vocabulary), **shape)
    except ValueError as error:
        raise UsageError(str(error)) from None
    corpus = Corpus(text, vocabulary, config.context, options.batch, options.seed)
    torch.manual_seed(options.seed)
    model = ParallelGPT(config, init_device_mesh("cpu", (processes,)))
    return Run(model, Schedule(options.rate), options.output), corpus


def train(run: Run, corpus: Corpus, options: argparse.Namespace) -> None:
    is_first = dist.get_rank() == 0
    start, first = time.perf_counter(), run.step
    while run.step < options.steps:
        run.advance(corpus.training_batch(run.step))
        if run.step % options.save_every == 0 or run.step == options.steps:
            run.save()
            if is_first:
                rate = corpus.tokens_per_step * (run.step - first) / (time.perf_counter() - start)
                loss = run.losses[-1]
                print(
                    f"step {run.step}: loss {loss:.4f}, {rate:.0f} characters a second", flush=True
                )


def join_group() -> None:
    """Meet the other processes that torchrun started at this attempt.

    The store in which they find each other may be that of the attempt before, which still has the
    addresses of the dead.
    """
    store, rank, processes = next(dist.rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)


def run_in_group(options: argparse.Namespace) -> int:
    """What each process of the group does; returns its exit status."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    try:
        run, corpus = prepare(options)
    except (UsageError, TextError) as error:
        if rank == 0:
            print(f"tensor_parallel_gpt.py: {error}", file=sys.stderr)
        return 2
    # Its end too in one write: the other processes write to the same place.
    print(f"process {os.getpid()} is {rank + 1} of {processes}\n", end="", flush=True)
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if rank == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        if options.restart and not restarts:
            for old in options.output.glob("step-*"):
                shutil.rmtree(old)
    dist.barrier()
    there = agreed(lambda: whole_checkpoints(options.output))
    if there:
        run.restore(there[-1])
        if rank == 0:
            print(f"going on from {there[-1]}", flush=True)
    train(run, corpus, options)
    if rank == 0 and run.losses:
        print(f"{run.step} steps: from loss {run.losses[0]:.4f} to {run.losses[-1]:.4f}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if "RANK" not in os.environ:
        print("tensor_parallel_gpt.py: start it by torchrun, as --help shows", file=sys.stderr)
        return 2
    join_group()
    try:
        return run_in_group(options)
    finally:
        # At the end of the interpreter the group's threads could wait for each other.
        dist.destroy_process_group()


def leave(status: int) -> NoReturn:
    """End this process at once, with what was printed written out.

    PyTorch's cache of sharded operators holds the group beyond its destruction, and so its threads
    live on. One that gives back a tensor while the interpreter ends would abort the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
