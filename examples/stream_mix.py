"""Mix several streams by weight, and continue in the middle of the mixture with nothing read twice.

Pretraining reads from sources of different size and worth: here documentation and code of Python, three pieces of the one for each of the
other. The mixture is a stream with a state: how far each source was read, and its own generator of random numbers. By default the main
process reads and sends each rank its samples, so there is one place to remember, whatever the number of ranks.

    accelerate launch --cpu --num_processes 2 examples/stream_mix.py

Prints: mixture 3:1 within 10 %, resumed texts and losses equal those of a run that was not stopped: True
"""

import argparse
import pathlib
import pydoc_data.topics
import random
import shutil
import sysconfig
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

LENGTH = 64
WEIGHTS = {"documentation": 3, "code": 1}


class Source:
    """A text that is read piece by piece, again from the start when it is at its end."""

    def __init__(self, text: bytes) -> None:
        self.text, self.place, self.rounds = text, 0, 0

    def read(self) -> bytes:
        """Return the next piece, and move on."""
        if self.place + LENGTH > len(self.text):
            self.place, self.rounds = 0, self.rounds + 1
        self.place += LENGTH
        return self.text[self.place - LENGTH : self.place]


class Mixture(IterableDataset):
    """Draws pieces of several sources by weight; it can say where it is, and be put there."""

    def __init__(self, sources: dict[str, Source], weights: dict[str, float], pieces: int, seed: int) -> None:
        self.sources, self.weights, self.pieces = sources, weights, pieces
        self.random, self.given = random.Random(seed), 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        names = list(self.weights)
        while self.given < self.pieces:
            name = self.random.choices(names, list(self.weights.values()))[0]
            piece = self.sources[name].read()
            self.given += 1  # the state is that after the piece which is handed on now
            yield {"ids": torch.tensor(list(piece)), "source": torch.tensor(names.index(name))}

    def state_dict(self) -> dict[str, Any]:
        version, numbers, gauss = self.random.getstate()
        places = {name: [source.place, source.rounds] for name, source in self.sources.items()}
        return {"given": self.given, "places": places, "random": [version, list(numbers), gauss]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]
        for name, (place, rounds) in state["places"].items():
            self.sources[name].place, self.sources[name].rounds = place, rounds
        version, numbers, gauss = state["random"]
        self.random.setstate((version, tuple(numbers), gauss))


def make_mixture(pieces: int) -> Mixture:
    """Return the documentation and the sources of this Python, mixed."""
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    code = b"".join(path.read_bytes() for path in sorted(folder.glob("a*.py")))
    documentation = "".join(pydoc_data.topics.topics.values()).encode()
    return Mixture({"documentation": Source(documentation), "code": Source(code)}, WEIGHTS, pieces, seed=0)


class Record:
    """What was trained on: losses, and how many pieces of each source; saved and loaded with everything else."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.losses: list[float] = []
        self.counts = [0] * len(WEIGHTS)

    def state_dict(self) -> dict[str, list]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, list]) -> None:
        vars(self).update(state)


def train(
    accelerator: Accelerator, record: Record, steps: int, stop_after: int | None = None, resume: bool = False
) -> None:
    """Train on the mixture, from its start or from the newest checkpoint."""
    set_seed(0)
    record.clear()
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch_size = 4
    mixture = make_mixture(steps * batch_size * accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(mixture, batch_size=batch_size))
    if resume:
        accelerator.load_state(latest=True)
    for batch in loader:
        ids = batch["ids"]
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        record.losses.append(accelerator.reduce(loss.detach(), "mean").item())
        seen = accelerator.gather(torch.bincount(batch["source"], minlength=len(WEIGHTS))[None]).sum(dim=0).tolist()
        record.counts = [before + now for before, now in zip(record.counts, seen, strict=True)]
        if len(record.losses) == stop_after:
            accelerator.save_state()
            break
    accelerator.free_memory()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/stream_mix"))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    accelerator = Accelerator(project_config=ProjectConfiguration(options.out, automatic_checkpoint_naming=True))
    if accelerator.is_main_process:
        shutil.rmtree(options.out, ignore_errors=True)
    accelerator.wait_for_everyone()
    record = Record()
    accelerator.register_for_checkpointing(record)
    train(accelerator, record, options.steps)
    whole = list(record.losses), list(record.counts)
    train(accelerator, record, options.steps, stop_after=options.steps // 3)
    train(accelerator, record, options.steps, resume=True)  # in life another start of the program

    pieces = dict(zip(WEIGHTS, record.counts, strict=True))
    accelerator.print(f"pieces of each source: {pieces}; loss {record.losses[0]:.2f}, then {record.losses[-1]:.2f}")
    share = pieces["documentation"] / sum(pieces.values())
    shown = abs(share - 0.75) < 0.075 and (record.losses, record.counts) == whole
    accelerator.print(
        f"mixture 3:1 within 10 %, resumed texts and losses equal those of a run that was not stopped: {shown}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
