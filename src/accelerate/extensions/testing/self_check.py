"""The self check that `accelerate test` launches: it checks each part of a training, on any number of processes.

It prints a line for each check. It ends with the first check that fails on any rank, and names the check and the rank.
"""

import datetime
import logging
import os
import warnings

import torch
import torch.distributed as dist

from accelerate.accelerator import Accelerator
from accelerate.config.handlers import InitProcessGroupKwargs
from accelerate.config.options import BY_NAME
from accelerate.extensions.testing.checks import CHECKS, run_checks

# Settings of the configured program: the checks count their own steps, and have their own layers.
_OF_A_PROGRAM = ("gradient_accumulation_steps", "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap")
# A rank that waits for another one this long has found a fault of the setup: no check takes a tenth of it.
LIMIT_S = 120


def main() -> None:
    """Run all checks; a RuntimeError says which one failed on this rank."""
    for name in _OF_A_PROGRAM:
        os.environ.pop(BY_NAME[name].env, None)
    # One line for each check: warnings that checks cause on purpose are not shown.
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="This Accelerator changes the gradient accumulation")
    limit = InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=LIMIT_S))
    accelerator = Accelerator(kwargs_handlers=[limit])
    accelerator.print(_setup(accelerator), flush=True)
    run_checks(CHECKS, accelerator)
    accelerator.print("All checks passed.")
    accelerator.end_training()


def _setup(accelerator: Accelerator) -> str:
    count = accelerator.num_processes
    processes = "1 process" if count == 1 else f"{count} processes"
    how = f" ({dist.get_backend()})" if dist.is_available() and dist.is_initialized() else ""
    return (
        f"{processes} on {accelerator.device.type}{how}, {accelerator.distributed_type.value}, mixed precision "
        f"{accelerator.mixed_precision}, torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
