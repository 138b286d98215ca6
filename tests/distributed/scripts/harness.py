"""What the scripts of this folder share: fresh Accelerators, values of all ranks, expected warnings, a runner."""

import linecache
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import broadcast_object_list, gather_object

CPU = not torch.cuda.is_available()


def fresh_accelerator(**options) -> Accelerator:
    """Build an Accelerator that shares nothing but the process group with those before it."""
    GradientState._reset_state()
    AcceleratorState._reset_state()
    return Accelerator(cpu=CPU, **options)


def everywhere(value) -> list:
    """Return the value that each rank has, in the order of the ranks."""
    return gather_object([value])


def assert_same_everywhere(tensors, what: str = "") -> None:
    """Require that tensors are equal, bit for bit, on all ranks."""
    told = everywhere([tensor.detach().cpu() for tensor in tensors])
    for rank, others in enumerate(told):
        for position, (mine, theirs) in enumerate(zip(told[0], others, strict=True)):
            assert torch.equal(mine, theirs), (what, f"tensor {position} of rank {rank}", mine, theirs)


def differs_between_ranks(tensor) -> bool:
    """Say whether a tensor has another value on some rank."""
    told = everywhere(tensor.detach().cpu())
    return any(not torch.equal(told[0], other) for other in told)


@contextmanager
def warned(count: int, *fragments: str, at: str = "", category: type[Warning] = UserWarning) -> Iterator:
    """Require so many warnings of a category that contain each fragment and point at a line with the text `at`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    ours = [item for item in caught if item.category is category and all(f in str(item.message) for f in fragments)]
    assert len(ours) == count, (count, fragments, [f"{item.filename}: {item.message}" for item in caught])
    for item in ours:
        line = linecache.getline(item.filename, item.lineno)
        assert at in line, (item.filename, item.lineno, line, str(item.message))


@contextmanager
def raised(kind: type[BaseException] | tuple, *fragments: str) -> Iterator:
    """Require an error on this rank whose message contains each fragment."""
    try:
        yield
    except kind as error:
        for fragment in fragments:
            assert fragment in str(error), (fragment, str(error))
    else:
        raise AssertionError(f"expected {kind}, nothing was raised")


@contextmanager
def shared_folder() -> Iterator[str]:
    """Give all ranks one temporary folder."""
    state = PartialState()
    names = broadcast_object_list([tempfile.mkdtemp() if state.is_main_process else None])
    # After an error the ranks do not meet again, so nobody waits then and the folder stays.
    yield names[0]
    state.wait_for_everyone()
    if state.is_main_process:
        shutil.rmtree(names[0], ignore_errors=True)


def run(*checks: Callable[[], None]) -> None:
    """Run checks in their order on every rank, all of them or those named on the command line."""
    chosen = [check for check in checks if not sys.argv[1:] or check.__name__ in sys.argv[1:]]
    for check in chosen:
        torch.manual_seed(0)
        check()
        if PartialState().is_main_process:
            print(f"ok {check.__name__}", flush=True)
    if PartialState().is_main_process:
        print("ok all", flush=True)
