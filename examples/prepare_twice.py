"""The cost of one `prepare` too many, here and under upstream's package.

    accelerate launch --cpu --num_processes 2 examples/prepare_twice.py
    accelerate launch --cpu --num_processes 2 examples/prepare_twice.py --double-prepare

A model is prepared once; with ``--double-prepare`` it is then handed in again in the three ways that happen in practice:
as the prepared object, as the module inside it, and as what ``unwrap_model`` returns. The program then saves and loads
one checkpoint and prints what it cost. It uses only the public interface (and ``_models``, the registry that the fault is
about), so it runs under upstream's package too: ``torchrun --nproc_per_node 2 examples/prepare_twice.py --double-prepare``.
"""

import argparse
import shutil
import tempfile
import warnings

import torch
from torch.nn.parallel import DistributedDataParallel

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object


class CallCounter:
    """Stand in for one module's ``state_dict`` and count how often it is requested."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.calls = 0
        self._original = module.state_dict
        module.state_dict = self

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self._original(*args, **kwargs)

    def take(self) -> int:
        """Return the number of calls so far and start again from zero."""
        seen, self.calls = self.calls, 0
        return seen


def depth(model: torch.nn.Module) -> int:
    """Return how many DistributedDataParallel wrappers lie around the innermost module."""
    layers = 0
    while isinstance(model, DistributedDataParallel):
        layers, model = layers + 1, model.module
    return layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--double-prepare", "--double_prepare", action="store_true", help="make the mistake")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    counter = CallCounter(network)
    model, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters()))

    answers = [model]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        if options.double_prepare:
            answers.append(accelerator.prepare(model))
            answers.append(accelerator.prepare(network))
            answers.append(accelerator.prepare(accelerator.unwrap_model(model)))
    warned = [w for w in heard if issubclass(w.category, UserWarning)]

    counter.take()
    # Rank 0 chooses the folder for all ranks: a temporary name differs from process to process.
    folder = broadcast_object_list(
        [tempfile.mkdtemp(prefix="prepare-twice-") if accelerator.is_main_process else None]
    )[0]
    accelerator.save_state(folder)
    saving = counter.take()
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    loading = counter.take()
    accelerator.wait_for_everyone()

    saving, loading = gather_object([saving]), gather_object([loading])
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        first_key = next(iter(model.state_dict()))
        print(f"prepare calls on the model   : {len(answers)}")
        print(f"warnings                     : {len(warned)}")
        print(f"models in the registry       : {len(accelerator._models)}")
        print(f"distinct wrappers            : {len({id(answer) for answer in answers})}")
        print(f"wrappers around the module   : {max(depth(answer) for answer in answers)}")
        print(f"key prefix                   : {first_key.removesuffix('0.weight')}")
        print(f"state_dict calls, save_state : {saving} (one number a rank)")
        print(f"state_dict calls, load_state : {loading} (one number a rank)")
        for warning in warned[:1]:
            print(f"the warning, at {warning.filename.rpartition('/')[2]}:{warning.lineno}: {warning.message}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
