"""Which copy is in which dtype under DDP, FSDP1 and FSDP2, and what ranks hold."""

import os
from pathlib import Path


def test_the_guide_and_the_reports(launch):
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (tests, os.environ.get("PYTHONPATH"))))
    done = launch("check_precision.py", environment={"PYTHONPATH": path})
    assert done.stdout.count("ok ") == 5  # four checks, and all
