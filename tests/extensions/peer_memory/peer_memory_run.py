"""A run with copies in memory that loses a rank, or a machine, and must end like one that lost nothing.

    peer_memory_run.py FOLDER ddp|fsdp2 rank|machine|damage|early

The last rank dies once, after the step KILL_AT: only itself, or with its launcher. With "damage", rank 0 damages the copies before. With "early", rank 0
dies instead, when the second copy is written and not published. The ranks of the last start resume, train to the end, train again without a
failure, and compare all losses and weights.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.extensions.peer_memory.copies import PeerMemory
from accelerate.extensions.peer_memory.options import PeerMemoryKwargs
from accelerate.runtime.failure import LAUNCHER
from accelerate.utils import FullyShardedDataParallelPlugin, ProjectConfiguration, set_seed

EVERY, KILL_AT, SAVED_AT, EPOCHS = 3, 8, 2, 2


class Calls:
    """A registered object: counts."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def accelerator_of(strategy, folder=None):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if strategy == "fsdp2" else None
    project = ProjectConfiguration(folder and str(folder), automatic_checkpoint_naming=folder is not None)
    handlers = [PeerMemoryKwargs(every=EVERY)] if folder else []
    return Accelerator(cpu=True, fsdp_plugin=plugin, project_config=project, kwargs_handlers=handlers)


def train(accelerator, folder=None, fault=""):
    """Train to the end; return what the run resumed from, the losses by step, and the weights at the end."""
    set_seed(3)
    data = TensorDataset(torch.randn(40, 8), torch.randn(40, 1))
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
    loader = DataLoader(data, 4, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    calls = Calls()
    accelerator.register_for_checkpointing(calls)
    resumed = accelerator.resume_from_memory() if folder else None
    if fault == "early" and not resumed:
        die_early(accelerator)
    losses = {}
    step = resumed.steps if resumed else 0
    while calls.count < EPOCHS * 5:
        for inputs, targets in loader:
            loss = (model(inputs) - targets).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step, calls.count = step + 1, calls.count + 1
            losses[step] = loss.item()
            if folder and step == SAVED_AT and not resumed:
                accelerator.save_state()
            if folder and step == KILL_AT and not (folder / "killed").exists() and fault != "early":
                die(accelerator, folder, fault)
    weights = accelerator.get_state_dict(model)
    return resumed, losses, {name: value.clone() for name, value in weights.items()}


def die_early(accelerator):
    memory = next(iter(accelerator.extensions.of_kind(PeerMemory)), None)
    publish = memory._publish

    def publish_once(*arguments):
        if os.listdir(memory.folder.local_copies) == [os.path.basename(arguments[0].folder)]:
            return publish(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    memory._publish = publish_once


def die(accelerator, folder, fault):
    memory = next(iter(accelerator.extensions.of_kind(PeerMemory)), None)
    assert memory.wait() is None
    accelerator.wait_for_everyone()
    if accelerator.process_index == 0 and fault == "damage":
        for path in Path(memory.folder.local_copies).glob("*/random_states_1.pkl"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    if accelerator.process_index == 0:
        (folder / "size").write_text(str(len(os.listdir(memory.folder.local_copies))))
    accelerator.wait_for_everyone()
    if accelerator.process_index == accelerator.num_processes - 1:
        (folder / "killed").touch()
        (folder / "memory").write_text(memory.folder.path)
        if fault == "machine":
            os.kill(int(os.environ[LAUNCHER]), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.wait_for_everyone()  # which fails


def main():
    folder, strategy, fault = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    accelerator = accelerator_of(strategy, folder)
    resumed, losses, weights = train(accelerator, folder, fault)
    _, expected, expected_weights = train(accelerator_of(strategy))
    assert losses == {step: loss for step, loss in expected.items() if step in losses}, (losses, expected)
    assert max(losses) == max(expected) >= EPOCHS * 5 and min(losses) == resumed.steps + 1
    assert all(torch.equal(value, expected_weights[name]) for name, value in weights.items())
    if accelerator.is_main_process:
        print(
            json.dumps(
                {
                    "source": resumed.source,
                    "steps": resumed.steps,
                    "iteration": accelerator.project_configuration.iteration,
                }
            )
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
