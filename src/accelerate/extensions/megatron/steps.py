"""Replacements of Megatron-LM's objects: placeholders for its scheduler and data, training steps, and wrappers around the engine's steps."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from accelerate.base.nested import recursively_apply
from accelerate.extensions.megatron.plugin import is_megatron_lm_available, unknown_model
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler


class MegatronLMDummyDataLoader:
    """Stands for Megatron-LM's own data sets, which `prepare` refuses: megatron-core of the registry does not read their settings.

    Args:
        dataset_kwargs: arguments by Megatron-LM's names, such as `data_path`, `splits_string` and `seq_length`.

    Example:
        >>> MegatronLMDummyDataLoader(data_path=["corpus"], splits_string="949,50,1").dataset_args["splits_string"]
        '949,50,1'
    """

    __module__ = "accelerate.utils.megatron_lm"  # the path in pickles

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args = {**dataset_kwargs, "megatron_dataset_flag": True}

    def set_megatron_data_args(self) -> None:
        """Refuse what belongs to Megatron-LM's own training script: a NotImplementedError."""
        raise _no_data_sets()

    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Any:
        """Refuse what belongs to Megatron-LM's own training script: a NotImplementedError."""
        raise _no_data_sets()

    def build_train_valid_test_data_iterators(self, accelerator: Any) -> tuple[Any, Any, Any]:
        """Refuse what belongs to Megatron-LM's own training script: a NotImplementedError."""
        raise _no_data_sets()


def _no_data_sets() -> NotImplementedError:
    return NotImplementedError(
        "Megatron-LM's own data sets belong to megatron.training, which megatron-core of the registry has not. Pass a torch DataLoader to "
        "prepare; megatron.core.datasets.gpt_dataset.GPTDataset can be its data set."
    )


class MegatronLMDummyScheduler:
    """A placeholder for Megatron-LM's scheduler, until `prepare` replaces it by core's `OptimizerParamScheduler`.

    Args:
        optimizer: the optimizer it belongs to.
        total_num_steps: batches of one process in the full training.
        warmup_num_steps: batches of one process in the warm-up.
        kwargs: kept for the user.
    """

    __module__ = "accelerate.utils.megatron_lm"  # the path in pickles
    _prepared_as = "scheduler"

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


class AbstractTrainStep(ABC):
    """A model's part of Megatron-LM's schedules: the source of batches, the forward, the loss.

    Megatron-LM calls the three methods' results on every rank, at its pipeline's first, every, and last stage.

    Args:
        name: for messages.
    """

    __module__ = "accelerate.utils.megatron_lm"  # the path in pickles

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @abstractmethod
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[[Any], Any]:
        """Return a function from a data iterator to the tensors of a micro-batch."""

    @abstractmethod
    def get_forward_step_func(self) -> Callable[[Any, torch.nn.Module], tuple[Any, Callable[..., Any]]]:
        """Return a function from a data iterator and a model to its output and the function that turns it to a loss."""

    @abstractmethod
    def get_loss_func(self, accelerator: Any) -> Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """Return a function from a model's output to the loss and the figures to log."""


class BertTrainStep(AbstractTrainStep):
    """The step of a BERT model, which is not trained here: a NotImplementedError."""

    __module__ = "accelerate.utils.megatron_lm"  # the path in pickles

    def __init__(self, accelerator: Any, args: Any) -> None:
        raise unknown_model("bert")

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """Return a function from a data iterator to a micro-batch."""

    def get_loss_func(self, accelerator: Any, pretraining_flag: bool, num_labels: int) -> Any:  # type: ignore[override]
        """Return the loss of masked words and sentence order, or of a classification."""

    def get_forward_step_func(self, pretraining_flag: bool, bert_binary_head: bool) -> Any:  # type: ignore[override]
        """Return the forward step."""


class GPTTrainStep(AbstractTrainStep):
    """The step of a decoder: the loss of the next token.

    A step of your own derives from it, calls `self.get_batch` and `self.loss_func`, and is passed as `custom_train_step_class`.

    Args:
        accelerator: The Accelerator.
        args: `megatron_lm_default_args` of the plugin.
        kwargs: `custom_train_step_kwargs`, for a class of your own.

    Attributes:
        get_batch: from a data iterator to tokens, labels, the mask of the loss, None (attention is causal) and positions.
        loss_func: from the mask of the loss and the losses of tokens to a loss and the figures to log.
    """

    __module__ = "accelerate.utils.megatron_lm"  # the path in pickles

    def __init__(self, accelerator: Any, args: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__("GPTTrainStep")
        self.accelerator, self.args = accelerator, args
        self.get_batch = self.get_batch_func(accelerator, False)
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[[Any], Any]:
        """Return the plugin's function, or one for batches with "input_ids", "labels" and "attention_mask"."""
        return accelerator.state.megatron_lm_plugin.custom_get_batch_function or _next_tokens

    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        """Return the plugin's function, or the mean over tokens: of the full step with `calculate_per_token_loss`, else of a micro-batch."""
        plugin = accelerator.state.megatron_lm_plugin

        def loss_of_tokens(loss_mask: torch.Tensor, output_tensor: torch.Tensor) -> Any:
            total, count = (output_tensor.float() * loss_mask).sum(), loss_mask.sum()
            if plugin.calculate_per_token_loss:
                return total, count.int(), {"lm loss": torch.stack([total.detach(), count])}
            mean = total / count.clamp(min=1)
            return mean, {"lm loss": mean.detach().clone()}

        return plugin.custom_loss_function or loss_of_tokens

    def get_forward_step_func(self) -> Callable[[Any, torch.nn.Module], tuple[Any, Callable[..., Any]]]:
        """Return the function that runs a stage on a micro-batch."""

        def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[Any, Callable[..., Any]]:
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
            return model(tokens, position_ids, attention_mask, labels=labels), partial(self.loss_func, loss_mask)

        return forward_step


def _next_tokens(data_iterator: Any) -> tuple[Any, ...]:
    """Return a micro-batch as Megatron wants it: labels at the place that predicts them, and which of them count."""
    batch = next(data_iterator)
    tokens, padding = batch["input_ids"], batch.get("attention_mask")
    if "labels" not in batch or batch.keys() - {"input_ids", "labels", "attention_mask"}:
        raise ValueError(
            f"The batch has {sorted(batch)}, and a GPT of Megatron core takes input_ids, labels and attention_mask. Change the collate_fn, or "
            "pass custom_get_batch_function to MegatronLMPlugin."
        )
    if padding is not None and bool((padding[:, 1:] > padding[:, :-1]).any()):
        raise ValueError(
            "attention_mask hides tokens before others that count. Pad on the right: padding_side='right'."
        )
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return tokens, labels.clamp(min=0), (labels != -100).float(), None, positions


class T5TrainStep(BertTrainStep):
    """The step of a T5 model, which is not trained here. Its masks work."""

    __module__ = "accelerate.utils.megatron_lm"  # the path in pickles

    def __init__(self, accelerator: Any, args: Any) -> None:
        raise unknown_model("t5")

    def get_loss_func(self, accelerator: Any) -> Any:  # type: ignore[override]
        """Return the loss of the next token."""

    def get_forward_step_func(self) -> Any:  # type: ignore[override]
        """Return the forward step."""

    @staticmethod
    def attn_mask_postprocess(attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the mask among encoder tokens: (batch, sequence, sequence), True where *forbidden*."""
        tokens = attention_mask.bool()
        return ~(tokens.unsqueeze(1) & tokens.unsqueeze(2))

    @staticmethod
    def get_decoder_mask(seq_length: int, device: torch.device) -> torch.Tensor:
        """Return the mask that hides later tokens: (1, sequence, sequence), True where attention is *forbidden*."""
        return torch.ones(1, seq_length, seq_length, dtype=torch.bool, device=device).triu(diagonal=1)

    @staticmethod
    def get_enc_dec_mask(attention_mask: torch.Tensor, dec_seq_length: int, device: torch.device) -> torch.Tensor:
        """Return the mask from decoder to encoder: (batch, decoder, encoder sequence), True where *forbidden*."""
        return (~attention_mask.to(device).bool()).unsqueeze(1).expand(-1, dec_seq_length, -1)


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """The optimizer of a `MegatronEngine`, which steps it and clears gradients: these calls do nothing here."""

    __module__ = "accelerate.utils.megatron_lm"  # the path in pickles

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine clears gradients before its step."""

    def step(self, closure: Callable[..., Any] | None = None) -> None:  # type: ignore[override]  # it runs no closure
        """Update nothing: the engine stepped when the model was called."""
        for hook in self._extensions.step_ends:
            hook(self)

    @property
    def step_was_skipped(self) -> bool:
        """Whether core left the last step out because the scaled gradients overflowed."""
        return getattr(self.optimizer, "step_was_skipped", False)


class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """Megatron core's scheduler, which a `MegatronEngine` steps: these calls do nothing here."""

    __module__ = "accelerate.utils.megatron_lm"  # the path in pickles

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine stepped when the model was called."""

    def continue_from(self, saved: int | None) -> None:
        """Do nothing: the engine advances it by the samples of each optimizer step, on any number of replicas."""

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of the parameter groups."""
        return [group["lr"] for group in self.scheduler.optimizer.param_groups]


def avg_losses_across_data_parallel_group(losses: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the mean of each scalar loss over the data-parallel ranks, which all call it; shape (number of losses,).

    Raises:
        ImportError: Megatron-LM is not installed.
    """
    if not is_megatron_lm_available():
        raise ImportError("Megatron-LM knows the data-parallel group, but is not installed. Use `Accelerator.reduce`.")
    from megatron.core import mpu

    means = torch.stack([loss.detach().reshape(()) for loss in losses])
    group = mpu.get_data_parallel_group()
    torch.distributed.all_reduce(means, group=group)
    return means / torch.distributed.get_world_size(group=group)


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Return nested tensors of all data-parallel ranks, which all call it, each concatenated along dim 0.

    Raises:
        ImportError: Megatron-LM is not installed.
    """
    if not is_megatron_lm_available():
        raise ImportError("Megatron-LM knows the data-parallel group, but is not installed. Use `Accelerator.gather`.")
    from megatron.core import mpu

    group = mpu.get_data_parallel_group()

    def gathered(part: torch.Tensor) -> torch.Tensor:
        part = part.detach().reshape(1) if part.ndim == 0 else part.detach().contiguous()
        parts = [torch.empty_like(part) for _ in range(torch.distributed.get_world_size(group=group))]
        torch.distributed.all_gather(parts, part, group=group)
        return torch.cat(parts)

    return recursively_apply(gathered, tensor, error_on_other_type=True)


def _step_of_training_script(name: str, instead: str) -> Callable[..., Any]:
    """Return a function that refuses features of programs around Megatron-LM's own training script."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name}() drives Megatron-LM's training script, which is not used here. {instead}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Raise NotImplementedError. {instead}"
    return refuse


_PREPARE = "Pass model, optimizer, scheduler and loaders to one `Accelerator.prepare`: it builds Megatron core's."
_STATE = "`Accelerator(megatron_lm_plugin=...)` sets Megatron core's groups up."
prepare_data_loader = _step_of_training_script("prepare_data_loader", _PREPARE)
prepare_model_optimizer_scheduler = _step_of_training_script("prepare_model_optimizer_scheduler", _PREPARE)
prepare_optimizer = _step_of_training_script("prepare_optimizer", _PREPARE)
prepare_scheduler = _step_of_training_script("prepare_scheduler", _PREPARE)
model_provider_func = _step_of_training_script("model_provider_func", _PREPARE)
_handle_megatron_data_iterator = _step_of_training_script("_handle_megatron_data_iterator", _PREPARE)
initialize = _step_of_training_script("initialize", _STATE)
finish_mpu_init = _step_of_training_script("finish_mpu_init", _STATE)
