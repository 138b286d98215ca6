"""What every runner offers.

A runner is a module of this folder with two functions:

- `processes(plan, environment)` returns what would be started, and starts nothing: `--dry-run` prints it.
- `run(plan, environment, replace)` starts it and waits for its end. A failure is raised; `failures.failure_of` turns it into an
  exit status and a line.

`environment` is what `accelerate.launch.env.worker_environment` made of the plan: all variables, those of the launcher included.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Process:
    """A process that a plan would start.

    Attributes:
        label: what it is to the run, such as "rank 3", "launcher on host b", "job".
        command: program and arguments.
        environment: all its variables.
    """

    label: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
