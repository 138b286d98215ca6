"""The data of a run, and the places of its checkpoints and logs."""

import os
import signal
from collections.abc import Sequence
from dataclasses import InitVar, dataclass

from accelerate.config.enums import at_public_path
from accelerate.config.options.schema import to_int


@at_public_path
@dataclass
class DataLoaderConfiguration:
    """The distribution of a data loader by `Accelerator.prepare`. Fields may be assigned until a data loader is prepared.

    Args:
        split_batches: True divides each batch of the loader by the number of processes; False gives each process
            batches of the loader's own size.
        dispatch_batches: True reads the data only on the main process, which sends every process its part. None decides by
            the data set: True for an iterable one, False otherwise.
        even_batches: repeat samples of the beginning if the last batches would differ in size between processes.
        use_seedable_sampler: shuffle with a sampler whose order depends only on a seed and the epoch.
        data_seed: the seed of that sampler; None takes torch's initial seed.
        non_blocking: copy batches to the device without waiting; needs `pin_memory=True` in the loader.
        use_stateful_dataloader: use torchdata's `StatefulDataLoader` (torchdata 0.8.0), which can resume in an epoch.
        shard_iterable_dataset: False means that an iterable dataset already gives every process its own part. Then it is
            neither divided again nor read only by the main process.
        already_sharded: True means the same for every loader and dataset: each process reads exactly its own loader's data.
            Samplers that know their rank, such as torch's `DistributedSampler`, are recognised without it, with a warning.
        continue_after_load: after `load_state`, a loader that was being iterated when the checkpoint was saved continues
            within its epoch; False begins epochs again.

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
    already_sharded: bool = False
    # Not None: Python 3.10 cannot resolve the type hint of an InitVar with that default.
    dispatch_readers: InitVar[str] = "one"

    def __post_init__(self, dispatch_readers: str | None) -> None:
        if dispatch_readers not in (None, "one"):
            raise ValueError(
                f"dispatch_readers={dispatch_readers!r} is not supported, because the setting was removed: rank 0 reads what is "
                "dispatched. To read on every node, shard the stream by node and pass already_sharded=True."
            )


@at_public_path
@dataclass
class ProjectConfiguration:
    """Where a run keeps its checkpoints and logs, and how it names them.

    Args:
        project_dir: the folder of the run.
        logging_dir: the folder of trackers that log locally; None takes `project_dir`.
        automatic_checkpoint_naming: let `save_state` number its checkpoints: `checkpoints/checkpoint_0` and so on.
        total_limit: how many numbered checkpoints are kept, at least one; None keeps all.
        iteration: the number of the next checkpoint.
        save_on_each_node: save on the main process of each machine, not only on that of the run; for machines that do
            not share a file system.
        async_save: let `save_state` return as soon as the state is copied, and write in the background.
        save_on_signal: signals, or their names or numbers, after which the run saves a checkpoint at the end of the step
            and leaves with status 75: `["SIGTERM", "SIGUSR1"]`, say. They need `project_dir`. None watches no signals.

    Raises:
        ValueError: `total_limit` is below one or no whole number.

    Example:
        >>> from accelerate import Accelerator
        >>> project = ProjectConfiguration("runs/first", automatic_checkpoint_naming=True, total_limit=3)
        >>> accelerator = Accelerator(project_config=project)
    """

    project_dir: str | os.PathLike | None = None
    logging_dir: str | os.PathLike | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False
    async_save: bool = False
    save_on_signal: Sequence[signal.Signals | str | int] | None = None

    def __post_init__(self) -> None:
        if self.total_limit is not None:
            self.total_limit = to_int(self.total_limit, "total_limit")
            if self.total_limit < 1:
                raise ValueError(f"total_limit is {self.total_limit}; keep at least 1 checkpoint, or None for all.")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike | None = None) -> None:
        """Set the folder of the run, and that of the logs if there is none yet. Not a collective."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir
