"""One bad input per run; every rank must fail by itself, with a message that helps."""

import sys
import warnings

import torch

from accelerate import Accelerator


def gather_shapes(accelerator):
    accelerator.gather(torch.ones(2 + accelerator.process_index, 3, device=accelerator.device))


def gather_dimensions(accelerator):
    accelerator.gather(torch.ones((2, 3) if accelerator.is_main_process else (3,), device=accelerator.device))


def gather_dtypes(accelerator):
    accelerator.gather(torch.ones(2, dtype=torch.float32 if accelerator.is_main_process else torch.float64))


def no_process_group(accelerator):
    accelerator.state.destroy_process_group()
    accelerator.gather(torch.ones(1))


def prepare_nothing(accelerator):
    accelerator.prepare()


def prepare_string(accelerator):
    accelerator.prepare("model")


def unknown_precision(accelerator):
    Accelerator(cpu=True, mixed_precision="fp17")


def float16_weights(accelerator):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    scaled = Accelerator(cpu=True, mixed_precision="fp16")
    scaled.prepare(torch.nn.Linear(2, 2).half())


def loader_without_length(accelerator):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from torch.ones(4)

    len(accelerator.prepare(torch.utils.data.DataLoader(Stream(), batch_size=2)))


def loss_as_number(accelerator):
    accelerator.backward(1.0)


def main():
    case = sys.argv[1]
    accelerator = Accelerator(cpu=True)
    warnings.simplefilter("ignore")
    try:
        globals()[case](accelerator)
    except Exception as error:
        print(f"rank {accelerator.process_index}: {type(error).__name__}: {error}", flush=True)
        sys.exit(3)
    print(f"rank {accelerator.process_index}: no error", flush=True)


if __name__ == "__main__":
    main()
