"""Options of a run with Megatron-LM."""

from functools import partial

from accelerate.config.options.general import paradigm
from accelerate.config.options.schema import LOWER, TRUE_OR_FALSE, at_least, fraction, rows

# No interview asks about Megatron-LM: its plugin is for those who write their loop for it.
_megatron = rows(
    "Megatron-LM Arguments",
    "megatron_lm_",
    section="megatron_lm_config",
    feature="megatron",
    env="MEGATRON_LM_*",
    before="fp8_backend",
)
_whole = partial(_megatron, type="int", check=at_least(1))
_bool = partial(_megatron, default=False)
_word = partial(_megatron, style=LOWER)
_truth = partial(_word, words=TRUE_OR_FALSE)
_dropout = partial(_megatron, type="float", check=fraction)

OPTIONS = (
    paradigm("megatron_lm", "Train with Megatron-LM.", env="ACCELERATE_USE_MEGATRON_LM", before="machine_rank"),
    _whole("tp_degree", "Degree of tensor parallelism.", default=1),
    _truth("sequence_parallelism", "Split sequences over the tensor-parallel processes."),
    _whole("pp_degree", "Degree of pipeline parallelism.", default=1),
    _whole("num_micro_batches", "Micro-batches of one pipeline pass."),
    _truth("recompute_activations", "Recompute selected activations."),
    _truth("use_distributed_optimizer", "Shard the optimizer over the data-parallel processes."),
    _megatron("gradient_clipping", "Largest norm of the gradients; 0 is no limit.", default=1.0, check=at_least(0)),
    _word("recompute_granularity", "What is recomputed.", words="full selective"),
    _word("recompute_method", "How full recomputation is spread.", words="uniform block"),
    _whole("recompute_num_layers", "Layers of one unit of recomputation."),
    _word("attention_backend", "Attention kernel.", words="flash fused unfused local auto"),
    _dropout("attention_dropout", "Dropout of the attention."),
    _dropout("hidden_dropout", "Dropout of the hidden layers."),
    _truth("attention_softmax_in_fp32", "Compute the softmax of the attention in fp32."),
    _truth("use_rotary_position_embeddings", "Use rotary position embeddings."),
    _truth("calculate_per_token_loss", "Scale the loss by the number of tokens."),
    _bool("eod_mask_loss", "Exclude end-of-document tokens from the loss."),
    _whole("context_parallel_size", "Degree of context parallelism."),
    _whole("expert_model_parallel_size", "Degree of expert parallelism."),
    _whole("expert_tensor_parallel_size", "Degree of tensor parallelism within an expert."),
    _whole("decoder_last_pipeline_num_layers", "Decoder layers of the last pipeline stage."),
    _bool("use_custom_fsdp", "Use Megatron's own FSDP."),
    _bool("optimizer_cpu_offload", "Run the optimizer on the CPU."),
    _bool("overlap_cpu_optimizer_d2h_h2d", "Overlap the CPU optimizer with the copies to and from the GPU."),
    _bool("use_precision_aware_optimizer", "Use the optimizer that keeps its state in low precision."),
    _bool("no_load_optim", "Do not load the optimizer."),
    _bool("no_save_optim", "Do not save the optimizer."),
)
