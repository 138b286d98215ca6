"""Where the processes of one machine meet. Importing this module imports torch."""

import datetime
import os
import sys

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

# The name under which torch finds the rendezvous below.
ONE_MACHINE = "accelerate_one_machine"
HOST = "127.0.0.1"


class OneMachineRendezvous(RendezvousHandler):
    """A meeting point for the processes of one machine: a store at a port that the system chooses.

    The store listens before anybody is told its port, so no other job can take the port in between; and there is nobody
    to agree with, which makes it a quarter of a second quicker than torch's own `c10d` rendezvous.

    Args:
        parameters: what the elastic launcher was configured with; the port of the endpoint may be 0.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._port = int(parameters.endpoint.rpartition(":")[2])
        self._timeout = datetime.timedelta(seconds=int(parameters.config.get("timeout", 600)))
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return ONE_MACHINE

    @property
    def use_agent_store(self) -> bool:
        """True: the processes meet at this very store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a new store.

        Restarted processes must not find what the previous ones left in theirs (the addresses of dead peers). The
        previous store may still hold the port that was asked for, so a restart takes another one.
        """
        port = self._port if self._store is None else 0
        options = {"is_master": True, "timeout": self._timeout, "wait_for_workers": False, **without_libuv()}
        self._store = TCPStore(HOST, port, **options)
        meeting_point = RendezvousStoreInfo(HOST, self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, meeting_point)

    def is_closed(self) -> bool:
        """False: there is nobody who could close it."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other machine can join."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Report success: the store ends with the process."""
        return True


def without_libuv() -> dict[str, bool]:
    """Return the option of a store that keeps libuv out, where torch has none: for Windows it is built without."""
    wanted = os.environ.get("USE_LIBUV", "0" if sys.platform == "win32" else "1")
    return {} if wanted == "1" else {"use_libuv": False}
