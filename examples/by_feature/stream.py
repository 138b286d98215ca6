"""Train on a stream, and continue in the middle of it.

A stream (`IterableDataset`) has no indices, so by default the main process reads it and sends each rank its samples. A stream with
`state_dict` and `load_state_dict` is put back to its place by `load_state` without reading it again. `accelerator.data_plan(loader)` says
who reads what.

    accelerate launch --cpu --num_processes 2 examples/by_feature/stream.py

Prints: after load_state the stream gives the next texts, none twice and none omitted: True
"""

import pydoc_data.topics
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

LENGTH, STOP_AFTER = 128, 20


class Topics(IterableDataset):
    """Reads Python's documentation piece by piece, and can return and restore its position."""

    def __init__(self) -> None:
        self.text = "".join(pydoc_data.topics.topics.values()).encode("utf-8")[: 100 * LENGTH]
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < len(self.text):
            piece = self.text[self.place : self.place + LENGTH]
            self.place += LENGTH  # before it is handed on: the state is that after this piece
            yield torch.tensor(list(piece))
        self.place = 0

    def state_dict(self) -> dict:
        return {"place": self.place}

    def load_state_dict(self, state: dict) -> None:
        self.place = state["place"]


def train(accelerator: Accelerator, resume: bool = False, save_after: int | None = None) -> list[bytes]:
    """Train on the stream, and return the texts that all ranks have seen, in their order."""
    set_seed(0)
    model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Topics(), batch_size=2))
    if resume:
        accelerator.load_state("out/stream")
    else:
        accelerator.print(accelerator.data_plan(loader))
    texts = []
    for step, ids in enumerate(loader, 1):
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        texts += [bytes(row.tolist()) for row in accelerator.gather_for_metrics(ids).cpu()]
        if step == save_after:
            accelerator.save_state("out/stream")
            break
    accelerator.free_memory()
    return texts


def main() -> None:
    accelerator = Accelerator()
    before = train(accelerator, save_after=STOP_AFTER)
    after = train(accelerator, resume=True)
    accelerator.print(f"{len(before)} texts before, {len(after)} after")
    shown = b"".join(before + after) == Topics().text and len(before) == 2 * STOP_AFTER * accelerator.num_processes
    accelerator.print(f"after load_state the stream gives the next texts, none twice and none omitted: {shown}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
