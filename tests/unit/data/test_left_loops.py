"""Loops that are left at the last batch, and end late."""

from torch.utils.data import DataLoader

from accelerate import Accelerator


def test_set_epoch_stays_when_the_former_loop_ends_late():
    """Trainers of transformers 4.57 hold the iterator of an epoch until they have that of the next."""
    loader = Accelerator(cpu=True).prepare(DataLoader(range(4), batch_size=2))
    former = iter(loader)
    for _ in range(2):
        next(former)
    loader.set_epoch(1)
    former.close()
    assert loader._progress.epoch == 1
