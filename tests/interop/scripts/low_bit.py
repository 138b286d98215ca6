"""torchao's 8-bit AdamW on shards: it trains as on one process, and what is saved of it continues on any number of ranks.

accelerate launch --cpu --num_processes 2 low_bit.py FOLDER train | load NAME
"""

import functools
import json
import os
import sys

import torch
from torch import nn
from torchao.optim import AdamW8bit

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin

# torchao compiles its step: by torch's default that takes a minute here.
torch.compile = functools.partial(torch.compile, backend="aot_eager")
STEPS, MORE = 4, 3
# Nearest codes of a block are so much of its largest value away at most: half the widest gap of torchao's map, signed and unsigned.
SIGNED, UNSIGNED = 0.0072, 0.0036
# Values that are rounded in other blocks, or not at all, change the losses by less than this, relative to the first one.
CLOSE = 0.02


class Net(nn.Module):
    """Parameters whose shards are complete blocks of 256 values on two ranks (`even`), on some of three (`uneven`), on none (`odd`)."""

    def __init__(self):
        super().__init__()
        self.even, self.uneven, self.odd = nn.Linear(64, 256), nn.Linear(32, 388), nn.Linear(388, 64)
        self.inward = nn.Linear(256, 32)

    def forward(self, x):
        for layer in (self.even, self.inward, self.uneven):
            x = torch.relu(layer(x))
        return self.odd(x)


def loss_of(model, step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 64, generator=generator)
    return (model(x) - x.roll(1, dims=1)).square().mean()


def prepared(layout="SHARDED_STATE_DICT", optimizer_type=AdamW8bit):
    GradientState._reset_state()
    AcceleratorState._reset_state()
    sharded = int(os.environ.get("WORLD_SIZE", "1")) > 1
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=layout) if sharded else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = Net()
    return accelerator, *accelerator.prepare(model, optimizer_type(model.parameters(), lr=1e-2))


def trained(accelerator, model, optimizer, steps):
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def whole_values(model, optimizer):
    """Return the optimizer's values by parameter, whole, on every rank, and which of them this rank keeps in 8 bits."""
    found, kept = {}, set()
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            local = value.to_local() if hasattr(value, "to_local") else value
            if hasattr(local, "codes"):
                kept.add(f"{name}.{key}")
                local = local.dequantize()
            if hasattr(value, "to_local"):
                mesh, placements = value.device_mesh, value.placements
                spread = type(value).from_local(
                    local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
                )
                local = spread.full_tensor()
            found[f"{name}.{key}"] = local.clone()
    return found, kept


def trains_as_alone(folder):
    """Train, save in both layouts, and continue exactly, over what there is and again."""
    accelerator, model, optimizer = prepared()
    losses = trained(accelerator, model, optimizer, range(STEPS))
    torch.manual_seed(0)
    alone = Net()
    one = AdamW8bit(alone.parameters(), lr=1e-2)
    for step, loss in enumerate(losses):
        mine = loss_of(alone, step)
        mine.backward()
        one.step()
        one.zero_grad()
        assert abs(mine.item() - loss) <= CLOSE * losses[0], (step, mine.item(), loss)
    values, kept = whole_values(model, optimizer)
    assert {"even.weight.exp_avg", "even.weight.exp_avg_sq"} <= kept and "odd.weight.exp_avg" not in kept
    folders = {layout: f"{folder}/{layout}" for layout in ("SHARDED_STATE_DICT", "FULL_STATE_DICT")}
    for layout, path in folders.items():
        accelerator.state.fsdp_plugin.set_state_dict_type(layout)
        accelerator.save_state(path)
    following = trained(accelerator, model, optimizer, range(STEPS, STEPS + MORE))
    if accelerator.is_main_process:
        torch.save({"values": values, "losses": following, "first": losses[0]}, f"{folder}/expected.pt")
    for layout, path in folders.items():
        for again in ((accelerator, model, optimizer), prepared(layout)):
            again[0].load_state(path)
            same, same_kept = whole_values(*again[1:])
            assert same_kept == kept and all(torch.equal(same[name], values[name]) for name in values)
            assert trained(*again, range(STEPS, STEPS + MORE)) == following


def goes_on(folder, name):
    expected = torch.load(f"{folder}/expected.pt")
    accelerator, model, optimizer = prepared()
    accelerator.load_state(f"{folder}/{name}")
    found, _ = whole_values(model, optimizer)
    # Blocks of the even ones are the same wherever they are, and small ones are never rounded.
    rounded = (
        "uneven.weight",
        "odd.weight",
        "inward.weight",
        *(() if name.endswith("STATE_DICT") else ("even.weight",)),
    )
    bounds, times = {}, 1 if name.endswith("STATE_DICT") else 2  # so often they were rounded
    for key, value in expected["values"].items():
        bound = (UNSIGNED if key.endswith("_sq") else SIGNED) if key.startswith(rounded) and value.dim() else 0.0
        bounds[key] = times * bound * float(value.abs().max())
        assert float((found[key] - value).abs().max()) <= bounds[key], (key, bounds[key])
    accelerator.save_state(f"{folder}/by_{accelerator.num_processes}")
    losses = trained(accelerator, model, optimizer, range(STEPS, STEPS + MORE))
    for mine, theirs in zip(losses, expected["losses"], strict=True):
        assert abs(mine - theirs) <= CLOSE * expected["first"], (losses, expected["losses"])
    # An optimizer of 32 bits continues with the values, and one of 8 bits with those of 32.
    accelerator, model, optimizer = prepared(optimizer_type=torch.optim.AdamW)
    accelerator.load_state(f"{folder}/{name}")
    plain, none = whole_values(model, optimizer)
    assert not none
    for key, value in expected["values"].items():
        assert float((plain[key] - value).abs().max()) <= bounds[key], key


def main():
    folder, what, *names = sys.argv[1:]
    if what == "train":
        trains_as_alone(folder)
    for name in names:
        goes_on(folder, name)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"passed": True}))


if __name__ == "__main__":
    main()
