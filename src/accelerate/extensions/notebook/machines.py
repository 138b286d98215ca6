"""Functions on several machines: the agents of both extensions in one."""

from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup

from accelerate.extensions.machines.rendezvous import FailedElsewhere as FailedElsewhere
from accelerate.extensions.machines.rendezvous import MachineAgent
from accelerate.extensions.machines.rendezvous import MachineRendezvous as MachineRendezvous
from accelerate.extensions.notebook.processes import FunctionAgent


class MachineFunctionAgent(MachineAgent, FunctionAgent):
    """The agent of functions on one of several machines."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with worker_group.spec.rdzv_handler.heartbeat.busy:
            return super()._start_workers(worker_group)
