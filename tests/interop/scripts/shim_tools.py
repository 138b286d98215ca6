"""What the programs about transformers_patch share: a tiny regression, arguments for every release, and questions."""

import gc
import os
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
from tiny import losses, report
from transformers import Trainer

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
PHRASES = ("is not applied", "reset the accelerator state")
COMMON = {"per_device_train_batch_size": 4, "max_steps": 4, "learning_rate": 1e-2, "logging_steps": 1, "seed": 3}
COMMON |= {"eval_strategy": "no", "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        prediction = self.linear(x).squeeze(-1)
        return {"loss": ((prediction - labels) ** 2).mean(), "logits": prediction}


def rows(count=32):
    points = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return [{"x": point, "labels": point.sum()} for point in points]


def build(cls, folder, **changes):
    return cls(output_dir=folder, **{**COMMON, **changes})


def train(arguments, model=None):
    trainer = Trainer(model or Line(), arguments, train_dataset=rows(), eval_dataset=rows(13))
    trainer.train()
    return trainer, losses(trainer)


def forget():
    """Forget the state, and the precision that arguments of transformers 4 leave in the environment."""
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    AcceleratorState._reset_state(reset_partial_state=True)


def start(**options):
    forget()
    return Accelerator(cpu=True, **options)


def works(accelerator):
    """Make sure on every rank that an Accelerator knows its world, gathers and waits."""
    assert accelerator.num_processes == WORLD
    assert accelerator.state.distributed_type == ("MULTI_CPU" if WORLD > 1 else "NO")
    assert accelerator.device.type == "cpu"
    assert accelerator.gather(torch.tensor([accelerator.process_index])).tolist() == list(range(WORLD))
    accelerator.wait_for_everyone()


def shared(accelerator, arguments, trainer=None):
    """Return whether all of them look at one state, not at equal ones."""
    process = [PartialState(), arguments.distributed_state]
    full = [AcceleratorState(), accelerator.state] if AcceleratorState._shared_state else [accelerator.state, None]
    if trainer is not None:
        full.append(trainer.accelerator.state)
    return all(getattr(s, "__dict__", None) is kind[0].__dict__ for kind in (process, full) for s in kind)


@contextmanager
def messages():
    """Collect the texts of the warnings that the patch issues in a block."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    ours = [warning for warning in caught if any(phrase in str(warning.message) for phrase in PHRASES)]
    texts.extend(str(warning.message) for warning in ours)
    # Each points at the line that builds the arguments, not into a library.
    assert all(Path(warning.filename).name == "shim_tools.py" for warning in ours), [str(warning) for warning in ours]


def finish(**figures):
    """Print the figures and leave the process group together, with every wrapped model gone.

    Upstream leaves the group to the end of the process, where gloo's threads sometimes abort it, patched or not.
    """
    report(**figures)
    if torch.distributed.is_initialized():
        gc.unfreeze()
        gc.collect()
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
