"""FSDPv2 of torch_xla over the devices of one process (SPMD), as the Trainer's `xla_fsdp_v2` uses it; and who follows what moves.

Argument: a folder for checkpoints.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch_xla.distributed.spmd as spmd
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

from distributed.conformance import model as zoo
from distributed.conformance.training import tensors_apart
from distributed.scripts.harness import fresh_accelerator, say

STEPS, TOLERANCE = 4, 1e-5


class Sharded:
    """A training whose model and batches are spread over the devices of a mesh."""

    def __init__(self, seed=7):
        mesh = spmd.Mesh(np.arange(2), (2, 1), ("fsdp", "tensor"))
        self.accelerator = fresh_accelerator(gradient_accumulation_steps=zoo.WINDOW)
        plain = zoo.build(seed).to(self.accelerator.device)
        plain.head.weight = plain.words.weight  # torch_xla has put two in the place of one
        model = SpmdFullyShardedDataParallel(plain, mesh=mesh)
        optimizer = zoo.optimizer_of(model, True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, zoo.rate)
        loader = DataLoader(TensorDataset(*zoo.data(STEPS)), batch_size=zoo.SAMPLES)
        self.plain = plain
        self.parts = self.accelerator.prepare(model, optimizer, loader, schedule)
        self.parts[2]._parallel_loader_kwargs["input_sharding"] = spmd.ShardingSpec(mesh, ("fsdp", None))

    def train(self, save=None):
        """Train for an epoch, or what is left of it; save after two steps, if a folder is given. Return losses and norms."""
        accelerator, (model, optimizer, loader, schedule) = self.accelerator, self.parts
        losses, norms, window = [], [], []
        for tokens, places, labels in loader:
            with accelerator.accumulate(model):
                loss = zoo.loss_of(model(tokens, places), labels)
                accelerator.backward(loss)
                window.append(loss.item())
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), zoo.MAX_NORM)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                losses.append(sum(window) / len(window))
                window.clear()
                if save and len(losses) == 2:
                    accelerator.save_state(save)
        return losses, norms

    def weights(self):
        return {name: value.cpu() for name, value in self.accelerator.get_state_dict(self.parts[0]).items()}


def check_sharded(folder):
    expected = zoo.reference(STEPS, True)
    run = Sharded()
    losses, norms = run.train(save=f"{folder}/checkpoint")
    for have, wanted in ((losses, expected.losses), (norms, expected.norms)):
        assert len(have) == len(wanted) and np.allclose(have, wanted, rtol=0, atol=TOLERANCE), (have, wanted)
    assert not (apart := tensors_apart(run.weights(), expected.weights, TOLERANCE)), apart
    spread = torch_xla_sharding(run.parts[0])
    assert any("devices=[2,1]" in text for text in spread), spread
    assert run.accelerator.unwrap_model(run.parts[0]) is run.plain
    run.accelerator.save_model(run.parts[0], f"{folder}/model")
    missing, extra = zoo.build(3).load_state_dict(load_file(f"{folder}/model/model.safetensors"), strict=False)
    assert not extra and set(missing) <= {"head.weight", "words.weight"}, (missing, extra)
    other = Sharded(seed=99)
    other.accelerator.load_state(f"{folder}/checkpoint")
    assert other.train() == (losses[2:], norms[2:])
    assert not (apart := tensors_apart(other.weights(), run.weights(), 0.0)), apart


def torch_xla_sharding(model):
    import torch_xla

    return [torch_xla._XLAC._get_xla_sharding_spec(parameter) for parameter in model.parameters()]


def check_who_follows(folder):
    """An optimizer that is prepared before its model steps on what took the parameters' place, and a batch is gathered."""
    accelerator = fresh_accelerator()
    model = torch.nn.Linear(2, 1)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    model = accelerator.prepare(model)
    before = model.weight.cpu().clone()
    accelerator.backward(model(torch.ones(1, 2, device=accelerator.device)).sum())
    optimizer.step()
    assert torch.equal(model.weight.cpu(), before - 0.5), (before, model.weight)
    rows = torch.arange(3, device=accelerator.device)
    assert accelerator.gather(rows).tolist() == [0, 1, 2] and accelerator.reduce(rows, "sum").tolist() == [0, 1, 2]
    assert accelerator.device.type == "xla"


def main(folder):
    for check in (check_who_follows, check_sharded):
        check(folder)
        say(f"ok {check.__name__}")


if __name__ == "__main__":
    main(*sys.argv[1:])
