"""Steps and wrappers of Megatron-LM. The public path of `accelerate.extensions.megatron.steps`."""

from accelerate.base._lazy import front

_HOMES = {
    "accelerate.extensions.megatron.steps": (
        "AbstractTrainStep BertTrainStep GPTTrainStep MegatronLMDummyDataLoader MegatronLMDummyScheduler "
        "MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper T5TrainStep _handle_megatron_data_iterator "
        "avg_losses_across_data_parallel_group finish_mpu_init gather_across_data_parallel_groups initialize "
        "model_provider_func prepare_data_loader prepare_model_optimizer_scheduler prepare_optimizer prepare_scheduler"
    ),
    "accelerate.extensions.megatron.plugin": "is_megatron_lm_available",
    "accelerate.optimizer": "AcceleratedOptimizer",
    "accelerate.scheduler": "AcceleratedScheduler",
}
__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])
