"""Small models, inputs for each rank, the gradients that plain torch computes on all of them at once; tiny language models."""

import torch
from torch import nn

WIDTH = 6


def network(seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))


def prepared(accelerator, lr=0.1):
    model = network()
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))


def inputs_of(rank, count=2, seed=0):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(100 * seed + rank))


def own_inputs(accelerator, seed=0):
    return inputs_of(accelerator.process_index, seed=seed).to(accelerator.device)


def mean_square(model, x):
    return model(x).pow(2).mean()


def whole_batch_gradients(accelerator, pieces):
    """Plain torch: the mean loss over pieces of equal size, in one process."""
    model = network().to(accelerator.device)
    mean_square(model, torch.cat(pieces).to(accelerator.device)).backward()
    return [parameter.grad for parameter in model.parameters()]


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


class Block(nn.Module):
    def __init__(self, width, hidden, biased=True):
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=biased)
        self.up, self.down = nn.Linear(width, hidden, bias=biased), nn.Linear(hidden, width, bias=biased)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, inputs, width, outputs, hidden, biased=True):
        super().__init__()
        self.first, self.last = nn.Linear(inputs, width, bias=biased), nn.Linear(width, outputs, bias=biased)
        self.blocks = nn.ModuleList(Block(width, each, biased) for each in hidden)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def tiny(family, **changes):
    import transformers

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 32}
    sizes |= {"bos_token_id": 0, "eos_token_id": 1}
    config = getattr(transformers, f"{family}Config")(**{**sizes, "attn_implementation": "eager", **changes})
    torch.manual_seed(5)
    return getattr(transformers, f"{family}ForCausalLM")(config)
