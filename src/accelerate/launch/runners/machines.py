"""Several machines: this launcher starts the processes of its own and meets those of the others."""

import contextlib
import os
from collections.abc import Iterator, Mapping

from accelerate.launch import hardware, runners
from accelerate.launch.errors import RunError
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.runners import Process, local


def processes(plan: LaunchPlan, environment: Mapping[str, str]) -> list[Process]:
    """Return what `run` starts on this machine.

    Args:
        plan: what is started.
        environment: the variables that all processes share.
    """
    meet = {"MASTER_ADDR": plan.rendezvous.host, "MASTER_PORT": str(plan.rendezvous.port)}
    with contextlib.suppress(RunError):  # the address may not be known here yet; the run says so
        address = hardware.local_address(plan.rendezvous.host, plan.rendezvous.port)
        environment = {**hardware.gloo_variables(address), **environment}
    if plan.machines.rank is not None:
        return local.processes(plan, {**environment, **meet})
    # The ranks are not known before the machines have met.
    own = [{"LOCAL_RANK": str(local), **meet} for local in range(plan.local_processes)]
    return [Process(f"local rank {one['LOCAL_RANK']}", tuple(plan.command), {**environment, **one}) for one in own]


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Run the processes of this machine, and wait for those of the others.

    Args:
        plan: what is started.
        environment: the variables that all processes share.
        replace: has no effect; the launcher watches over its processes.

    Raises:
        LaunchError: the options about watching and logging cannot be used, or the machines do not agree.
        RunError: a machine did not come, or is lost.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a process failed.
        torch.distributed.elastic.multiprocessing.api.SignalException: a signal stopped them.
    """
    with local.in_one_go(), _terse_torch():
        from accelerate.launch.machine_rendezvous import MachineAgent, MachineRendezvous

    meet, settings = plan.rendezvous, plan.rendezvous.settings
    rendezvous = MachineRendezvous(
        meet.host,
        meet.port,
        plan.machines.count,
        plan.machines.rank,
        plan.local_processes,
        join_timeout=float(settings.get("join_timeout", settings.get("timeout", 600))),
        heartbeat_timeout=float(settings.get("heartbeat_timeout", 30)),
        report=lambda line: runners.tell(plan, line),
        restarts=plan["max_restarts"],
    )
    variables = {**hardware.gloo_variables(hardware.local_address(meet.host, meet.port)), **environment}
    local.supervise(plan, rendezvous, variables, MachineAgent)


@contextlib.contextmanager
def _terse_torch() -> Iterator[None]:
    """Import torch so that this launcher, and not its processes, keeps the warnings of torch's C++ code to itself.

    A store whose other side is gone writes a page of addresses of its functions. The launcher says in a line what it means.
    """
    name = "TORCH_CPP_LOG_LEVEL"  # read once, when torch is imported
    if name in os.environ:
        yield
        return
    os.environ[name] = "ERROR"
    try:
        yield
    finally:
        os.environ.pop(name, None)
