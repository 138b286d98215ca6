"""Names that programs import from a module that is not their home, as accelerate 1.15.0 allows; see `_lazy.aliases`."""

# Each home with the names that other modules also give.
HOMES: dict[str, str] = {
    "accelerate.accelerator": "Accelerator",
    "accelerate.extensions.megatron.engine": "MegatronEngine",
    "accelerate.big_modeling": "dispatch_model init_empty_weights",
    "accelerate.checkpointing": "load_accelerator_state load_custom_state save_accelerator_state save_custom_state",
    "accelerate.commands.config": "get_config_parser",
    "accelerate.commands.config.cluster": "get_cluster_input",
    "accelerate.commands.config.config_args": (
        "SageMakerConfig cache_dir default_config_file default_yaml_config_file load_config_from_file"
    ),
    "accelerate.commands.config.config_utils": "SubcommandHelpFormatter",
    "accelerate.commands.config.default": "write_basic_config",
    "accelerate.extensions.configure.prompts": (
        "BulletMenu _ask_field _ask_options _convert_compute_environment _convert_distributed_mode "
        "_convert_dynamo_backend _convert_fp8_backend _convert_mixed_precision "
        "_convert_sagemaker_distributed_mode _convert_yes_no_to_bool"
    ),
    "accelerate.commands.config.sagemaker": "get_sagemaker_input",
    "accelerate.commands.env": "env_command_parser",
    "accelerate.commands.estimate": "estimate_command_parser",
    "accelerate.commands.launch": "launch_command_parser",
    "accelerate.extensions.compat.commands": (
        "_StoreAction _StoreConstAction _StoreTrueAction _validate_launch_command simple_launcher multi_gpu_launcher "
        "deepspeed_launcher tpu_launcher tpu_pod_launcher sagemaker_launcher options_to_group"
    ),
    "accelerate.extensions.configure.config_utils": "DYNAMO_BACKENDS",
    "accelerate.base.constants": "DEEPSPEED_MULTINODE_LAUNCHERS TORCH_DYNAMO_MODES",
    "accelerate.extensions.big_models.big_modeling": "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
    "accelerate.extensions.compat.constants": (
        "BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_SP_AVAILABLE_DEEPSPEED_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION "
        "CUDA_DISTRIBUTED_TYPES DTENSOR_PYTORCH_VERSION FSDP2_PYTORCH_VERSION FSDP_PYTORCH_VERSION "
        "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION TORCH_DISTRIBUTED_OPERATION_TYPES TORCH_LAUNCH_PARAMS "
        "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION"
    ),
    "accelerate.extensions.configure.config_args": (
        "SAGEMAKER_PYTHON_VERSION SAGEMAKER_PYTORCH_VERSION SAGEMAKER_TRANSFORMERS_VERSION"
    ),
    "accelerate.extensions.notebook.launchers": "ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION",
    "accelerate.extensions.sagemaker.interview": "SAGEMAKER_PARALLEL_EC2_INSTANCES",
    "accelerate.extensions.compat.environment": "deepspeed_required",
    "accelerate.commands.merge": "merge_command_parser",
    "accelerate.commands.test": "test_command_parser",
    "accelerate.commands.to_fsdp2": "to_fsdp2_command_parser",
    "accelerate.commands.tpu": "tpu_command_parser",
    "accelerate.commands.utils": "CustomArgumentParser",
    "accelerate.extensions.dispatch.dispatcher": "DataLoaderDispatcher",
    "accelerate.extensions.budget.sampler": "PackingCollator TokenBudgetSampler",
    "accelerate.devices.cores": "_parse_cpu_list",
    "accelerate.logging": "get_logger",
    "accelerate.extensions.big_models.align": "_compiler_disable",
    "accelerate.extensions.big_models.device_map": "_init_infer_auto_device_map",
    "accelerate.extensions.big_models.tensors": "_get_param_device",
    "accelerate.extensions.compat.other": "move_to_device",
    "accelerate.optimizer": "AcceleratedOptimizer",
    "accelerate.extensions.sequence.models": "_attach_context_parallel_hooks _refuse_recurrent_layers_under_sequence_parallelism",
    "accelerate.extensions.quantize.quantize": "_replace_with_bnb_layers",
    "accelerate.scheduler": "AcceleratedScheduler",
    "accelerate.extensions.compat.state": "ThreadLocalSharedDict",
    "accelerate.state": "AcceleratorState GradientState PartialState",
    "accelerate.test_utils.testing": "execute_subprocess_async path_in_accelerate_package",
    "accelerate.extensions.trackers.registry": "_available_trackers logger",
    "accelerate.tracking": "GeneralTracker LOGGER_TYPE_TO_CLASS filter_trackers",
    "accelerate.utils.dataclasses": (
        "AORecipeKwargs AutocastKwargs BnbQuantizationConfig ComputeEnvironment CustomDtype DeepSpeedPlugin "
        "DistributedDataParallelKwargs DistributedType DynamoBackend FP8BackendType FP8RecipeKwargs "
        "FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs LoggerType MSAMPRecipeKwargs "
        "MegatronLMPlugin PrecisionType ProfileKwargs RNGType SageMakerDistributedType TERecipeKwargs TensorInformation "
        "DeepSpeedSequenceParallelConfig TorchContextParallelConfig TorchTensorParallelConfig TorchTensorParallelPlugin "
        "get_module_class_from_name"
    ),
    "accelerate.utils.environment": (
        "are_libraries_initialized check_cuda_fp8_capability check_cuda_p2p_ib_support "
        "convert_dict_to_env_variables get_cpu_distributed_information get_current_device_type get_gpu_info "
        "get_int_from_env parse_choice_from_env parse_flag_from_env patch_environment set_numa_affinity "
        "str_to_bool"
    ),
    "accelerate.utils.fsdp_utils": (
        "ensure_weights_retied fsdp2_apply_ac fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler "
        "load_fsdp_model load_fsdp_optimizer merge_fsdp_weights save_fsdp_model save_fsdp_optimizer"
    ),
    "accelerate.utils.imports": (
        "is_4bit_bnb_available is_8bit_bnb_available is_aim_available is_bf16_available "
        "is_bitsandbytes_multi_backend_available is_bnb_available is_boto3_available is_clearml_available "
        "is_comet_ml_available is_cuda_available is_datasets_available is_deepspeed_available "
        "is_dvclive_available is_fp16_available is_fp8_available is_habana_gaudi1 is_hpu_available "
        "is_import_timer_available is_lomo_available is_matplotlib_available is_megatron_lm_available "
        "is_mlflow_available is_mlu_available is_mps_available is_msamp_available is_musa_available "
        "is_neuron_available is_npu_available is_numpy_available is_pandas_available is_peft_available "
        "is_pippy_available is_pytest_available is_rich_available is_rocm_available is_sagemaker_available "
        "is_schedulefree_available is_sdaa_available is_swanlab_available is_tensorboard_available "
        "is_timm_available is_torch_distributed_available is_torch_xla_available is_torchao_available "
        "is_torchdata_stateful_dataloader_available is_torchvision_available is_tqdm_available "
        "is_trackio_available is_transformer_engine_available is_transformer_engine_mxfp8_available "
        "is_transformers_available is_triton_available is_wandb_available is_weights_only_available "
        "is_xccl_available is_xpu_available"
    ),
    "accelerate.utils.launch": (
        "PrepareForLaunch _filter_args prepare_deepspeed_cmd_env prepare_multi_gpu_env "
        "prepare_sagemager_args_inputs prepare_simple_launcher_cmd_env prepare_tpu"
    ),
    "accelerate.utils.memory": "clear_device_cache release_memory",
    "accelerate.utils.modeling": (
        "calculate_maximum_sizes find_tied_parameters get_balanced_memory get_grad_scaler "
        "get_mixed_precision_context_manager get_non_persistent_buffers has_offloaded_params id_tensor_storage "
        "infer_auto_device_map load_checkpoint_in_model set_module_tensor_to_device"
    ),
    "accelerate.utils.offload": (
        "OffloadedWeightsLoader extract_submodules_state_dict load_offloaded_weight offload_state_dict "
        "offload_weight save_offload_index"
    ),
    "accelerate.utils.operations": (
        "GatheredParameters broadcast broadcast_object_list concatenate convert_outputs_to_fp32 "
        "copy_tensor_to_devices find_batch_size find_device gather gather_object get_data_structure honor_type "
        "initialize_tensors listify pad_across_processes pad_input_tensors recursively_apply reduce "
        "send_to_device slice_tensors"
    ),
    "accelerate.utils.other": (
        "check_os_kernel clean_state_dict_for_safetensors compile_regions compile_regions_deepspeed "
        "compile_regions_fsdp2 convert_bytes extract_model_from_parallel get_model_tp_size "
        "get_module_children_bottom_up get_pretty_name is_compiled_module merge_dicts recursive_getattr save "
        "wait_for_everyone"
    ),
    "accelerate.utils.random": "synchronize_rng_states",
    "accelerate.utils.tqdm": "tqdm",
    "accelerate.utils.transformer_engine": "apply_fp8_autowrap convert_model",
    "accelerate.utils.versions": "compare_versions is_torch_version",
}

# Each module with the names that it gives and neither holds nor imports.
NAMES: dict[str, str] = {
    "accelerate.accelerator": (
        "AORecipeKwargs AcceleratedOptimizer AcceleratedScheduler DataLoaderDispatcher DeepSpeedPlugin "
        "DistributedDataParallelKwargs FP8RecipeKwargs FullyShardedDataParallelPlugin GradScalerKwargs "
        "GeneralTracker InitProcessGroupKwargs LOGGER_TYPE_TO_CLASS LoggerType MSAMPRecipeKwargs MegatronLMPlugin PartialState "
        "PrecisionType ProfileKwargs TERecipeKwargs TorchTensorParallelPlugin _attach_context_parallel_hooks "
        "_refuse_recurrent_layers_under_sequence_parallelism apply_fp8_autowrap check_os_kernel "
        "clean_state_dict_for_safetensors compare_versions compile_regions compile_regions_deepspeed "
        "compile_regions_fsdp2 convert_model convert_outputs_to_fp32 ensure_weights_retied "
        "extract_model_from_parallel filter_trackers fsdp2_apply_ac fsdp2_switch_optimizer_parameters gather gather_object "
        "get_fsdp2_grad_scaler get_grad_scaler get_mixed_precision_context_manager get_model_tp_size "
        "get_pretty_name has_offloaded_params is_bf16_available is_bitsandbytes_multi_backend_available "
        "is_compiled_module is_deepspeed_available is_lomo_available is_megatron_lm_available is_mlu_available "
        "is_msamp_available is_musa_available is_npu_available is_torch_version is_torch_xla_available "
        "is_torchao_available is_transformer_engine_available is_xpu_available load_accelerator_state "
        "load_custom_state load_fsdp_model load_fsdp_optimizer pad_across_processes parse_choice_from_env "
        "recursively_apply reduce release_memory save save_accelerator_state save_custom_state save_fsdp_model "
        "save_fsdp_optimizer wait_for_everyone"
    ),
    "accelerate.base.constants": (
        "BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_SP_AVAILABLE_DEEPSPEED_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION "
        "CUDA_DISTRIBUTED_TYPES DTENSOR_PYTORCH_VERSION ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION FSDP2_PYTORCH_VERSION "
        "FSDP_PYTORCH_VERSION MITA_PROFILING_AVAILABLE_PYTORCH_VERSION SAGEMAKER_PARALLEL_EC2_INSTANCES SAGEMAKER_PYTHON_VERSION "
        "SAGEMAKER_PYTORCH_VERSION SAGEMAKER_TRANSFORMERS_VERSION SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING "
        "TORCH_DISTRIBUTED_OPERATION_TYPES TORCH_LAUNCH_PARAMS XPU_PROFILING_AVAILABLE_PYTORCH_VERSION"
    ),
    "accelerate.big_modeling": (
        "OffloadedWeightsLoader _attach_context_parallel_hooks "
        "_refuse_recurrent_layers_under_sequence_parallelism check_cuda_p2p_ib_support "
        "extract_submodules_state_dict get_balanced_memory infer_auto_device_map is_bnb_available "
        "is_mlu_available is_musa_available is_neuron_available is_npu_available is_sdaa_available "
        "is_xpu_available offload_state_dict recursive_getattr"
    ),
    "accelerate.checkpointing": (
        "get_logger get_pretty_name is_cuda_available is_hpu_available is_mlu_available is_musa_available "
        "is_neuron_available is_sdaa_available is_torch_version is_torch_xla_available is_xpu_available"
    ),
    "accelerate.commands.accelerate_cli": (
        "env_command_parser estimate_command_parser get_config_parser launch_command_parser merge_command_parser "
        "test_command_parser to_fsdp2_command_parser tpu_command_parser"
    ),
    "accelerate.commands.config.cluster": (
        "ComputeEnvironment DistributedType _ask_field _ask_options _convert_distributed_mode "
        "_convert_dynamo_backend _convert_fp8_backend _convert_mixed_precision _convert_yes_no_to_bool "
        "is_deepspeed_available is_fp8_available is_hpu_available is_mlu_available is_mps_available "
        "is_msamp_available is_musa_available is_neuron_available is_npu_available is_sdaa_available "
        "is_torchao_available is_transformer_engine_available is_transformers_available is_xpu_available"
    ),
    "accelerate.commands.config.config": (
        "ComputeEnvironment _ask_field _ask_options _convert_compute_environment cache_dir default_config_file "
        "default_yaml_config_file get_cluster_input get_sagemaker_input load_config_from_file"
    ),
    "accelerate.commands.config.config_utils": (
        "BulletMenu ComputeEnvironment DistributedType DynamoBackend FP8BackendType PrecisionType "
        "SageMakerDistributedType _ask_field _ask_options _convert_compute_environment _convert_distributed_mode "
        "_convert_dynamo_backend _convert_fp8_backend _convert_mixed_precision "
        "_convert_sagemaker_distributed_mode _convert_yes_no_to_bool"
    ),
    "accelerate.commands.config.default": (
        "SubcommandHelpFormatter is_hpu_available is_mlu_available is_musa_available is_neuron_available "
        "is_npu_available is_sdaa_available is_xpu_available"
    ),
    "accelerate.commands.config.sagemaker": (
        "SageMakerDistributedType _ask_field _ask_options _convert_dynamo_backend _convert_mixed_precision "
        "_convert_sagemaker_distributed_mode _convert_yes_no_to_bool is_boto3_available"
    ),
    "accelerate.commands.config.update": "SubcommandHelpFormatter default_config_file load_config_from_file",
    "accelerate.commands.env": (
        "default_config_file is_mlu_available is_mps_available is_musa_available is_neuron_available "
        "is_npu_available is_sdaa_available is_xpu_available load_config_from_file"
    ),
    "accelerate.commands.estimate": (
        "CustomArgumentParser calculate_maximum_sizes convert_bytes init_empty_weights is_timm_available "
        "is_transformers_available"
    ),
    "accelerate.commands.launch": (
        "_validate_launch_command simple_launcher multi_gpu_launcher deepspeed_launcher tpu_launcher tpu_pod_launcher "
        "sagemaker_launcher options_to_group DYNAMO_BACKENDS DEEPSPEED_MULTINODE_LAUNCHERS TORCH_DYNAMO_MODES "
        "ComputeEnvironment DistributedType PrepareForLaunch SageMakerConfig _filter_args "
        "check_cuda_p2p_ib_support convert_dict_to_env_variables default_config_file get_int_from_env "
        "is_bf16_available is_deepspeed_available is_hpu_available is_mlu_available is_musa_available "
        "is_neuron_available is_npu_available is_rich_available is_sagemaker_available is_sdaa_available "
        "is_torch_xla_available is_xpu_available load_config_from_file patch_environment "
        "prepare_deepspeed_cmd_env prepare_multi_gpu_env prepare_sagemager_args_inputs "
        "prepare_simple_launcher_cmd_env prepare_tpu str_to_bool"
    ),
    "accelerate.commands.merge": "CustomArgumentParser merge_fsdp_weights",
    "accelerate.commands.test": "execute_subprocess_async path_in_accelerate_package",
    "accelerate.commands.to_fsdp2": "CustomArgumentParser",
    "accelerate.commands.tpu": "default_config_file load_config_from_file",
    "accelerate.commands.utils": "_StoreAction _StoreConstAction _StoreTrueAction",
    "accelerate.data_loader": (
        "DataLoaderDispatcher PackingCollator TokenBudgetSampler DistributedType GradientState PartialState RNGType broadcast broadcast_object_list compare_versions "
        "concatenate find_batch_size get_data_structure get_logger initialize_tensors is_datasets_available "
        "is_torch_version is_torch_xla_available is_torchdata_stateful_dataloader_available send_to_device "
        "slice_tensors synchronize_rng_states"
    ),
    "accelerate.hooks": (
        "PartialState _compiler_disable clear_device_cache find_device get_non_persistent_buffers "
        "is_mlu_available is_musa_available is_npu_available recursive_getattr send_to_device "
        "set_module_tensor_to_device"
    ),
    "accelerate.inference": (
        "calculate_maximum_sizes convert_bytes copy_tensor_to_devices is_pippy_available pad_input_tensors"
    ),
    "accelerate.launchers": (
        "AcceleratorState PartialState PrecisionType PrepareForLaunch are_libraries_initialized "
        "check_cuda_p2p_ib_support get_current_device_type get_gpu_info is_mps_available is_rocm_available "
        "is_torch_version"
    ),
    "accelerate.local_sgd": "Accelerator DistributedType",
    "accelerate.logging": "PartialState",
    "accelerate.optimizer": "DistributedType honor_type is_lomo_available is_torch_xla_available move_to_device",
    "accelerate.parallelism_config": (
        "DeepSpeedSequenceParallelConfig DistributedType TorchContextParallelConfig TorchTensorParallelConfig is_torch_version"
    ),
    "accelerate.state": (
        "DistributedType GradientAccumulationPlugin SageMakerDistributedType ThreadLocalSharedDict check_cuda_fp8_capability check_cuda_p2p_ib_support deepspeed_required "
        "get_cpu_distributed_information get_int_from_env is_datasets_available is_deepspeed_available "
        "is_habana_gaudi1 is_hpu_available is_mlu_available is_mps_available is_musa_available "
        "is_neuron_available is_npu_available is_sdaa_available is_torch_xla_available is_xccl_available "
        "is_xpu_available parse_choice_from_env parse_flag_from_env set_numa_affinity"
    ),
    "accelerate.test_utils.testing": (
        "check_cuda_fp8_capability compare_versions is_aim_available is_bnb_available is_clearml_available "
        "is_comet_ml_available is_cuda_available is_datasets_available is_deepspeed_available "
        "is_dvclive_available is_fp16_available is_fp8_available is_habana_gaudi1 is_hpu_available "
        "is_import_timer_available is_matplotlib_available is_mlflow_available is_mlu_available is_mps_available "
        "is_musa_available is_neuron_available is_npu_available is_pandas_available is_peft_available "
        "is_pippy_available is_pytest_available is_schedulefree_available is_sdaa_available is_swanlab_available "
        "is_tensorboard_available is_timm_available is_torch_version is_torch_xla_available is_torchao_available "
        "is_torchdata_stateful_dataloader_available is_torchvision_available is_trackio_available "
        "is_transformer_engine_available is_transformer_engine_mxfp8_available is_transformers_available "
        "is_triton_available is_wandb_available is_xpu_available str_to_bool"
    ),
    "accelerate.test_utils.training": "DistributedType",
    "accelerate.tracking": (
        "LoggerType PartialState _available_trackers compare_versions get_logger is_aim_available "
        "is_clearml_available is_comet_ml_available is_dvclive_available is_mlflow_available is_swanlab_available "
        "is_tensorboard_available is_trackio_available is_wandb_available listify logger str_to_bool"
    ),
    "accelerate.utils.ao": "is_torchao_available",
    "accelerate.utils.bnb": (
        "BnbQuantizationConfig _replace_with_bnb_layers dispatch_model find_tied_parameters get_balanced_memory "
        "infer_auto_device_map init_empty_weights is_4bit_bnb_available is_8bit_bnb_available "
        "load_checkpoint_in_model offload_weight set_module_tensor_to_device"
    ),
    "accelerate.utils.dataclasses": (
        "compare_versions is_cuda_available is_hpu_available is_mlu_available is_msamp_available "
        "is_musa_available is_neuron_available is_npu_available is_rocm_available is_torch_version "
        "is_torchao_available is_transformer_engine_available is_xpu_available parse_flag_from_env str_to_bool"
    ),
    "accelerate.utils.deepspeed": "DistributedType compare_versions is_bnb_available",
    "accelerate.utils.environment": "_parse_cpu_list",
    "accelerate.utils.fsdp_utils": (
        "get_module_children_bottom_up get_module_class_from_name get_non_persistent_buffers is_torch_version save"
    ),
    "accelerate.utils.imports": "deepspeed_required is_torch_version patch_environment str_to_bool",
    "accelerate.utils.launch": (
        "DynamoBackend PrecisionType SageMakerConfig SageMakerDistributedType compare_versions is_fp8_available "
        "is_hpu_available is_mlu_available is_musa_available is_neuron_available is_npu_available "
        "is_sdaa_available is_torch_xla_available is_xpu_available merge_dicts str_to_bool"
    ),
    "accelerate.utils.megatron_lm": "MegatronEngine recursively_apply send_to_device",
    "accelerate.utils.memory": (
        "is_cuda_available is_hpu_available is_mlu_available is_mps_available is_musa_available "
        "is_neuron_available is_npu_available is_sdaa_available is_xpu_available"
    ),
    "accelerate.utils.modeling": (
        "AcceleratorState AutocastKwargs DistributedType CustomDtype _get_param_device _init_infer_auto_device_map clear_device_cache is_hpu_available "
        "is_mlu_available is_mps_available is_musa_available is_npu_available is_peft_available is_sdaa_available "
        "is_torch_version is_torch_xla_available is_tqdm_available is_xpu_available load_offloaded_weight "
        "offload_weight save_offload_index tqdm"
    ),
    "accelerate.utils.operations": (
        "AcceleratorState DistributedType PartialState TensorInformation is_npu_available "
        "is_torch_distributed_available is_torch_version is_torch_xla_available"
    ),
    "accelerate.utils.other": (
        "DistributedType convert_model get_logger id_tensor_storage is_deepspeed_available is_numpy_available "
        "is_torch_distributed_available is_torch_version is_torch_xla_available is_weights_only_available "
        "write_basic_config"
    ),
    "accelerate.utils.random": (
        "CUDA_DISTRIBUTED_TYPES AcceleratorState DistributedType is_hpu_available is_mlu_available is_musa_available is_neuron_available "
        "is_npu_available is_sdaa_available is_torch_xla_available is_xpu_available"
    ),
    "accelerate.utils.tqdm": "PartialState is_tqdm_available",
    "accelerate.utils.transformer_engine": "GatheredParameters",
}

HOME_OF = {name: home for home, names in HOMES.items() for name in names.split()}
