"""The warnings, each at the line of the program that prepares the object or calls backward."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import RandomSampler

from accelerate.base._warn import warn_user
from accelerate.config.handlers import GradientAccumulationPlugin
from accelerate.extension import Extension
from accelerate.extensions.prepare_checks.shared import shared_part
from accelerate.modules.unwrap import extract_model_from_parallel
from accelerate.runtime import torch_private
from accelerate.runtime.run import Run
from accelerate.scheduler import AcceleratedScheduler
from accelerate.training.prepare import chain
from accelerate.training.prepared import others_alive

# The attributes of the gradient state, and its settings, as the last Accelerator has left them; both change in place.
_accumulation: tuple[Any, dict[str, Any]] = (None, {})


class PrepareChecks(Extension):
    """Looks at each newly prepared model and schedule."""

    order = 0  # before extensions that change the layers of a model

    @classmethod
    def attach(cls, run: Run) -> "PrepareChecks":
        """Warn of accumulation settings that other live Accelerators share and that this one has changed. Not a collective."""
        warn_of_other_accumulation(run)
        return cls(run)

    def convert(self, model: nn.Module, evaluation: bool) -> nn.Module:
        """Warn of parts that another model has. Not a collective."""
        if shared := shared_part(self.run.prepared, model):
            warn_user(
                f"This model ({type(model).__name__}) shares modules with one that is already prepared: {shared}. It is "
                "prepared as well, so the shared parameters get gradients from two wrappers. Prepare the whole model once, "
                "and reach its parts through `accelerator.unwrap_model`."
            )
        return model

    def registered(self, kind: str, prepared: Any, evaluation: bool) -> None:
        """Warn of a schedule whose length does not fit, and let the next backward pass look at a model of DDP. Not a collective."""
        run = self.run
        if kind == "scheduler" and isinstance(prepared, AcceleratedScheduler):
            check_length(prepared, updates_per_epoch(run))
        elif kind == "model" and run.is_main_process and run.num_processes > 1:
            averaged = any(isinstance(module, DistributedDataParallel) for module in (prepared, *chain(prepared)))
            if averaged and not run.extensions.of_kind(FirstBackward):
                run.extensions.add(FirstBackward(run))


class FirstBackward(Extension):
    """Looks at hooks of parameters in one backward pass, and removes itself from the run."""

    def phase_begins(self, phase: str, loss: Any) -> None:
        """Warn of hooks that get gradients that are not averaged. Not a collective."""
        if phase == "backward":
            self.run.extensions.remove(self)
            _warn_of_hooks(self.run._models)


def _warn_of_hooks(models: Sequence[nn.Module]) -> None:
    for model in models:
        names = [name for name, parameter in model.named_parameters() if torch_private.acts_in_backward(parameter)]
        if names:
            warn_user(
                f"{len(names)} parameters of {type(extract_model_from_parallel(model)).__name__} have a hook from "
                f"register_post_accumulate_grad_hook (the first is {names[0]!r}). The hook gets the gradient of its rank, before "
                "DDP averages it: an optimizer that steps in the hook gives each rank other weights. Step after `backward`."
            )


def warn_of_other_accumulation(run: Run) -> None:
    """Warn if a new Accelerator changes the accumulation settings, which live ones share with it. Not a collective."""
    global _accumulation
    state, now = vars(run.gradient_state), run.gradient_state.plugin_kwargs
    (former_state, before), _accumulation = _accumulation, (state, now)
    if former_state is not state:  # the first Accelerator, or the first one after a reset
        return
    # The end of a loader has an effect only in an accumulation step of several micro-batches.
    names = {"num_steps": "gradient_accumulation_steps"}
    if now.get("num_steps", 1) > 1:
        names["sync_with_dataloader"] = "sync_with_dataloader"
    defaults = vars(GradientAccumulationPlugin(num_steps=1))
    values = {
        option: (before.get(name, defaults[name]), now.get(name, defaults[name])) for name, option in names.items()
    }
    changed = [f"{option} from {former} to {new}" for option, (former, new) in values.items() if former != new]
    if changed and others_alive(run.prepared):
        warn_user(
            f"This Accelerator changes the gradient accumulation of another live Accelerator: {', '.join(changed)}. All Accelerators of a "
            "process share these settings, and a Trainer builds its own. Build both with the same settings, set "
            "`gradient_accumulation_steps` again before you train with the first one, or call its `free_memory()` if it is not used any more."
        )


def updates_per_epoch(run: Run) -> int | None:
    """Return the optimizer steps of one pass over the training loader; None if there is no loader, or it has no length.

    Not a collective.
    """
    try:
        batches = len(_training_loader(run._dataloaders))
    except (IndexError, TypeError):
        return None
    layout = run.parallelism_config
    if layout is not None and layout._sp_by_deepspeed:
        batches *= layout.sp_size
    return -(-batches // max(1, run.gradient_accumulation_steps))


def _training_loader(loaders: Sequence[Any]) -> Any:
    """Return the first loader that shuffles, as loaders for evaluation do not; else the first one."""
    shuffling = (
        item for item in loaders if hasattr(item, "get_sampler") and isinstance(item.get_sampler(), RandomSampler)
    )
    return next(shuffling, loaders[0])


def check_length(scheduler: AcceleratedScheduler, updates: int | None) -> None:
    """Warn if ``total_steps`` cannot fit the optimizer steps that one pass over the prepared loader makes. Not a collective."""
    total = getattr(scheduler.scheduler, "total_steps", None)
    replicas = scheduler.steps_per_update
    if not total or not updates or not scheduler.step_with_optimizer:
        return
    needed = updates * replicas
    counted_per_rank = replicas > 1 and total % needed and not total % updates
    if total < needed or counted_per_rank:
        warn_user(
            f"{type(scheduler.scheduler).__name__} was built with total_steps={total}, but one epoch of the prepared "
            f"loader makes {updates} optimizer steps and the scheduler advances {replicas} time(s) for "
            f"each, {needed} in all. Compute total_steps as epochs * {needed} (the length of the loader before "
            "`prepare`), or pass step_scheduler_with_optimizer=False and step it yourself."
        )
