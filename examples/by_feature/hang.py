"""A run that hangs: which rank is missing, at which line it is, and how the run ends.

Rank 1 takes a branch that the others do not take, so they wait for each other in different collectives. After
`ACCELERATE_HANG_REPORT_AFTER` seconds (10 by default) one report names the operation, the line and the likely cause on the error output;
`ACCELERATE_HANG_ABORT_AFTER` ends the run with status 79, so that a scheduler can start it again.

    ACCELERATE_HANG_REPORT_AFTER=2 ACCELERATE_HANG_ABORT_AFTER=4 accelerate launch --cpu --num_processes 2 examples/by_feature/hang.py  # status 79

Prints: rank 0 goes to gather, rank 1 to the barrier: see the report on the error output
Reports: Hang: rank
"""

import torch

from accelerate import Accelerator


def main() -> None:
    accelerator = Accelerator()
    accelerator.print("rank 0 goes to gather, rank 1 to the barrier: see the report on the error output")
    if accelerator.is_main_process:  # the fault: a collective for some ranks only
        accelerator.gather(torch.ones(2, device=accelerator.device))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
