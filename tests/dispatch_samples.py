"""The broadcasts of a dispatching process within this one."""

import pickle
from collections import deque
from types import SimpleNamespace

from accelerate.data.build import prepare_data_loader
from accelerate.extensions.dispatch.scatter import CPU, Scatter


class Line:
    """A communicator that keeps what the main process broadcasts, or gives a receiver what was kept."""

    group = None

    def __init__(self, sent, rank):
        self.sent, self.rank, self.sends = deque(sent) if rank else sent, rank, rank == 0

    def broadcast_object_list(self, values, source):
        if self.sends:
            self.sent.append(pickle.dumps(values))
        else:
            values[:] = pickle.loads(self.sent.popleft())
        return values


def dispatched(loader, sent, world, rank, **options):
    """A dispatching loader of a rank; rank 0 has to be run to its end before another one begins."""
    options |= {"num_processes": world, "process_index": rank, "dispatch_batches": True}
    loader = prepare_data_loader(loader, put_on_device=True, device=CPU, **options)
    loader.state = SimpleNamespace(num_processes=world, process_index=rank, device=CPU)
    loader._connection = Scatter(Line(sent, rank), None, None, CPU, range(world))
    return loader
