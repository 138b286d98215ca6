"""One process of this machine, in place of the launcher or as its child."""

from collections.abc import Mapping

from accelerate.launch import runners
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.runners import Process

BY = "in place of the launcher"


def process(plan: LaunchPlan, environment: Mapping[str, str]) -> Process:
    """Return the process that `run` starts."""
    is_task = plan.num_processes > 1 and "RANK" in plan.extra  # a scheduler has started a launch for each process
    return Process(f"rank {plan.extra['RANK']}" if is_task else "the process", tuple(plan.command), environment)


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Run the process to its end, or become it."""
    runners.start(plan.command, environment, replace)
