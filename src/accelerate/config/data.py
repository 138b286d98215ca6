"""How data loaders are distributed over the processes."""

from dataclasses import dataclass

from accelerate.config.enums import at_public_path


@at_public_path
@dataclass
class DataLoaderConfiguration:
    """How `Accelerator.prepare` distributes a data loader. Fields may be assigned until a data loader is prepared.

    Args:
        split_batches: True divides each batch of the loader by the number of processes; False gives each process
            batches of the loader's own size.
        dispatch_batches: True reads the data on the main process only and sends every process its part. None decides by
            the data set: True for an iterable one, False otherwise.
        even_batches: repeat samples of the beginning where the last batches would differ in size between processes.
        use_seedable_sampler: shuffle with a sampler whose order depends on a seed and the epoch only.
        data_seed: the seed of that sampler; None takes torch's initial seed.
        non_blocking: copy batches to the device without waiting; needs `pin_memory=True` in the loader.
        use_stateful_dataloader: use torchdata's `StatefulDataLoader` (torchdata 0.8.0), which can resume in an epoch.
        shard_iterable_dataset: False says that an iterable dataset gives every process its own part already, so it is
            neither divided again nor read by the main process alone.
        continue_after_load: a loader that was being iterated when a checkpoint was saved goes on within its epoch after
            `load_state`; False begins epochs anew.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=42))
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    shard_iterable_dataset: bool = True
    continue_after_load: bool = True
