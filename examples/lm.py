"""A language model over bytes, trained on Python's own sources: sharded, tracked, resumed exactly, exported, and used.

The text is the standard library of the Python that runs this; a byte is a token. The configuration shards the model with FSDP2 and
computes in bfloat16; the loop knows nothing of it, so the same program runs with other flags, or none, as data parallelism. Stopped at any time and
started again by the same command, it continues with the next batch. At the end it writes full weights and continues a line of Python.

    accelerate launch --config_file examples/configs/fsdp2.yaml --cpu --num_processes 2 examples/lm.py --steps 60 --stop_after 40
    accelerate launch --config_file examples/configs/fsdp2.yaml --cpu --num_processes 2 examples/lm.py --steps 60

Prints: 60 steps in all, each logged once, bits a byte below 0.7 of the first, exported and generated: True
"""

import argparse
import json
import math
import pathlib
import sysconfig
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import ProjectConfiguration, set_seed


class Block(nn.Module):
    """A layer of attention and a layer of neurons: what is gathered for its forward and freed after it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.attend, self.join = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.neurons = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        batch, length, width = states.shape
        parts = self.attend(self.norm(states)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.join(seen.transpose(1, 2).reshape(batch, length, width))
        return states + self.neurons(states)


class ByteModel(nn.Module):
    """Bytes of shape (batch, length) in, logits of the next byte out; the embedding is also the head (tied)."""

    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.embed, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.embed(ids) + self.positions(positions))))

    @torch.no_grad()
    def generate(self, prompt: str, count: int) -> str:
        """Continue a prompt by so many bytes, the likeliest each time."""
        ids = torch.tensor([list(prompt.encode())], device=self.embed.weight.device)
        for _ in range(count):
            ids = torch.cat([ids, self(ids[:, -self.length :])[:, -1:].argmax(dim=-1)], dim=1)
        return bytes(ids[0].tolist()).decode("latin-1")


class Sources(Dataset):
    """Pieces of the standard library's sources, `length` bytes and the next one each."""

    def __init__(self, length: int, megabytes: float) -> None:
        folder = pathlib.Path(sysconfig.get_path("stdlib"))
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[: int(megabytes * 1e6)]
        self.text, self.length = torch.frombuffer(bytearray(text), dtype=torch.uint8), length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.text[index * self.length : (index + 1) * self.length + 1].long()


class JsonLines(GeneralTracker):
    """A tracker that appends a line per call of `log`; a name such as "tensorboard" in `log_with` does as well."""

    name = "json_lines"
    requires_logging_directory = True

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.path, self.file = path, None

    @property
    def tracker(self) -> Any:
        return self.file

    @on_main_process
    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("a")  # a resumed run adds to it

    @on_main_process
    def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()

    @on_main_process
    def finish(self) -> None:
        self.file.close()


class Progress:
    """Steps so far, and the loss of the first one; saved and loaded with everything else."""

    def __init__(self) -> None:
        self.steps, self.first_loss = 0, math.nan

    def state_dict(self) -> dict[str, float]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, float]) -> None:
        vars(self).update(state)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/lm"))
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps in all")
    parser.add_argument("--stop_after", type=int, help="save and leave after this many")
    parser.add_argument("--save_every", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=8, help="sequences of each rank in a micro-batch")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=1.0, help="of text")
    return parser.parse_args()


def train(accelerator: Accelerator, options: argparse.Namespace) -> tuple[nn.Module, Progress, float]:
    """Train from where the newest checkpoint stands; return the model, the progress and the last losses' mean."""
    set_seed(0)
    loader = DataLoader(Sources(options.length, options.megabytes), batch_size=options.batch_size, shuffle=True)
    model = ByteModel(options.width, options.layers, max(options.width // 32, 1), options.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.1)
    warm_up = max(options.steps // 10, 1)

    def rate(step: int) -> float:
        """Rise over the first tenth, then fall like a cosine to a tenth."""
        share = min((step - warm_up) / max(options.steps - warm_up, 1), 1)
        return (step + 1) / warm_up if step < warm_up else 0.55 + 0.45 * math.cos(math.pi * share)

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    # If prepared, it would step once per rank; a schedule that counts optimizer steps follows them directly.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, rate)
    progress = Progress()
    accelerator.register_for_checkpointing(progress, scheduler)
    folder = accelerator.load_state(latest=True, missing_ok=True)
    accelerator.print(f"begins at step {progress.steps}" + (f", from {folder}" if folder else ""))

    recent = []
    while progress.steps < options.steps:
        for ids in loader:
            with accelerator.accumulate(model):
                logits = model(ids[:, :-1])
                loss = cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            scheduler.step()
            progress.steps += 1
            bits = accelerator.reduce(loss.detach(), "mean").item() / math.log(2)
            recent = [*recent, bits][-10:]
            progress.first_loss = bits if progress.steps == 1 else progress.first_loss
            accelerator.log({"bits_per_byte": bits, "learning_rate": scheduler.get_last_lr()[0]}, step=progress.steps)
            leaves = progress.steps in (options.stop_after, options.steps)
            if leaves or progress.steps % options.save_every == 0:
                accelerator.save_state()
            if leaves:
                return model, progress, sum(recent) / len(recent)
    return model, progress, math.nan


def main() -> None:
    options = parse()
    project = ProjectConfiguration(
        options.out, automatic_checkpoint_naming=True, total_limit=2, save_on_signal=["SIGTERM", "SIGUSR1"]
    )
    accelerator = Accelerator(
        gradient_accumulation_steps=options.accumulation,
        project_config=project,
        log_with=JsonLines(options.out / "log.jsonl"),
    )
    accelerator.init_trackers("lm")
    model, progress, bits = train(accelerator, options)
    accelerator.print(f"step {progress.steps}: {bits:.2f} bits a byte, at first {progress.first_loss:.2f}")
    if progress.steps < options.steps:
        accelerator.print(f"stopped after {progress.steps} steps; the same command continues")
        accelerator.end_training()
        return

    accelerator.save_model(model, options.out / "export")  # full weights, under every strategy
    accelerator.wait_for_everyone()
    shown = False
    if accelerator.is_main_process:
        alone = ByteModel(options.width, options.layers, max(options.width // 32, 1), options.length)
        missing, _ = alone.load_state_dict(load_file(options.out / "export" / "model.safetensors"), strict=False)
        alone.head.weight = alone.embed.weight  # tied: the file has one of the two names
        prompt = "def main(self):\n    "
        text = alone.eval().generate(prompt, 40)
        print(repr(text))
        steps = [json.loads(line)["step"] for line in (options.out / "log.jsonl").read_text().splitlines()]
        learned = bits < 0.7 * progress.first_loss and steps == list(range(1, options.steps + 1))
        shown = learned and len(text) == len(prompt) + 40 and set(missing) <= {"head.weight", "embed.weight"}
    accelerator.print(
        f"{progress.steps} steps in all, each logged once, bits a byte below 0.7 of the first, exported and generated: {shown}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
