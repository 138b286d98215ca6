"""Base classes of test cases, and a comparison of tensors over ranks."""

import pathlib
import shutil
import tempfile
import unittest
from typing import Any, ClassVar
from unittest import mock

import torch

from accelerate.state import AcceleratorState, GradientState
from accelerate.utils.operations import gather


class AccelerateTestCase(unittest.TestCase):
    """A test case that leaves no shared state behind."""

    __module__ = "accelerate.test_utils.testing"  # the path in pickles

    def tearDown(self) -> None:
        """Forget the state of the Accelerators that the test built."""
        super().tearDown()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


class TempDirTestCase(unittest.TestCase):
    """A test case with a directory of its own, `self.tmpdir`.

    Attributes:
        clear_on_setup: empty the directory before each test.
    """

    __module__ = "accelerate.test_utils.testing"  # the path in pickles

    clear_on_setup: bool = True
    tmpdir: ClassVar[pathlib.Path]

    @classmethod
    def setUpClass(cls) -> None:
        """Make the directory."""
        super().setUpClass()
        cls.tmpdir = pathlib.Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        """Remove the directory."""
        shutil.rmtree(cls.tmpdir, ignore_errors=True)
        super().tearDownClass()

    def setUp(self) -> None:
        """Empty the directory."""
        super().setUp()
        if self.clear_on_setup:
            for path in self.tmpdir.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()


class MockingTestCase(unittest.TestCase):
    """A test case that replaces things for the length of a test."""

    __module__ = "accelerate.test_utils.testing"  # the path in pickles

    def add_mocks(self, mocks: mock.Mock | list[Any]) -> None:
        """Start patches, and stop them when the test ends.

        Args:
            mocks: a patch of `unittest.mock`, or several.
        """
        self.mocks = list(mocks) if isinstance(mocks, (list, tuple)) else [mocks]
        for patch in self.mocks:
            patch.start()
            self.addCleanup(patch.stop)


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is the same on all ranks. Every rank calls it.

    Args:
        tensor: the tensor of this rank, of the same shape everywhere.
    """
    from accelerate.state import PartialState

    mine = tensor[None].clone().to(PartialState().device)
    return all(torch.equal(theirs, mine[0]) for theirs in gather(mine))
