"""FSDP2: accumulation, clipping, checkpoints for any number of processes, full weights.

    accelerate launch --cpu --num_processes 2 --use_fsdp --fsdp_version 2 \\
        --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap Block examples/fsdp2.py

Stop in the middle and continue from the checkpoint, on as many processes as you like:

    accelerate launch (the same) examples/fsdp2.py --checkpoint_dir out/fsdp2 --stop_after 40
    accelerate launch (the same, or --num_processes 1) examples/fsdp2.py --checkpoint_dir out/fsdp2 --resume

The loop is that of any other strategy: started without `--use_fsdp` the program trains with data parallelism, and alone as
plain PyTorch. The task is made up and needs no files: repeat the first half of a sequence of random symbols. The first half
cannot be guessed, the second half can, so the accuracy on the second half says whether the model learned to look back.
"""

import argparse
import pathlib
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

SYMBOLS, HALF = 16, 8


class Block(nn.Module):
    """A layer of attention and a layer of neurons: which is gathered for its forward and freed after it."""

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
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.join(seen.transpose(1, 2).reshape(batch, length, width))
        return states + self.neurons(states)


class Repeater(nn.Module):
    """Symbols of shape (batch, length) in, logits of the next symbol out; the embedding is also the head (tied)."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, width), nn.Embedding(2 * HALF, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, SYMBOLS, bias=False)
        self.head.weight = self.symbols.weight
        nn.init.normal_(self.symbols.weight, std=width**-0.5)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        places = torch.arange(symbols.shape[1], device=symbols.device)
        return self.head(self.norm(self.blocks(self.symbols(symbols) + self.places(places))))


class Progress:
    """How many updates were made; saved and restored with everything else through `register_for_checkpointing`."""

    def __init__(self) -> None:
        self.updates = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def make_rows(count: int, seed: int) -> TensorDataset:
    """Return random halves, each followed by its copy."""
    half = torch.randint(SYMBOLS, (count, HALF), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(half.repeat(1, 2))


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Return the share of symbols in the second halves that are guessed right, each row counted once."""
    model.eval()
    right = seen = 0
    for (symbols,) in loader:
        hits = (model(symbols)[:, HALF - 1 : -1].argmax(dim=-1) == symbols[:, HALF:]).float().mean(dim=1)
        hits = accelerator.gather_for_metrics(hits)
        right, seen = right + hits.sum().item(), seen + len(hits)
    model.train()
    return right / seen


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--batch_size", type=int, default=64, help="rows a step on all processes together")
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--checkpoint_dir", type=pathlib.Path, help="save here")
    parser.add_argument("--save_every", type=int, default=40, help="updates between two checkpoints")
    parser.add_argument("--stop_after", type=int, help="save and stop after this many updates")
    parser.add_argument("--resume", action="store_true", help="continue from the newest whole checkpoint")
    parser.add_argument(
        "--export", type=pathlib.Path, help="write the full weights (safetensors) to this folder at the end"
    )
    parser.add_argument("--require_accuracy", type=float, metavar="SHARE", help="fail below this accuracy")
    options = parser.parse_args()
    if (options.resume or options.stop_after) and not options.checkpoint_dir:
        parser.error("--resume and --stop_after need --checkpoint_dir")
    return options


def train(options: argparse.Namespace) -> float | None:
    """Train, and return the accuracy on rows that were held out; None when `--stop_after` ended it early."""
    accelerator = Accelerator(
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        project_config=ProjectConfiguration(options.checkpoint_dir, automatic_checkpoint_naming=True, total_limit=2),
    )
    set_seed(options.seed)
    network = Repeater()
    whole = sum(parameter.numel() for parameter in network.parameters())
    optimizer = torch.optim.AdamW(network.parameters(), lr=options.learning_rate)
    rows = options.batch_size // accelerator.num_processes
    training = DataLoader(make_rows(4096, seed=1), batch_size=rows, shuffle=True)
    held_out = DataLoader(make_rows(256, seed=2), batch_size=rows)
    model, optimizer, training, held_out = accelerator.prepare(network, optimizer, training, held_out)
    here = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters())
    accelerator.print(f"strategy: {accelerator.distributed_type.value}, {accelerator.num_processes} processes")
    accelerator.print(f"parameters: {whole}, of which this process holds {here}")

    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if options.resume:
        folder = accelerator.load_state(latest=True)
        accelerator.print(f"resumed from {folder}: update {progress.updates}")

    while progress.updates < options.updates:
        for (symbols,) in training:
            with accelerator.accumulate(model):
                logits = model(symbols)[:, HALF - 1 : -1]  # only what can be known
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), symbols[:, HALF:].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            progress.updates += 1
            stop = progress.updates == options.stop_after
            if options.checkpoint_dir and (stop or progress.updates % options.save_every == 0):
                accelerator.save_state()
            if stop:
                accelerator.print(f"stopped after {progress.updates} updates")
                accelerator.end_training()
                return None
            if progress.updates == options.updates:
                break
        accelerator.print(f"update {progress.updates:4d}  loss {loss.item():.4f}")
    accuracy = evaluate(accelerator, model, held_out)
    accelerator.print(f"accuracy on held-out rows: {accuracy:.4f}")
    if options.export:
        accelerator.save_model(model, options.export)
    accelerator.end_training()
    return accuracy


def main() -> int:
    options = parse()
    accuracy = train(options)
    if options.require_accuracy and accuracy is not None and accuracy < options.require_accuracy:
        print(f"accuracy {accuracy:.4f} is below the required {options.require_accuracy}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
