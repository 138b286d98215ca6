"""What starting costs: the import, `--help`, and launching a script on one process and on two, next to torchrun."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPEATS = 7
PYTHON = sys.executable
CLI = [PYTHON, "-m", "accelerate.commands.accelerate_cli"]
LAUNCH = [*CLI, "launch", "--cpu", "--num_processes"]
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
# A launcher that starts one process where two were requested has nobody to meet.
MEET = """
import os
import torch.distributed as dist
if os.environ.get("WORLD_SIZE") == "2":
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
"""


def seconds(command):
    start = time.perf_counter()
    subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True)
    return time.perf_counter() - start


def commands(folder):
    empty, meet = Path(folder, "empty.py"), Path(folder, "meet.py")
    empty.write_text("")
    meet.write_text(MEET)
    return {
        "import torch (s)": [PYTHON, "-c", "import torch"],
        "import torch and accelerate (s)": [PYTHON, "-c", "import torch, accelerate"],
        "import torch and Accelerator (s)": [PYTHON, "-c", "import torch; from accelerate import Accelerator"],
        "accelerate --help (s)": [*CLI, "--help"],
        "accelerate launch --help (s)": [*CLI, "launch", "--help"],
        "python empty.py (s)": [PYTHON, str(empty)],
        "launch empty.py, one process (s)": [*LAUNCH, "1", str(empty)],
        "torchrun empty.py, two processes (s)": [*TORCHRUN, str(empty)],
        "launch empty.py, two processes (s)": [*LAUNCH, "2", str(empty)],
        "torchrun, two processes that meet (s)": [*TORCHRUN, str(meet)],
        "launch, two processes that meet (s)": [*LAUNCH, "2", str(meet)],
    }


def differences(medians):
    """Return what is asked of a start: how much comes on top of what one would run without it."""
    pairs = {
        "import of accelerate beyond torch (s)": ("import torch and accelerate (s)", "import torch (s)"),
        "import beyond torch (s)": ("import torch and Accelerator (s)", "import torch (s)"),
        "launch beyond python, one process (s)": ("launch empty.py, one process (s)", "python empty.py (s)"),
        "launch beyond torchrun, two processes (s)": (
            "launch empty.py, two processes (s)",
            "torchrun empty.py, two processes (s)",
        ),
        "launch beyond torchrun, two processes that meet (s)": (
            "launch, two processes that meet (s)",
            "torchrun, two processes that meet (s)",
        ),
    }
    return {name: medians[first] - medians[second] for name, (first, second) in pairs.items()}


def main():
    with tempfile.TemporaryDirectory() as folder:
        measured = commands(folder)
        for command in measured.values():
            seconds(command)  # once for the page cache
        figures = {name: [] for name in measured}
        for _ in range(REPEATS):
            for name, command in measured.items():
                figures[name].append(seconds(command))
    medians = {name: statistics.median(values) for name, values in figures.items()}
    print(json.dumps({**medians, **differences(medians)}))


if __name__ == "__main__":
    main()
