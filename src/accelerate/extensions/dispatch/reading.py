"""The way of reading of a dispatched loader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import ChainDataset

from accelerate.data import adapter, iterable
from accelerate.data.reading import Dispatched
from accelerate.extensions.dispatch.dispatcher import DataLoaderDispatcher, SizingCollate


class RankZeroReads(Dispatched):
    """Rank 0 reads the undivided data; the loader divides batches."""

    def sharded(self) -> dict[str, Any]:
        """Change no sampler."""
        loader, changes = self.loader, {}
        if iterable.is_datapipe(loader.dataset):
            # Hidden in a plain stream: torch's loader of a datapipe exchanges a seed between all processes at its start.
            changes["dataset"] = ChainDataset([loader.dataset])
        counts_samples = self.shards > 1 or self.slice_fn is not None
        if counts_samples and loader.batch_sampler is not None and adapter.iterates_plainly(loader):
            changes["collate_fn"] = SizingCollate(loader.collate_fn)
        return changes

    def prepared(self, dataset: Any, **options: Any) -> DataLoaderDispatcher:
        """Return the loader."""
        return DataLoaderDispatcher(dataset, self.split_batches, slice_fn=self.slice_fn, **options)
