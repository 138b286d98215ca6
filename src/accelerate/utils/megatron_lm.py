"""What stands for Megatron-LM's objects: placeholders for its scheduler and data, and the contract of a training step."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from accelerate.utils.imports import is_megatron_lm_available


def _later(what: str) -> NotImplementedError:
    hint = "" if is_megatron_lm_available() else " Megatron-LM is not installed here either."
    return NotImplementedError(
        f"{what} is not available yet.{hint} MegatronLMPlugin can be configured, and a subclass of AbstractTrainStep can be "
        "passed as custom_train_step_class; to train now, use FSDP or DeepSpeed."
    )


class MegatronLMDummyDataLoader:
    """Stands for Megatron-LM's own data sets, until `prepare` builds loaders from them.

    Args:
        dataset_kwargs: arguments by Megatron-LM's names, such as `data_path`, `splits_string` and `seq_length`.

    Example:
        >>> MegatronLMDummyDataLoader(data_path=["corpus"], splits_string="949,50,1").dataset_args["splits_string"]
        '949,50,1'
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args = {**dataset_kwargs, "megatron_dataset_flag": True}

    def set_megatron_data_args(self) -> None:
        """Write the arguments into Megatron-LM's global ones; an ImportError without Megatron-LM.

        Every rank calls it, after Megatron-LM was initialised.
        """
        if not is_megatron_lm_available():
            raise ImportError("MegatronLMDummyDataLoader needs Megatron-LM; install it, or use a torch DataLoader.")
        from megatron.training import get_args

        arguments = get_args()
        for name, value in self.dataset_args.items():
            setattr(arguments, name, value)

    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Callable[[Any], tuple[Any, ...]]:
        """Return the function that builds training, validation and test sets.

        Raises:
            NotImplementedError: there is no function of the user, and the built-in ones are not available yet.
        """
        provider = accelerator.state.megatron_lm_plugin.custom_megatron_datasets_provider_function
        if provider is None:
            raise _later("Building Megatron-LM's data sets without custom_megatron_datasets_provider_function")
        return provider

    def build_train_valid_test_data_iterators(self, accelerator: Any) -> tuple[Any, Any, Any]:
        """Return the three data iterators: for now, always a NotImplementedError."""
        raise _later("Iterating over Megatron-LM's data sets")


class MegatronLMDummyScheduler:
    """Stands for Megatron-LM's scheduler, until `prepare` replaces it.

    Args:
        optimizer: the optimizer it belongs to.
        total_num_steps: batches of one process in the whole training.
        warmup_num_steps: batches of one process in the warm-up.
        kwargs: kept for the user.
    """

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


class AbstractTrainStep(ABC):
    """What Megatron-LM's schedules ask about a model: where batches come from, how to run it, what the loss is.

    Megatron-LM calls the three methods' results on every rank, at its pipeline's first, every, and last stage.

    Args:
        name: for messages.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @abstractmethod
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[[Any], Any]:
        """Return a function from a data iterator to the tensors of a micro-batch."""

    @abstractmethod
    def get_forward_step_func(self) -> Callable[[Any, torch.nn.Module], tuple[Any, Callable]]:
        """Return a function from a data iterator and a model to its output and the function that turns it to a loss."""

    @abstractmethod
    def get_loss_func(self, accelerator: Any) -> Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """Return a function from a model's output to the loss and the figures to log."""


class _MissingStep(AbstractTrainStep):
    """A step that is not available yet: it cannot be made."""

    def __init__(self, accelerator: Any, args: Any) -> None:
        raise _later(type(self).__name__)

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable:
        """Return a function from a data iterator to a micro-batch."""

    def get_loss_func(self, accelerator: Any) -> Callable:
        """Return the loss of the next token."""

    def get_forward_step_func(self) -> Callable:
        """Return the forward step."""


class BertTrainStep(_MissingStep):
    """The step of a BERT model. Not available yet: a NotImplementedError."""

    def get_loss_func(self, accelerator: Any, pretraining_flag: bool, num_labels: int) -> Callable:
        """Return the loss of masked words and sentence order, or of a classification."""

    def get_forward_step_func(self, pretraining_flag: bool, bert_binary_head: bool) -> Callable:
        """Return the forward step."""


class GPTTrainStep(_MissingStep):
    """The step of a GPT model. Not available yet: a NotImplementedError."""


class T5TrainStep(_MissingStep):
    """The step of a T5 model. Its masks work; the step is not available yet: a NotImplementedError."""

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
