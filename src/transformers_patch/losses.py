"""The patches with which the Trainer's loss and norm of gradients on several ranks equal those of one process.

A replacement calls the original, and corrects its inputs or results: none of transformers' code is copied.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from transformers_patch.symbols import Patch

# The names of the weight of the loss that spreads tokens over experts.
_WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")
# The attributes of the number of experts per token.
_CHOSEN = "_patched_experts_of_a_token"


class _Seen:
    """Stands for an object, and shows some of its attributes otherwise."""

    def __init__(self, inner: Any, **otherwise: Any) -> None:
        vars(self).update(otherwise, _inner=inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _shares_sequences(trainer: Any, backend: str = "torch") -> bool:
    # DeepSpeed's loaders split the sequences themselves, and the Trainer knows that. Loaders of this fork's backend do not.
    layout = getattr(trainer.accelerator, "parallelism_config", None)
    return getattr(layout, "sp_size", 1) > 1 and layout.sp_backend == backend


def auxiliary_weight(model: Any) -> float | None:
    """Return the factor of the auxiliary loss of a model's experts in its loss; None if it has none."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    # The number that the model has kept, where it has: this is the one that it adds by.
    weights = (getattr(owner, name, None) for owner in (model, text) for name in _WEIGHTS)
    return next((weight for weight in weights if weight is not None), None)


def _auxiliary(trainer: Any, model: Any, inputs: Any, outputs: Any, items: Any) -> Any:
    """Return a correction of the loss: the auxiliary loss becomes its mean over micro-batches, replicas and full sequences.

    A sum over tokens, divided by the tokens of the full batch, may be added up over micro-batches and replicas, and the Trainer
    does so. The auxiliary loss is a mean, which this turns into a sum.
    """
    auxiliary = outputs.get("aux_loss") if isinstance(outputs, dict) else None
    weight = auxiliary_weight(trainer.model)
    not_by_model = trainer.label_smoother is not None or trainer.compute_loss_func is not None
    # With DeepSpeed the Trainer itself adds up the parts of the loss.
    not_by_model |= model.training and _shares_sequences(trainer, "deepspeed")
    if not torch.is_tensor(auxiliary) or weight is None or not_by_model:
        return None
    times = share = 1.0
    by_tokens = items is not None and trainer.model_accepts_loss_kwargs
    if by_tokens and trainer.args.average_tokens_across_devices:
        replicas = trainer.accelerator.num_processes // trainer.get_tp_size()
        times = trainer.args.n_gpu if trainer.args.n_gpu > 1 else replicas
    # With `loss_is_scaled_for_ga=False`, `training_step` divides all of the loss.
    if by_tokens and model.training and trainer.loss_is_scaled_for_ga is not False:
        share = 1 / trainer.current_gradient_accumulation_steps
    whole = _of_whole_sequences(trainer, auxiliary, outputs.get("router_logits"), inputs.get("attention_mask"))
    if whole is None:
        return weight * (share - times) * auxiliary if by_tokens else None
    return weight * (share * whole - times * auxiliary)


def _of_whole_sequences(trainer: Any, auxiliary: Any, layers: Any, mask: Any) -> Any:
    """Return the auxiliary loss of the sequences that this rank has a part of, with this part's gradient; None if they are unsharded.

    The loss is a product of two means over tokens, so the means of the parts are averaged, and not their products. Each
    gradient stands for its part of a mean over the ranks.

    Collective: call on every rank that shares the sequences.
    """
    layout = getattr(trainer.accelerator, "parallelism_config", None)
    axis = "sp" if _shares_sequences(trainer) else "cp"
    if getattr(layout, f"{axis}_size", 1) <= 1:
        return None
    group = trainer.accelerator.torch_device_mesh[axis].get_group()
    layers = [layer.to(auxiliary.device).flatten(0, -2) for layer in layers] if isinstance(layers, tuple) else []
    fits = mask is not None and layers and mask.numel() == len(layers[0])
    weights = mask.to(auxiliary.device).flatten().float() if fits else None
    if _CHOSEN not in vars(trainer):  # once, because it waits for the device
        vars(trainer)[_CHOSEN] = _agreed_form(trainer, auxiliary, layers, weights, group)
    if not (chosen := vars(trainer)[_CHOSEN]):
        return None
    choices, probabilities, tokens = _router_sums(layers, chosen, weights)
    experts = len(probabilities)
    sums = torch.cat([choices.sum(0), probabilities.detach(), tokens[None]])
    distributed.all_reduce(sums, group=group)
    # Each rank adds to the gradient what its part has, as often as the mean over the ranks will divide it.
    of_all = sums[experts:-1] + distributed.get_world_size(group) * (probabilities - probabilities.detach())
    return experts * (sums[:experts] @ of_all) / sums[-1] ** 2


def _router_sums(layers: Any, chosen: int, weights: Any) -> tuple[Any, Any, Any]:
    """Return sums over layers and tokens: how often each expert is a token's first to last choice, its probability, and tokens."""
    experts = layers[0].shape[-1]
    weights = layers[0].new_ones(len(layers[0]), dtype=torch.float32) if weights is None else weights
    choices, probabilities = weights.new_zeros(chosen, experts), weights.new_zeros(experts)
    for layer in layers:
        of_tokens = layer.softmax(-1)
        choices.scatter_add_(1, of_tokens.topk(chosen).indices.T, weights.expand(chosen, -1))
        probabilities = probabilities + weights @ of_tokens.float()
    return choices, probabilities, len(layers) * weights.sum()


def _agreed_form(trainer: Any, auxiliary: Any, layers: Any, weights: Any, group: Any) -> int:
    """Return what `_form` does where all ranks that share sequences found the same, else 0 and a warning. All of them."""
    # Mixed precision rounds the outputs once more.
    limit = 1e-4 if trainer.accelerator.mixed_precision == "no" else 1e-2
    with torch.no_grad():
        # This fork's backends take a mask of padding from the model, whose own loss is then one of all tokens.
        local_form = _form(auxiliary, layers, weights, limit) or _form(auxiliary, layers, None, limit)
    bounds = torch.tensor([local_form, -local_form], device=auxiliary.device)
    distributed.all_reduce(bounds, distributed.ReduceOp.MIN, group=group)
    agreed = local_form if bounds[0] == -bounds[1] else 0
    if not agreed and trainer.args.process_index == 0:
        what = "has no router_logits among its outputs, or an auxiliary loss that is not that of Switch Transformers over all layers together"
        means = "each rank's is that of its parts of sequences, which is near that of whole ones and not equal to it"
        warnings.warn(f"{type(trainer.model).__name__} {what}. So {means}.", UserWarning, stacklevel=2)
    return agreed


def _form(auxiliary: Any, layers: Any, weights: Any, limit: float) -> int:
    """Return the number of experts per token with which an auxiliary loss is that of Switch Transformers; 0 if none fits.

    With E experts it is E times the sum, over them, of the share of tokens that one gets times its mean probability, of all layers
    together: equations 4 to 6 of https://arxiv.org/abs/2101.03961.
    """
    if not layers:
        return 0
    experts = layers[0].shape[-1]
    choices, probabilities, tokens = _router_sums(layers, experts, weights)
    off = (experts * (choices.cumsum(0) @ probabilities) / tokens**2 / auxiliary - 1).abs()
    return int(off.argmin()) + 1 if off.min() < limit else 0


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
        if shifted is not None:  # of the full sequence, before it was sharded
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
        auxiliary = _auxiliary(self, model, inputs, outputs, num_items_in_batch)
        if auxiliary is not None:
            loss = loss + auxiliary.to(loss.device)
        return (loss, outputs) if return_outputs else loss

    return compute_loss


def _items(original: Callable[..., Any]) -> Callable[..., Any]:
    def _get_num_items_in_batch(self: Any, batch_samples: Any, device: Any) -> Any:
        # The original divides by the ranks that count the same tokens. It has added their counts only if it averages. For a
        # release that makes this difference itself the result is the same.
        averages = self.args.average_tokens_across_devices
        return original(self if averages else _Seen(self, get_tp_size=lambda: 1), batch_samples, device)

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
        forward, watched_by = module.forward, {}

        def watched(*inputs: Any, **options: Any) -> Any:
            for name, parameter in module.named_parameters(recurse=False):
                if torch.is_grad_enabled() and parameter.requires_grad and watched_by.get(name) is not parameter:
                    watched_by[name] = parameter  # a loader replaces parameters
                    parameter.register_hook(_sharing(parameter, mesh.size()))
            return forward(*inputs, **options)

        # No hook of the module: other code that replaces the forward, like this fork's `prepare` under FSDP2, sums itself.
        module.forward = watched
        return module

    return install_forward


def _sharing(parameter: Any, ranks: int) -> Callable[[Any], None]:
    def share(gradient: Any) -> None:
        # Runs before a gradient is added to those of earlier micro-batches. These are sums over all ranks already, and the
        # original adds them up over the ranks again: a share of each rank gives the same sums.
        if parameter.grad is not None:
            parameter.grad.div_(ranks)

    return share


# By the names of their entries in the registry: the symbol, its first parameters, what its code must read, and what replaces it.
PATCHES = {
    "loss": Patch(
        "Trainer", "compute_loss", ("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
        ("label_smoother", "model_accepts_loss_kwargs", "num_processes", "get_tp_size"), _loss, mended="aux"),
    "loss_items": Patch(
        "Trainer", "_get_num_items_in_batch", ("self", "batch_samples", "device"),
        ("average_tokens_across_devices", "get_tp_size"), _items),
    "loss_context": Patch(
        "Trainer", "_prepare_context_parallel_inputs", ("self", "model", "inputs"),
        ("accelerator", "parallelism_config", "cp_enabled", "cp_backend", "maybe_context_parallel"), _context),
    "loss_length": Patch(
        "Trainer", "set_initial_training_values", ("self", "args", "dataloader"),
        ("get_sp_size", "get_total_train_batch_size"), _length),
    "loss_replicas": Patch(
        "ReplicatedWithGradAllReduce", "install_forward", ("self", "module", "mesh"),
        ("register_post_accumulate_grad_hook", "all_reduce"), _summed, mended="register_hook"),
}  # fmt: skip
