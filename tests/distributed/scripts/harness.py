"""What the scripts of this folder share: fresh Accelerators, data, a step of training, values of all ranks."""

import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils.data import IterableDataset

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import broadcast_object_list, gather_object

# Which device the tests are about, if not the usual one: "hosted", of torch's own kind, or "xla".
DEVICE = os.environ.get("TEST_DEVICE", "")
if DEVICE == "hosted":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    importlib.import_module("hosted").install()
if DEVICE == "xla" and os.environ.get("CPU_NUM_DEVICES"):
    importlib.import_module("torch_xla.runtime").use_spmd()
CPU = not (DEVICE or torch.cuda.is_available())
# Ranks that share a GPU meet over gloo, which has to be asked for.
ASKED = {"backend": os.environ["BACKEND"]} if "BACKEND" in os.environ else {}

BUILT: list[Accelerator] = []  # by `fresh_engine`


class Stream(IterableDataset):
    """The rows that a function returns, or those of a list; its length is not known."""

    def __init__(self, rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator:
        return iter(self.rows() if callable(self.rows) else self.rows)


class Kept:
    """An object for `register_for_checkpointing`; `saving` and `loading` are errors that it raises instead."""

    saving: Exception | None = None
    loading: Exception | None = None

    def __init__(self, **state) -> None:
        self.state = state

    def state_dict(self) -> dict:
        if self.saving:
            raise self.saving
        return dict(self.state)

    def load_state_dict(self, state: dict) -> None:
        if self.loading:
            raise self.loading
        self.state = dict(state)


def fresh_accelerator(**options) -> Accelerator:
    """Build an Accelerator that shares nothing but the process group with those before it."""
    GradientState._reset_state()
    AcceleratorState._reset_state()
    return Accelerator(cpu=CPU, **options)


def fresh_engine(**options) -> Accelerator:
    """Build an Accelerator as `fresh_accelerator` does, after the one that this function built before is freed."""
    while BUILT:
        BUILT.pop().free_memory()
    BUILT.append(fresh_accelerator(**options))
    return BUILT[-1]


def rank() -> int:
    return PartialState().process_index


def world() -> int:
    return PartialState().num_processes


def learn(accelerator: Accelerator, loss: torch.Tensor, *steppers) -> float:
    """Take a step: the backward pass, optimizers and schedulers; return the loss of this rank."""
    accelerator.backward(loss)
    for stepper in steppers:
        stepper.step()
        if hasattr(stepper, "zero_grad"):
            stepper.zero_grad()
    return loss.item()


def everywhere(value) -> list:
    return gather_object([value])


@contextmanager
def shared_folder() -> Iterator[str]:
    state = PartialState()
    names = broadcast_object_list([tempfile.mkdtemp() if state.is_main_process else None])
    # After an error the ranks do not meet again, so no rank waits then and the folder stays.
    yield names[0]
    state.wait_for_everyone()
    if state.is_main_process:
        shutil.rmtree(names[0], ignore_errors=True)


def say(text: str) -> None:
    """Print on the first process, without a process group."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)
