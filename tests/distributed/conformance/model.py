"""What every strategy trains: a small transformer, its data, and the loop of one process that all of them have to equal."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.nn import functional

WORDS, LENGTH, WIDTH, HEADS, LAYERS = 32, 16, 16, 4, 2
SAMPLES = 4  # in a micro-batch, over all ranks
WINDOW = 2  # micro-batches in an optimizer step
RATE, MAX_NORM, MAX_VALUE = 5e-3, 0.5, 0.02


class Attention(nn.Module):
    """Causal attention; the number of heads follows from the width that arrives, which tensor parallelism divides."""

    def __init__(self):
        super().__init__()
        # A bias of the keys has no gradient but rounding errors, which AdamW would turn into steps.
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        query, key, value = (
            part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A transformer with a tied head and a buffer."""

    # As transformers' models say how they are divided among ranks.
    _tp_plan = {
        **dict.fromkeys(("blocks.*.attention.query", "blocks.*.attention.key", "blocks.*.attention.value"), "colwise"),
        "blocks.*.attention.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
    }

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, tokens, places):
        x = self.words(tokens) * self.scale + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(seed: int = 7) -> Model:
    torch.manual_seed(seed)
    return Model()


def optimizer_of(model: nn.Module, groups: bool) -> torch.optim.Optimizer:
    """AdamW; with groups, without decay for vectors."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1 or not groups]
    plain = [parameter for parameter in model.parameters() if parameter.ndim == 1 and groups]
    parts = [{"params": decayed, "weight_decay": 0.1}, *([{"params": plain, "weight_decay": 0.0}] if plain else ())]
    return torch.optim.AdamW(parts, lr=RATE, eps=1e-5)


def rate(step: float) -> float:
    """The schedule: three steps of warm-up, then decay."""
    return min((step + 1) / 3, 1.0) * 0.95**step


@cache
def data(steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their places, and the labels: the next tokens, shifted before anybody cuts the sequences."""
    count = steps * WINDOW * SAMPLES
    text = torch.randint(0, WORDS, (count, LENGTH + 1), generator=torch.Generator().manual_seed(11))
    return text[:, :-1].contiguous(), torch.arange(LENGTH).expand(count, -1).contiguous(), text[:, 1:].contiguous()


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Trace:
    """What a training did: a row for each step, and the weights at the end."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    weights: dict[str, torch.Tensor]


def windows(steps: int) -> Iterator[list[torch.Tensor]]:
    """Yield the whole batch of each optimizer step."""
    for parts in zip(*(tensor.split(WINDOW * SAMPLES) for tensor in data(steps)), strict=True):
        yield list(parts)


@cache
def reference(steps: int, groups: bool, clip: str = "norm", seed: int = 7) -> Trace:
    """Train in one process, plainly: no Accelerator, no accumulation, the whole batch at once."""
    model = build(seed)
    optimizer = optimizer_of(model, groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses, norms, rates = [], [], []
    for tokens, places, labels in windows(steps):
        loss = loss_of(model(tokens, places), labels)
        loss.backward()
        if clip == "norm":
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        else:
            nn.utils.clip_grad_value_(model.parameters(), MAX_VALUE)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trace(losses, norms, rates, {name: value.clone() for name, value in model.state_dict().items()})
