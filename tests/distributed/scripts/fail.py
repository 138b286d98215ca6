"""Bad inputs, one after the other; every rank fails by itself, with a message that helps."""

import sys
import warnings

import torch

from accelerate import Accelerator
from accelerate.state import AcceleratorState


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from torch.ones(4)


def half_in_fp16(accelerator):
    AcceleratorState._reset_state()
    Accelerator(cpu=True, mixed_precision="fp16").prepare(torch.nn.Linear(2, 2).half())


def without_process_group(accelerator):
    accelerator.state.destroy_process_group()
    accelerator.gather(torch.ones(1))


CASES = {
    "prepare_nothing": lambda a: a.prepare(),
    "prepare_string": lambda a: a.prepare("model"),
    "loader_without_length": lambda a: len(a.prepare(torch.utils.data.DataLoader(Stream(), batch_size=2))),
    "loss_as_number": lambda a: a.backward(1.0),
    "unknown_precision": lambda a: Accelerator(cpu=True, mixed_precision="fp17"),
    "float16_weights": half_in_fp16,
    "no_process_group": without_process_group,
}


def main():
    accelerator = Accelerator(cpu=True)
    warnings.simplefilter("ignore")
    for name, case in CASES.items():
        try:
            case(accelerator)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".replace("\n", " ")
            print(f"rank {accelerator.process_index}: {name}: {text}", flush=True)
    sys.exit(3)


if __name__ == "__main__":
    main()
