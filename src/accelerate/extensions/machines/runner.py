"""Processes of this machine as a part of several machines: one launcher on each, which find each other."""

import contextlib
from collections.abc import Mapping

from accelerate.extensions.machines import addresses
from accelerate.launch import runners
from accelerate.launch.errors import RunError
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.runners import Process, local

BY = "by torch's elastic launcher on each machine"


def process(plan: LaunchPlan, environment: Mapping[str, str]) -> Process:
    """Return what `run` starts on this machine."""
    with contextlib.suppress(RunError):  # the address may still be unknown on this machine; the run reports it
        address = addresses.local_address(plan.rendezvous.host, plan.rendezvous.port)
        environment = {**addresses.gloo_variables(address), **environment}
    return local.process(plan, environment)


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Run the processes of this machine, and watch over them and the other machines."""
    with local.in_one_go():
        from accelerate.extensions.machines.rendezvous import MachineAgent, MachineRendezvous
    asked = (plan.rendezvous, plan.local_processes, plan["max_restarts"])
    rendezvous = MachineRendezvous(*asked, lambda line: runners.print_info(plan, line))
    local.supervise(plan, environment, rendezvous, MachineAgent)
