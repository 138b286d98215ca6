"""Checks of the data: every sample reaches exactly one process, in every way of loading."""

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate.accelerator import Accelerator
from accelerate.config.project import DataLoaderConfiguration
from accelerate.data_loader import skip_first_batches
from accelerate.utils.operations import gather_object

BATCH = 4


class _Stream(IterableDataset):
    """The numbers below a limit, one after the other."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(self.length)


def _lengths(accelerator: Accelerator) -> tuple[int, int]:
    """A length that the ranks can share evenly, and one that they cannot."""
    whole = 3 * BATCH * accelerator.num_processes
    return whole, whole + BATCH + 1


def _batches(loader: DataLoader) -> list[torch.Tensor]:
    return [batch[0] if isinstance(batch, (list, tuple)) else batch for batch in loader]


def _compare(found: torch.Tensor, length: int, how: str) -> None:
    expected = torch.arange(length)
    assert torch.equal(found.cpu().sort().values, expected), (
        f"Of {length} samples, {found.numel()} arrived, {found.unique().numel()} of them different ({how})."
    )


def check_split(accelerator: Accelerator) -> None:
    """Every sample arrives once, shuffled or not, whether or not the ranks can share evenly; all ranks have as many batches."""
    for length in _lengths(accelerator):
        for shuffle in (False, True):
            data = TensorDataset(torch.arange(length))
            loader = accelerator.prepare(DataLoader(data, batch_size=BATCH, shuffle=shuffle))
            parts = [accelerator.gather_for_metrics(batch[0]) for batch in loader]
            _compare(torch.cat(parts), length, f"{shuffle=}")
            counts = set(gather_object([len(parts)]))
            assert counts == {len(loader)}, (
                f"The ranks had {sorted(counts)} batches; the loader's length is {len(loader)}."
            )
    accelerator.free_memory()


def check_uneven(accelerator: Accelerator) -> None:
    """With even_batches=False no sample is seen twice, so that ranks may have different numbers of batches."""
    uneven = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    for length in _lengths(accelerator):
        loader = uneven.prepare(DataLoader(TensorDataset(torch.arange(length)), batch_size=BATCH))
        mine = torch.cat([*_batches(loader), torch.empty(0, dtype=torch.int64, device=uneven.device)])
        _compare(torch.tensor(gather_object(mine.tolist())), length, "even_batches=False")


def check_dispatch(accelerator: Accelerator) -> None:
    """A stream that only the main rank reads is dealt out: every sample arrives once."""
    dispatching = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    for length in _lengths(accelerator):
        loader = dispatching.prepare(DataLoader(_Stream(length), batch_size=BATCH))
        parts = [dispatching.gather_for_metrics(batch) for batch in loader]
        _compare(torch.cat(parts), length, "dispatch_batches=True")


def check_skip(accelerator: Accelerator) -> None:
    """An epoch whose first batches are skipped goes on with exactly the batches that an uninterrupted one has left."""
    length, skipped = _lengths(accelerator)[0], 2

    def loader() -> DataLoader:
        generator = torch.Generator().manual_seed(7)
        data = TensorDataset(torch.arange(length))
        return accelerator.prepare(DataLoader(data, batch_size=BATCH, shuffle=True, generator=generator))

    whole, rest = _batches(loader()), _batches(skip_first_batches(loader(), skipped))
    assert len(rest) == len(whole) - skipped, f"{len(rest)} of {len(whole)} batches are left after {skipped}."
    for expected, found in zip(whole[skipped:], rest, strict=True):
        assert torch.equal(expected, found), f"After the skip came {found.tolist()} instead of {expected.tolist()}."
    accelerator.free_memory()
