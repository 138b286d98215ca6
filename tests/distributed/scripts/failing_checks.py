"""Checks of which one fails on the ranks that the command line names; the others wait for them in a collective.

failing_checks.py RANK [RANK ...]
"""

import sys

import torch

from accelerate import Accelerator
from accelerate.test_utils.scripts import checking
from accelerate.utils import gather

broken = set(map(int, sys.argv[1:]))


def meet(accelerator):
    gather(torch.ones(1))


def fail(accelerator):
    if accelerator.process_index in broken:
        raise ValueError(f"rank {accelerator.process_index} is broken")
    gather(torch.ones(1))


checking.run_checks(
    [checking.Check("first", meet), checking.Check("second", fail), checking.Check("third", meet)], Accelerator()
)
