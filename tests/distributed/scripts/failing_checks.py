"""Checks of which one fails on the ranks that the command line names; the others wait for them in a collective.

failing_checks.py RANK [RANK ...]
"""

import sys

import torch

from accelerate import Accelerator
from accelerate.extensions.testing.checks import run_checks
from accelerate.utils import gather

broken = set(map(int, sys.argv[1:]))


def meet(accelerator):
    gather(torch.ones(1))


def fail(accelerator):
    if accelerator.process_index in broken:
        raise ValueError(f"rank {accelerator.process_index} is broken")
    gather(torch.ones(1))


run_checks({"first": meet, "second": fail, "third": meet}, Accelerator())
