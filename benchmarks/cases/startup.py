"""What starting costs: the import, `--help`, and launching an empty script on one process and on two."""

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
LAUNCH = [PYTHON, "-m", "accelerate.commands.accelerate_cli", "launch"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def seconds(command):
    start = time.perf_counter()
    subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True)
    return time.perf_counter() - start


def main():
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder, "empty.py")
        empty.write_text("")
        commands = {
            "import torch (s)": [PYTHON, "-c", "import torch"],
            "import torch and Accelerator (s)": [PYTHON, "-c", "import torch; from accelerate import Accelerator"],
            "accelerate launch --help (s)": [*LAUNCH, "--help"],
            "python empty.py (s)": [PYTHON, str(empty)],
            "launch empty.py, one process (s)": [*LAUNCH, "--cpu", "--num_processes", "1", str(empty)],
            "torchrun empty.py, two processes (s)": [
                *(PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
                str(empty),
            ],
            "launch empty.py, two processes (s)": [*LAUNCH, "--cpu", "--num_processes", "2", str(empty)],
        }
        for command in commands.values():
            seconds(command)  # once for the page cache
        figures = {name: [] for name in commands}
        for _ in range(REPEATS):
            for name, command in commands.items():
                figures[name].append(seconds(command))
    medians = {name: statistics.median(values) for name, values in figures.items()}
    medians["import beyond torch (s)"] = medians["import torch and Accelerator (s)"] - medians["import torch (s)"]
    medians["launch beyond python, one process (s)"] = (
        medians["launch empty.py, one process (s)"] - medians["python empty.py (s)"]
    )
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
