"""Megatron-LM's network arguments, read from the configuration of a transformers model; one parser per model type."""

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate.config.megatron import MegatronLMPlugin

Parser = Callable[["MegatronLMPlugin", Any, Mapping[str, Any] | None], None]

MODEL_CONFIGS_TO_MEGATRON_PARSERS: dict[str, Parser] = {}


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Parser], Parser]:
    """Register a function that reads the network's sizes for Megatron-LM; for use as a decorator.

    Args:
        model_type: the `model_type` of the model's configuration, or a part of it.

    Returns:
        A decorator for a function of the plugin, the model and a batch (or None). It writes into the plugin's
        `megatron_lm_default_args`.

    Example:
        >>> @add_model_config_to_megatron_parser("tiny")
        ... def parse_tiny(plugin, model, batch_data):
        ...     plugin.megatron_lm_default_args["num_layers"] = model.config.depth
    """

    def register(parser: Parser) -> Parser:
        MODEL_CONFIGS_TO_MEGATRON_PARSERS[model_type] = parser
        return parser

    return register


def find_parser(model_type: str) -> Parser:
    """Return the parser for a model type: its own, else the one with the longest name that it contains.

    Raises:
        ValueError: there is none; the message lists the types that have one.
    """
    wanted = model_type.lower()
    fitting = [name for name in MODEL_CONFIGS_TO_MEGATRON_PARSERS if name in wanted]
    if not fitting:
        raise ValueError(
            f"model_type is {model_type!r}; Megatron-LM's arguments are known for "
            f"{', '.join(sorted(MODEL_CONFIGS_TO_MEGATRON_PARSERS))}. Register a parser for it with "
            "`accelerate.utils.add_model_config_to_megatron_parser`."
        )
    return MODEL_CONFIGS_TO_MEGATRON_PARSERS[max(fitting, key=len)]


def _columns(batch_data: Mapping[str, Any] | None, key: str) -> int | None:
    """Return the length of the sequences in a batch's (batch, sequence) tensor."""
    return None if batch_data is None else batch_data[key].shape[1]


def _one_length(plugin: "MegatronLMPlugin", preferred: str, measured: int | None, limit: int) -> int:
    """Settle `plugin.seq_length` where a more specific length may be set too."""
    specific = getattr(plugin, preferred)
    if specific is not None:
        if plugin.seq_length is not None:
            warnings.warn(
                f"seq_length={plugin.seq_length} is ignored, because {preferred}={specific} is set.", stacklevel=4
            )
        plugin.seq_length = specific
    elif plugin.seq_length is None:
        plugin.seq_length = measured if measured is not None else limit
    return plugin.seq_length


def _long_context_length(plugin: "MegatronLMPlugin", config: Any, batch_data: Mapping[str, Any] | None) -> int:
    """Settle `plugin.seq_length` for models whose position limit is far above what they train on."""
    if plugin.seq_length is None:
        declared = getattr(config, "max_sequence_length", None)
        choices = (
            plugin.decoder_seq_length,
            declared,
            _columns(batch_data, "input_ids"),
            config.max_position_embeddings,
        )
        plugin.seq_length = next(length for length in choices if length is not None)
    return plugin.seq_length


def _set(plugin: "MegatronLMPlugin", model: Any, **arguments: Any) -> None:
    config = model.config
    plugin.megatron_lm_default_args.update(
        orig_vocab_size=config.vocab_size, model_return_dict=config.return_dict, **arguments
    )


@add_model_config_to_megatron_parser("megatron-bert")
def parse_bert_config(
    megatron_lm_plugin: "MegatronLMPlugin", model: Any, batch_data: Mapping[str, Any] | None
) -> None:
    """Read the sizes of a BERT. A class whose name contains MaskedLM is pretrained, any other is fine-tuned.

    Args:
        megatron_lm_plugin: receives the arguments.
        model: the transformers model.
        batch_data: a batch with `input_ids` of shape (batch, sequence), or None.
    """
    config = model.config
    length = _one_length(
        megatron_lm_plugin, "encoder_seq_length", _columns(batch_data, "input_ids"), config.max_position_embeddings
    )
    _set(
        megatron_lm_plugin,
        model,
        seq_length=length,
        model_type_name="bert",
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        pretraining_flag="maskedlm" in type(model).__name__.lower(),
        num_labels=config.num_labels,
    )


@add_model_config_to_megatron_parser("gpt2")
def parse_gpt2_config(
    megatron_lm_plugin: "MegatronLMPlugin", model: Any, batch_data: Mapping[str, Any] | None
) -> None:
    """Read the sizes of a GPT-2.

    Args:
        megatron_lm_plugin: receives the arguments.
        model: the transformers model.
        batch_data: a batch with `input_ids` of shape (batch, sequence), or None.
    """
    config = model.config
    length = _one_length(
        megatron_lm_plugin, "decoder_seq_length", _columns(batch_data, "input_ids"), config.n_positions
    )
    _set(
        megatron_lm_plugin,
        model,
        seq_length=length,
        return_logits=megatron_lm_plugin.return_logits,
        tokenizer_type="GPT2BPETokenizer",
        model_type_name="gpt",
        num_layers=config.n_layer,
        hidden_size=config.n_embd,
        num_attention_heads=config.n_head,
        max_position_embeddings=config.n_positions,
        pretraining_flag=True,
    )


@add_model_config_to_megatron_parser("t5")
def parse_t5_config(megatron_lm_plugin: "MegatronLMPlugin", model: Any, batch_data: Mapping[str, Any] | None) -> None:
    """Read the sizes of a T5.

    Args:
        megatron_lm_plugin: receives the arguments.
        model: the transformers model.
        batch_data: a batch with `input_ids` and `labels` of shape (batch, sequence), or None.
    """
    config = model.config
    for name, key in (("encoder_seq_length", "input_ids"), ("decoder_seq_length", "labels")):
        if getattr(megatron_lm_plugin, name) is None:
            measured = _columns(batch_data, key)
            setattr(megatron_lm_plugin, name, measured if measured is not None else config.n_positions)
    _set(
        megatron_lm_plugin,
        model,
        encoder_seq_length=megatron_lm_plugin.encoder_seq_length,
        decoder_seq_length=megatron_lm_plugin.decoder_seq_length,
        model_type_name="t5",
        num_layers=config.num_layers,
        hidden_size=config.d_model,
        num_attention_heads=config.num_heads,
        max_position_embeddings=config.n_positions,
        pretraining_flag=True,
    )


@add_model_config_to_megatron_parser("llama")
def parse_llama_config(
    megatron_lm_plugin: "MegatronLMPlugin", model: Any, batch_data: Mapping[str, Any] | None
) -> None:
    """Read the sizes of a Llama.

    Args:
        megatron_lm_plugin: receives the arguments.
        model: the transformers model.
        batch_data: a batch with `input_ids` of shape (batch, sequence), or None.
    """
    config = model.config
    _set(
        megatron_lm_plugin,
        model,
        seq_length=_long_context_length(megatron_lm_plugin, config, batch_data),
        return_logits=megatron_lm_plugin.return_logits,
        tokenizer_type="Llama2Tokenizer",
        model_type_name="gpt",
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        pretraining_flag=True,
    )


@add_model_config_to_megatron_parser("glm4_moe")
def parse_glm4_moe_config(
    megatron_lm_plugin: "MegatronLMPlugin", model: Any, batch_data: Mapping[str, Any] | None
) -> None:
    """Read the sizes of a GLM-4.5 mixture of experts.

    Args:
        megatron_lm_plugin: receives the arguments.
        model: the transformers model.
        batch_data: a batch with `input_ids` of shape (batch, sequence), or None.

    Source: https://arxiv.org/abs/2508.06471
    """
    config = model.config
    heads = config.num_attention_heads
    _set(
        megatron_lm_plugin,
        model,
        seq_length=_long_context_length(megatron_lm_plugin, config, batch_data),
        return_logits=megatron_lm_plugin.return_logits,
        tokenizer_type="HuggingFaceTokenizer",
        model_type_name="gpt",
        original_model_type=config.model_type,
        pretraining_flag=False,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=heads,
        kv_channels=config.head_dim if hasattr(config, "head_dim") else config.hidden_size // heads,
        group_query_attention=True,
        num_query_groups=config.num_key_value_heads,
        qk_layernorm=getattr(config, "use_qk_norm", False),
        add_bias_linear=False,
        add_qkv_bias=getattr(config, "attention_bias", True),
        normalization="RMSNorm",
        norm_epsilon=getattr(config, "rms_norm_eps", 1e-5),
        swiglu=True,
        use_flash_attn=True,
        max_position_embeddings=config.max_position_embeddings,
        position_embedding_type="rope",
        rope_type="rope",
        rotary_base=config.rope_theta,
        rotary_percent=getattr(config, "partial_rotary_factor", 0.5),
        untie_embeddings_and_output_weights=not getattr(config, "tie_word_embeddings", False),
        **_glm4_experts(config),
        **_present(config, "eos_token_id", "bf16"),
        **(_present(config, "fp8", "fp8_param", "fp8_param_gather", "fp8_recipe") if hasattr(config, "fp8") else {}),
    )


def _glm4_experts(config: Any) -> dict[str, Any]:
    dense = config.first_k_dense_replace
    return {
        "num_experts": config.n_routed_experts,
        "moe_layer_freq": [int(layer >= dense) for layer in range(config.num_hidden_layers)],
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * getattr(config, "n_shared_experts", 1),
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_pre_softmax": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": 0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
    }


def _present(config: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names if hasattr(config, name)}
