"""Errors in collectives of a training loop reach every rank, and the processes can continue together afterwards."""

import os
from pathlib import Path

import torch
from expect import assert_all_close, assert_same_everywhere, raised
from harness import CPU, everywhere, fresh_accelerator, shared_folder
from models import WIDTH, gradients, inputs_of, mean_square, network, own_inputs, whole_batch_gradients
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.extensions.goodput import GOODPUT, goodput
from accelerate.utils import ProfileKwargs
from accelerate.utils.operations import DistributedOperationException


def check_uneven_batches_do_not_gather():
    accelerator = fresh_accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    world = accelerator.num_processes
    # The last rank's last batch is one short.
    loader = accelerator.prepare(DataLoader(torch.arange(4 * world - 1), batch_size=2))
    for _ in range(2):
        found, objects = [], []
        for number, batch in enumerate(loader):
            if number == 1:
                with raised(DistributedOperationException, "[1]", "[2]"):
                    accelerator.gather_for_metrics(batch)
            else:
                found += accelerator.gather_for_metrics(batch).tolist()
            objects += accelerator.gather_for_metrics(batch.tolist(), use_gather_object=True)
        assert found == list(range(2 * world))
        assert objects == list(range(4 * world - 1))


def check_windows_without_items_raise_everywhere():
    accelerator = fresh_accelerator(gradient_accumulation_steps=2)
    model, x = accelerator.prepare(network()), own_inputs(accelerator)
    with accelerator.accumulate(model, num_items=0):
        accelerator.backward(mean_square(model, x))
    for count, words in ((0, "0 on every rank"), (-2, "-2")):
        with raised(ValueError, words), accelerator.accumulate(model, num_items=count):
            pass
    assert not accelerator._window.inside
    accelerator.step = 0
    model.zero_grad()
    # A rank whose micro-batches are all empty takes part with weight zero.
    for _ in range(2):
        with accelerator.accumulate(model, num_items=len(x) if accelerator.is_main_process else 0):
            accelerator.backward(mean_square(model, x))
    assert_same_everywhere(gradients(model))
    assert_all_close(gradients(model), whole_batch_gradients(accelerator, [inputs_of(0)]))
    assert everywhere(accelerator.process_index) == list(range(accelerator.num_processes))


def check_a_file_that_one_rank_cannot_use_raises_everywhere():
    accelerator = fresh_accelerator()
    with shared_folder() as folder:
        traces, started = Path(folder, f"traces-{accelerator.process_index}"), goodput.started
        if accelerator.is_last_process:
            traces.touch()  # not a folder
            goodput.started = lambda process: Path(folder, "missing").read_text()
        try:
            with (
                raised((OSError, RuntimeError), "traces-1"),
                accelerator.profile(ProfileKwargs(output_trace_dir=traces)),
            ):
                pass
            os.environ[GOODPUT] = str(Path(folder, "goodput"))
            with raised((ValueError, RuntimeError), "the record of the run cannot be used. [Errno 2]"):
                fresh_accelerator()
        finally:
            goodput.started = started
            os.environ.pop(GOODPUT, None)
    fresh_accelerator()


def one_rank_fails():
    """The last rank raises while the others wait for its gradients; the launcher has to end them."""
    accelerator = Accelerator(cpu=CPU)
    model = accelerator.prepare(network())
    loader = accelerator.prepare(DataLoader(torch.ones(8, WIDTH), batch_size=1))
    for number, batch in enumerate(loader):
        if number == 1 and accelerator.is_last_process:
            raise OSError("the disk of the last rank is gone")
        accelerator.backward(mean_square(model, batch))
