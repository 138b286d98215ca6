"""What holds memory at the peak of a step, by kind and by module."""

import torch

from accelerate.extensions.reports import allocations
from accelerate.runtime import torch_private

WEIGHTS = 4 * (64 * 64 + 64)


class Seen(torch_private.TorchDispatchMode):
    """Gives a tracker what operators return."""

    def __init__(self, tracker):
        super().__init__()
        self.tracker = tracker

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.tracker.see(result := func(*args, **(kwargs or {})))
        return result


def test_the_peak_of_a_step_is_told_apart_by_kind_and_module():
    tracker, resize = allocations.AllocationTracker(), torch.UntypedStorage.resize_
    with tracker.watching(), Seen(tracker):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data, gathered = torch.ones(1000, 64), torch.ones(500)
        for _ in range(3):
            gathered.untyped_storage().resize_(0)
            gathered.untyped_storage().resize_(2000)
            model(data).sum().backward()
            optimizer.step()
            assert tracker.forwards[id(model)] == 1
            allocations.label(tracker, [model], [optimizer])
            kinds, modules = tracker.peak({module: name for name, module in model.named_modules()}.get)
            optimizer.zero_grad()
    assert kinds[allocations.PARAMETERS] == kinds[allocations.OPTIMIZER] == 2 * WEIGHTS
    assert kinds[allocations.GRADIENTS] <= 2 * WEIGHTS and kinds[allocations.EXCHANGED] == 2000
    assert kinds[allocations.PROGRAM] == 1000 * 64 * 4  # the data
    # The output of the first layer is kept for its successor's gradient, and that is made next to it.
    assert 1000 * 64 * 4 <= kinds[allocations.ACTIVATIONS] <= 4 * 1000 * 64 * 4
    assert modules["*"] >= 4 * WEIGHTS + 1000 * 64 * 4
    assert torch.UntypedStorage.resize_ is resize
