"""The patches with which the Trainer's loss and norm of gradients, on several ranks, are those of one process.

A replacement calls what it replaces, and mends what goes in or comes out: none of transformers' code is copied.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from transformers_patch.symbols import Patch

# What models call the weight of the loss that spreads tokens over experts.
_WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")


class _Seen:
    """Stands for an object, and shows some of its attributes otherwise."""

    def __init__(self, inner: Any, **otherwise: Any) -> None:
        vars(self).update(otherwise, _inner=inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _shares_sequences(trainer: Any) -> bool:
    # DeepSpeed's loaders cut the sequences themselves, and the Trainer knows that. Those of this fork's backend do not.
    layout = getattr(trainer.accelerator, "parallelism_config", None)
    return getattr(layout, "sp_size", 1) > 1 and layout.sp_backend == "torch"


def auxiliary_weight(model: Any) -> float | None:
    """Return by what a model multiplies the auxiliary loss of its experts before it adds it; None where it says nothing."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    # The number that the model has kept, where it has: this is the one that it adds by.
    found = (getattr(owner, name, None) for owner in (model, text) for name in _WEIGHTS)
    return next((weight for weight in found if weight is not None), None)


def _surplus(trainer: Any, model: Any, outputs: Any, items: Any) -> Any:
    """Return how much of the auxiliary loss is in the loss beyond its mean over micro-batches and replicas.

    A sum over tokens, divided by those of the whole batch, may be added up over micro-batches and replicas, and the Trainer does
    so. The auxiliary loss is a mean, of which the same makes a sum.
    """
    auxiliary = outputs.get("aux_loss") if isinstance(outputs, dict) else None
    weight = auxiliary_weight(trainer.model)
    by_tokens = items is not None and trainer.model_accepts_loss_kwargs
    not_by_model = trainer.label_smoother is not None or trainer.compute_loss_func is not None
    if not torch.is_tensor(auxiliary) or weight is None or not by_tokens or not_by_model:
        return None
    times = 1
    if trainer.args.average_tokens_across_devices:
        replicas = trainer.accelerator.num_processes // trainer.get_tp_size()
        times = trainer.args.n_gpu if trainer.args.n_gpu > 1 else replicas
    in_window = trainer.current_gradient_accumulation_steps if model.training else 1
    if trainer.loss_is_scaled_for_ga is False:  # `training_step` will divide all of the loss
        in_window = 1
    return weight * (times - 1 / in_window) * auxiliary


def _is_causal(model: Any) -> bool:
    # FSDP2 gives the class of a model another name, by which the Trainer does not know it any more; the bases keep theirs.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return any(base.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for base in type(inner).__mro__)


@contextmanager
def _smoothing(trainer: Any, inputs: Any) -> Iterator[None]:
    """Let smoothed labels be those of the next token, where sequences or the model are spread over ranks, too."""
    smoother = trainer.label_smoother
    if smoother is None:
        yield
        return
    shifted, causal = inputs.get("shift_labels"), _is_causal(trainer.model)

    def smooth(outputs: Any, labels: Any, shift_labels: bool = False, **options: Any) -> Any:
        if shifted is not None:  # of the whole sequence, before it was cut
            return smoother(outputs, shifted, shift_labels=False, **options)
        return smoother(outputs, labels, shift_labels=shift_labels or causal, **options)

    trainer.label_smoother = smooth
    try:
        yield
    finally:
        trainer.label_smoother = smoother


def _loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        with _smoothing(self, inputs):
            loss, outputs = original(self, model, inputs, True, num_items_in_batch)
        surplus = _surplus(self, model, outputs, num_items_in_batch)
        if surplus is not None:
            loss = loss - surplus.to(loss.device)
        return (loss, outputs) if return_outputs else loss

    return compute_loss


def _items(original: Callable[..., Any]) -> Callable[..., Any]:
    def _get_num_items_in_batch(self: Any, batch_samples: Any, device: Any) -> Any:
        items = original(self, batch_samples, device)
        # The original divides by the ranks that count the same tokens. It has added their counts only if it averages.
        if torch.is_tensor(items) and not self.args.average_tokens_across_devices:
            items = items * self.get_tp_size()
        return items

    return _get_num_items_in_batch


def _context(original: Callable[..., Any]) -> Callable[..., Any]:
    def _prepare_context_parallel_inputs(self: Any, model: Any, inputs: Any) -> Any:
        if not _shares_sequences(self):
            return original(self, model, inputs)
        # Both ways of sharing sequences are entered by one context, for the same tensors.
        layout = _Seen(self.accelerator.parallelism_config, cp_enabled=True, cp_backend="torch")
        shown = _Seen(self, accelerator=_Seen(self.accelerator, parallelism_config=layout))
        return original(shown, model, inputs)

    return _prepare_context_parallel_inputs


def _length(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_initial_training_values(self: Any, args: Any, dataloader: Any) -> Any:
        # A batch for each sequence, not one for each of its parts.
        return original(_Seen(self, get_sp_size=lambda: 1) if _shares_sequences(self) else self, args, dataloader)

    return set_initial_training_values


def _summed(original: Callable[..., Any]) -> Callable[..., Any]:
    def install_forward(self: Any, module: Any, mesh: Any) -> Any:
        module = original(self, module, mesh)
        forward, known = module.forward, {}

        def watched(*inputs: Any, **options: Any) -> Any:
            for name, parameter in module.named_parameters(recurse=False):
                if torch.is_grad_enabled() and parameter.requires_grad and known.get(name) is not parameter:
                    known[name] = parameter  # a loader replaces parameters
                    parameter.register_hook(_sharing(parameter, mesh.size()))
            return forward(*inputs, **options)

        # No hook of the module: who puts another forward there, as this fork's `prepare` does under FSDP2, sums by itself.
        module.forward = watched
        return module

    return install_forward


def _sharing(parameter: Any, ranks: int) -> Callable[[Any], None]:
    def share(gradient: Any) -> None:
        # Runs before a gradient is added to those of earlier micro-batches. These are sums over all ranks already, and the
        # original adds them up over the ranks once more: a share of each rank comes out as what they were.
        if parameter.grad is not None:
            parameter.grad.div_(ranks)

    return share


# By the names of their entries in the registry.
PATCHES = {
    "loss": Patch(
        owner="Trainer",
        name="compute_loss",
        parameters=("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
        reads=("label_smoother", "model_accepts_loss_kwargs", "num_processes", "get_tp_size"),
        replacement=_loss,
    ),
    "loss_items": Patch(
        owner="Trainer",
        name="_get_num_items_in_batch",
        parameters=("self", "batch_samples", "device"),
        reads=("average_tokens_across_devices", "get_tp_size"),
        replacement=_items,
    ),
    "loss_context": Patch(
        owner="Trainer",
        name="_prepare_context_parallel_inputs",
        parameters=("self", "model", "inputs"),
        reads=("accelerator", "parallelism_config", "cp_enabled", "cp_backend", "maybe_context_parallel"),
        replacement=_context,
    ),
    "loss_length": Patch(
        owner="Trainer",
        name="set_initial_training_values",
        parameters=("self", "args", "dataloader"),
        reads=("get_sp_size", "get_total_train_batch_size"),
        replacement=_length,
    ),
    "loss_replicas": Patch(
        owner="ReplicatedWithGradAllReduce",
        name="install_forward",
        parameters=("self", "module", "mesh"),
        reads=("register_post_accumulate_grad_hook", "all_reduce"),
        replacement=_summed,
    ),
}
