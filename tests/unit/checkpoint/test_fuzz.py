"""Damaged checkpoints: each one is refused by an error that names the file, runs nothing, and changes nothing."""

import dataclasses
import logging
import os
import pickle
import random
import shutil
import signal
import sys
import traceback
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from unit.checkpoint import damage

from accelerate import Accelerator
from accelerate.checkpoint import reading
from accelerate.checkpoint.manifest import DamagedCheckpoint
from accelerate.data import resume

SEED = int(os.environ.get("FUZZ_SEED", "0"))
# An attempt takes some hundredths of a second; one that takes this long hangs, or reads something endless.
LIMIT_S = 20
REFUSALS = (DamagedCheckpoint, ValueError, RuntimeError, OSError, pickle.UnpicklingError)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="makes pipes and links")


class Counter_:
    """A registered object."""
