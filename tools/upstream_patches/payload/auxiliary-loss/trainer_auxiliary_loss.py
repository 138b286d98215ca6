"""The auxiliary loss of a mixture of experts, in the loss of the Trainer.

Losses are sums over tokens, divided by the tokens of the whole batch, and the Trainer adds them up over micro-batches and
replicas. The auxiliary loss, which spreads tokens over experts, is a mean over tokens: of that the same would make a sum of means.
"""

from typing import Any

import torch

# What models call the number by which they multiply the auxiliary loss
WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")


def average_auxiliary_loss(
    trainer: Any, model: torch.nn.Module, outputs: Any, loss: torch.Tensor, num_items_in_batch: Any
) -> torch.Tensor:
    """Return the loss of a micro-batch, with the auxiliary loss so that it adds up to its mean over micro-batches and replicas.

    Args:
        trainer (`Trainer`): Says over how much the losses are added up.
        model (`torch.nn.Module`): The model as it was called; only while it trains there are several micro-batches.
        outputs (`Any`): What it returned.
        loss (`torch.Tensor`): The loss, scaled for the mean over replicas. It is returned as it is if the auxiliary loss is not
            in it, or if it was not divided by the tokens of the whole batch.
        num_items_in_batch (`torch.Tensor` or `int`, *optional*): The tokens of the whole batch.
    """
    auxiliary = outputs.get("aux_loss") if isinstance(outputs, dict) else None
    weight = _weight(trainer.model)
    by_model = trainer.label_smoother is None and trainer.compute_loss_func is None
    by_tokens = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
    if not (torch.is_tensor(auxiliary) and weight and by_model and by_tokens):
        return loss
    replicas = micro_batches = 1
    if trainer.args.average_tokens_across_devices:
        processes = trainer.accelerator.num_processes // trainer.get_tp_size()
        replicas = trainer.args.n_gpu if trainer.args.n_gpu > 1 else processes
    # With `loss_is_scaled_for_ga=False` all of the loss is divided by them later
    if model.training and trainer.loss_is_scaled_for_ga is not False:
        micro_batches = getattr(trainer, "current_gradient_accumulation_steps", 1)
    return loss + weight * (1 / micro_batches - replicas) * auxiliary.to(loss.device)


def _weight(model: Any) -> float | None:
    # The number that the model keeps is the one that it multiplies by, whatever became of its configuration
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = (getattr(owner, name, None) for owner in (model, text) for name in WEIGHTS)
    return next((weight for weight in found if weight is not None), None)
