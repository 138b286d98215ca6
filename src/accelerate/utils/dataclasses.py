"""The public address of everything in `accelerate.config`: enumerations, keyword handlers and plugins."""

from accelerate.base._lazy import front

_HOMES = {
    "typing": "TYPE_CHECKING",
    "accelerate.extensions.compat.operations": "TensorInformation",
    "accelerate.extensions.deepspeed.plugin": "DeepSpeedPlugin",
    "accelerate.config.enums": (
        "BaseEnum ComputeEnvironment CustomDtype DDPCommunicationHookType DistributedType DynamoBackend "
        "EnumWithContains FP8BackendType LoggerType PrecisionType RNGType SageMakerDistributedType"
    ),
    "accelerate.extensions.fp8.recipes": "AORecipeKwargs FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs",
    "accelerate.extensions.profile.settings": "ProfileKwargs",
    "accelerate.extensions.quantize.config": "BnbQuantizationConfig",
    "accelerate.config.fsdp": "FullyShardedDataParallelPlugin get_module_class_from_name",
    "accelerate.config.handlers": (
        "AutocastKwargs DistributedDataParallelKwargs GradientAccumulationPlugin GradScalerKwargs "
        "InitProcessGroupKwargs KwargsHandler TorchDynamoPlugin"
    ),
    "accelerate.extensions.megatron.plugin": (
        "MODEL_CONFIGS_TO_MEGATRON_PARSERS MegatronLMPlugin add_model_config_to_megatron_parser parse_bert_config "
        "parse_glm4_moe_config parse_gpt2_config parse_llama_config parse_t5_config"
    ),
    "accelerate.extensions.sequence.config": "DeepSpeedSequenceParallelConfig TorchContextParallelConfig",
    "accelerate.extensions.tensor.config": "TorchTensorParallelConfig TorchTensorParallelPlugin",
    "accelerate.config.project": "DataLoaderConfiguration ProjectConfiguration",
    "accelerate.base.constants": (
        "BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_TRANSFORMERS_VERSION "
        "FSDP2_PYTORCH_VERSION FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_SHARDING_STRATEGY "
        "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION XPU_PROFILING_AVAILABLE_PYTORCH_VERSION"
    ),
}

__getattr__, __dir__, __all__ = front(__name__, _HOMES, [])
