"""What a checkpoint brings back: read in full first, then applied, so that a bad one changes nothing."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from accelerate.checkpoint import files, loaders, names, rng

# Where a rank's file keeps the positions of its loaders. Other readers of the file look only for keys they know.
POSITIONS = "dataloader_positions"


@dataclass
class Contents:
    """The states of a checkpoint, each with the object it belongs to.

    Attributes:
        folder: Where it was read from, for messages.
        models: Modules and their state dicts.
        optimizers: Optimizers and their states.
        schedulers: Schedulers and their states.
        dataloaders: Loaders and their states.
        custom: Registered objects and their states.
        scaler: The gradient scaler and its state, or None.
        random: Random states of this rank and its step count, or None.
        first_rank: Random states of the first rank, where this rank has none; its own are derived from them.
        positions: Where the loaders stood.
        process_index: This rank.
    """

    folder: str
    models: list[tuple[nn.Module, dict[str, Any]]] = field(default_factory=list)
    optimizers: list[tuple[Any, Any]] = field(default_factory=list)
    schedulers: list[tuple[Any, Any]] = field(default_factory=list)
    dataloaders: list[tuple[Any, Any]] = field(default_factory=list)
    custom: list[tuple[Any, Any]] = field(default_factory=list)
    scaler: tuple[Any, Any] | None = None
    random: dict[str, Any] | None = None
    first_rank: dict[str, Any] | None = None
    positions: list[Any] = field(default_factory=list)
    process_index: int = 0

    def apply(self, **load_model_kwargs: Any) -> dict[str, Any]:
        """Give every object its state. Any rank, alone.

        Args:
            **load_model_kwargs: Passed to ``load_state_dict`` of the models.

        Returns:
            Attributes that the Accelerator takes over: ``step``, when the checkpoint has it.
        """
        for model, state in self.models:
            model.load_state_dict(state, **load_model_kwargs)
        for optimizer, state in self.optimizers:
            optimizer.load_state_dict(state)
        for scheduler, state in self.schedulers:
            scheduler.load_state_dict(state)
        positions = self.positions
        for index, (loader, state) in enumerate(self.dataloaders):
            loaders.restore(loader, state, positions[index] if index < len(positions) else None)
        if self.scaler is not None:
            scaler, state = self.scaler
            scaler.load_state_dict(state)
        for obj, state in self.custom:
            obj.load_state_dict(state)
        return self._apply_random()

    def _apply_random(self) -> dict[str, Any]:
        file = names.random_states_file(self.process_index)
        if self.random is None and self.first_rank is not None:
            rng.derive(self.first_rank, self.process_index, f"{self.folder} has no {file}")
            return {"step": self.first_rank["step"]} if "step" in self.first_rank else {}
        if self.random is None:
            rng.logger.warning(
                "%s has no %s, so the random states of rank %d stay as they are and it draws other numbers than an "
                "uninterrupted run. The checkpoint was saved by fewer processes, or not by all of them.",
                self.folder,
                file,
                self.process_index,
            )
            return {}
        states = dict(self.random)
        overrides = {"step": states.pop("step")} if "step" in states else {}
        rng.restore(states, f"{self.folder}/{file}")
        return overrides


def read_common(
    folder: str,
    schedulers: list[Any],
    dataloaders: list[Any],
    custom: list[Any],
    scaler: Any | None,
    process_index: int,
    load_kwargs: dict[str, Any] | None = None,
) -> Contents:
    """Read what every strategy saves alike: all but models and optimizers. Any rank, alone.

    Args:
        folder: The checkpoint's folder.
        schedulers: In the order in which they were saved.
        dataloaders: In the order in which they were saved.
        custom: Registered objects, in the order in which they were saved.
        scaler: The gradient scaler, or None.
        process_index: This rank.
        load_kwargs: Passed to ``torch.load``.

    Raises:
        FileNotFoundError: The folder lacks a file; the message names it.
    """
    contents = Contents(folder, process_index=process_index)
    contents.schedulers = [
        (scheduler, files.read_scheduler(folder, index, load_kwargs)) for index, scheduler in enumerate(schedulers)
    ]
    contents.dataloaders = [
        (loader, loaders.read(loader, folder, index, process_index, load_kwargs))
        for index, loader in enumerate(dataloaders)
    ]
    contents.custom = [(obj, files.read_custom(folder, index, load_kwargs)) for index, obj in enumerate(custom)]
    if scaler is not None:
        state = files.read_scaler(folder)
        if state is None:
            rng.logger.warning(
                "%s has no %s: it was saved without gradient scaling, and the loss scale starts anew.",
                folder,
                names.scaler_file(),
            )
        else:
            contents.scaler = (scaler, state)
    contents.random = files.read_random_states(folder, process_index)
    # A rank that was not there when the checkpoint was saved must draw the same epoch as the others.
    own = contents.random if contents.random is not None else files.read_random_states(folder, 0)
    contents.positions = (own or {}).pop(POSITIONS, None) or []
    for index, (loader, position) in enumerate(zip(dataloaders, contents.positions, strict=False)):
        loaders.check(loader, position, index)
    if contents.random is None and own is not None:
        contents.first_rank = own
    return contents
