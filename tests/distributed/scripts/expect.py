"""What the scripts of this folder require: equal values on all ranks, errors, warnings, and what is logged."""

import linecache
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from accelerate.utils import gather_object


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_all_close(found, expected, **tolerance):
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, reference, **(tolerance or {"rtol": 1e-5, "atol": 1e-6}))


def assert_same_everywhere(tensors, what: object = "") -> None:
    """Require that tensors are equal, bit for bit, on all ranks."""
    told = gather_object([[tensor.detach().cpu() for tensor in tensors]])
    for number, others in enumerate(told):
        assert not differing(told[0], others), (what, f"rank {number}", told[0], others)


def differs_between_ranks(tensor) -> bool:
    told = gather_object([tensor.detach().cpu()])
    return any(not torch.equal(told[0], other) for other in told)


def differing(mine, theirs, path: str = "") -> list[str]:
    """Return where two nested structures differ in any bit."""
    if isinstance(mine, torch.Tensor):
        return [] if mine.dtype == theirs.dtype and torch.equal(mine, theirs) else [path]
    if isinstance(mine, dict):
        odd = [f"{path}/{key}" for key in mine.keys() ^ theirs.keys()]
        both = [key for key in mine if key in theirs]
        return odd + [found for key in both for found in differing(mine[key], theirs[key], f"{path}/{key}")]
    if isinstance(mine, (list, tuple)):
        pairs = enumerate(zip(mine, theirs, strict=True))
        return [found for at, (one, two) in pairs for found in differing(one, two, f"{path}/{at}")]
    return [] if mine == theirs else [path]


@contextmanager
def logged(name: str, level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collect what a logger says."""
    told: list[str] = []
    logger, handler = logging.getLogger(name), logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    yield told
    logger.removeHandler(handler)
    logger.setLevel(before)


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
