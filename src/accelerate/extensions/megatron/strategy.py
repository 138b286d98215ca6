"""The strategy: core's groups at the beginning, engines at `prepare`, their files in a checkpoint."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accelerate.checkpoint.state import run_on_all_ranks
from accelerate.config.handlers import GradScalerKwargs
from accelerate.data import adapter
from accelerate.extensions.engines import engines
from accelerate.extensions.megatron.engine import MegatronEngine
from accelerate.extensions.megatron.steps import (
    MegatronLMDummyDataLoader,
    MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper,
)
from accelerate.parallelism_config import ParallelismConfig
from accelerate.runtime.run import Run
from accelerate.strategies.base import Strategy


def _prepare_megatron_lm(accelerator: Any, *objects: Any) -> tuple[Any, ...]:
    """Prepare loaders, and then a new model with its optimizer and scheduler as one engine.

    Collective: call on every rank.
    """
    return tuple(engines.prepare(accelerator, objects, "Megatron-LM")[0])


class MegatronLM(Strategy):
    """Tensor, pipeline and data parallelism of Megatron core.

    Source: https://arxiv.org/abs/1909.08053, https://arxiv.org/abs/2104.04473
    """

    prepares_together = "_prepare_megatron_lm"

    # -- prepare -------------------------------------------------------------------------------------------------

    def make_scaler(self, accelerator: Run, handler: GradScalerKwargs | None) -> None:
        """Return no scaler, as core has its own; make core's groups and the layout of the ranks. The Accelerator calls it first, all ranks.

        Raises:
            ImportError: megatron-core is not installed.
            NotImplementedError: the plugin has a setting that core has no use for here.
            ValueError: the numbers of ranks do not fit, or another layout was requested.
        """
        state, plugin = accelerator.state, accelerator.state.megatron_lm_plugin
        plugin.refuse_unused()
        if handler is not None:
            if handler != GradScalerKwargs(handler.init_scale, growth_interval=handler.growth_interval):
                raise ValueError(
                    f"{handler} with Megatron-LM, whose core doubles and halves the scale. Set only init_scale and growth_interval."
                )
            scale = {"initial_loss_scale": handler.init_scale, "loss_scale_window": handler.growth_interval}
            plugin.megatron_lm_default_args = scale | plugin.megatron_lm_default_args
        try:
            from megatron.core import parallel_state
        except ImportError as error:
            raise ImportError("MegatronLMPlugin needs Megatron core: pip install megatron-core.") from error
        tp, pp, layout = plugin.tp_degree, plugin.pp_degree, state.parallelism_config
        if not dist.is_initialized() or state.num_processes % (tp * pp):
            raise ValueError(
                f"tp_degree={tp} x pp_degree={pp} needs a multiple of {tp * pp} processes "
                f"that cooperate, and {state.num_processes} run. Start the script with `accelerate launch --num_processes ...`."
            )
        if layout is not None and layout is not getattr(plugin, "_layout", None):
            raise ValueError(
                "parallelism_config with MegatronLMPlugin: set tp_degree and pp_degree of the plugin, and remove it."
            )
        sizes = [getattr(parallel_state, f"get_{kind}_model_parallel_world_size") for kind in ("tensor", "pipeline")]
        if not parallel_state.model_parallel_is_initialized() or [size() for size in sizes] != [tp, pp]:
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(tp, pp)
        # Loaders, gathered metrics and schedules ask every layout these questions.
        plugin._layout = state.parallelism_config = layout = ParallelismConfig()
        for axis, size in {"tp": tp, "pp": pp, "dp_replicate": state.num_processes // (tp * pp)}.items():
            layout._set_size(axis, size)
        state.device_mesh = layout.get_device_mesh(accelerator.device.type)

    def check(self, accelerator: Run, objects: Sequence[Any]) -> None:
        """Refuse accumulation, which the number of micro-batches is, and data sets of Megatron's own script.

        Collective: call on every rank.
        """
        if accelerator.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps={accelerator.gradient_accumulation_steps} with Megatron-LM, whose step takes num_micro_batches at once. "
                "Set MegatronLMPlugin(num_micro_batches=...), and leave it at 1."
            )
        for obj in objects:
            if isinstance(obj, MegatronLMDummyDataLoader):
                obj.build_train_valid_test_data_iterators(accelerator)

    def needs_wrapper(self, accelerator: Run, model: nn.Module) -> bool:
        """Always: the engine runs the model."""
        return True

    def wrap_model(self, accelerator: Run, model: nn.Module) -> nn.Module:
        """Refuse a model without its optimizer: an engine is made of both, in one `prepare`."""
        raise ValueError(
            "Megatron-LM makes one engine of a model and its optimizer. Pass both to `prepare` in one call."
        )

    def batches(self, accelerator: Run, loader: Any) -> Any:
        """Return a loader whose batch has the micro-batches of a step, each of the original batch size.

        Raises:
            ValueError: it has no batch size.
        """
        count = accelerator.state.megatron_lm_plugin.num_micro_batches
        if count == 1:
            return loader
        plain = type(loader) is DataLoader and type(loader.batch_sampler) is BatchSampler
        if not plain or isinstance(loader.dataset, IterableDataset):
            raise ValueError(
                f"num_micro_batches={count} takes so many batches at once from a torch DataLoader with a batch_size, and got a "
                f"{type(loader).__name__}. Pass such a loader, or set num_micro_batches=1."
            )
        size = loader.batch_size * count
        sampler = BatchSampler(copy.copy(loader.sampler), size, loader.drop_last)
        return adapter.variant(loader, batch_size=size, batch_sampler=sampler)

    def engine(
        self, accelerator: Run, model: nn.Module, optimizer: Any, scheduler: Any, loaders: Sequence[Any]
    ) -> tuple[Any, Any, Any]:
        """Build the engine of a model; return it with its optimizer and its scheduler, each None where there is none.

        Collective: call on every rank.
        """
        plugin = accelerator.state.megatron_lm_plugin
        if optimizer is not None:
            run_on_all_ranks(lambda: plugin.set_optimizer_type(optimizer))
        replicas = plugin._layout.data_parallel_size
        sizes = [size for loader in loaders if isinstance(size := getattr(loader, "total_batch_size", None), int)]
        size = (min if plugin.is_train_batch_min else max)(sizes, default=replicas * plugin.num_micro_batches)
        plugin.set_training_args(size // replicas // plugin.num_micro_batches, replicas)
        engine = MegatronEngine(accelerator, model, optimizer, scheduler)
        if optimizer is None:
            return engine, None, None
        wrapped = MegatronLMOptimizerWrapper(engine.optimizer)
        if engine.scheduler is not None:
            scheduler = MegatronLMSchedulerWrapper(engine.scheduler, wrapped)
        return engine, wrapped, scheduler

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the transformers model, which has no weights while its engine trains. Not a collective."""
        if isinstance(model, MegatronEngine):
            return model.source
        return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    # -- step ----------------------------------------------------------------------------------------------------

    def backward(self, accelerator: Run, loss: torch.Tensor, **kwargs: Any) -> None:
        """Do nothing: the engine has taken the full step when the model was called."""

    def clip_grad_norm(
        self, accelerator: Run, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Return the norm of the last step's gradients, which core has clipped to the plugin's `gradient_clipping`.

        Not a collective.
        """
        clipped_ids = {id(p) for p in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
        for model in accelerator._models:
            if isinstance(model, MegatronEngine) and any(id(p) in clipped_ids for p in model.parameters()):
                return torch.tensor(float("nan") if model.grad_norm is None else float(model.grad_norm))
        raise ValueError("clip_grad_norm_ got parameters of no prepared model. Pass model.parameters().")
