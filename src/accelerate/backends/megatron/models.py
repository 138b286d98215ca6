"""Models of transformers as models of Megatron core: what core is told of them, and how weights go in and come out.

A row says which of core's parameters is made of which of theirs, and how. A tensor that is cut over ranks is arranged so that its equal
parts along one dimension are what the ranks have.

Source: https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/models/models.gpt.html
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import nn

from accelerate.config.megatron import MegatronLMPlugin, unknown_model

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """What decides how a tensor is arranged.

    Attributes:
        ranks: how many share a layer.
        groups: of heads, each with one key and one value.
        queries: of each group.
        vocabulary: tokens of the model.
    """

    ranks: int
    groups: int
    queries: int
    vocabulary: int

    @property
    def filled(self) -> int:
        """Rows for the vocabulary: many numbers of ranks divide them, so that another one reads a checkpoint."""
        unit = math.lcm(128, self.ranks)
        return math.ceil(self.vocabulary / unit) * unit


@dataclass(frozen=True)
class Row:
    """One of core's parameters: its name, the names of theirs, with {} for the layer, how they are arranged, and whether theirs are transposed."""

    core: str
    theirs: tuple[str, ...]
    kind: str = "same"
    transposed: bool = False

    def pack(self, theirs: Tensors, sizes: Sizes) -> torch.Tensor:
        """Return core's whole tensor."""
        return _PACK[self.kind]([self._turned(one) for one in theirs], sizes)

    def unpack(self, whole: torch.Tensor, sizes: Sizes) -> Tensors:
        """Return the tensors that it was made of."""
        return [self._turned(one).contiguous() for one in _UNPACK[self.kind](whole, sizes)]

    def _turned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.t() if self.transposed else tensor


def _pack_heads(parts: Tensors, sizes: Sizes) -> torch.Tensor:
    rest = parts[0].shape[1:]
    return torch.cat([part.reshape(sizes.groups, -1, *rest) for part in parts], dim=1).reshape(-1, *rest)


def _unpack_heads(whole: torch.Tensor, sizes: Sizes) -> Tensors:
    rest = whole.shape[1:]
    by_group = whole.reshape(sizes.groups, sizes.queries + 2, -1, *rest)
    return [part.reshape(-1, *rest) for part in by_group.split([sizes.queries, 1, 1], dim=1)]


def _pack_vocabulary(parts: Tensors, sizes: Sizes) -> torch.Tensor:
    return nn.functional.pad(parts[0], (0, 0, 0, sizes.filled - sizes.vocabulary))


_PACK: dict[str, Callable[[Tensors, Sizes], torch.Tensor]] = {
    "same": lambda parts, sizes: parts[0],
    "vocabulary": _pack_vocabulary,
    "heads": _pack_heads,
    # A rank has its part of each, one after the other.
    "gated": lambda parts, sizes: torch.cat(
        [p.chunk(sizes.ranks)[rank] for rank in range(sizes.ranks) for p in parts]
    ),
    "joined heads": lambda parts, sizes: _pack_heads(list(parts[0].chunk(3)), sizes),
}
_UNPACK: dict[str, Callable[[torch.Tensor, Sizes], Tensors]] = {
    "same": lambda whole, sizes: [whole],
    "vocabulary": lambda whole, sizes: [whole[: sizes.vocabulary]],
    "heads": _unpack_heads,
    "gated": lambda whole, sizes: [torch.cat(whole.chunk(2 * sizes.ranks)[part::2]) for part in (0, 1)],
    "joined heads": lambda whole, sizes: [torch.cat(_unpack_heads(whole, sizes))],
}


def _llama(config: Any) -> tuple[dict[str, Any], dict[str, Any], list[Row]]:
    rope = getattr(config, "rope_parameters", None) or {
        "rope_theta": getattr(config, "rope_theta", 10000.0),
        **(getattr(config, "rope_scaling", None) or {}),
    }
    kind = rope.get("rope_type", "default")
    # Core's own numbers of this kind; only the factor is told.
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    scaled = kind == "llama3" and all(rope.get(name) == value for name, value in fixed.items())
    _require(config, hidden_act="silu", attention_bias=False, mlp_bias=False)
    if not scaled and kind != "default":
        raise NotImplementedError(
            f"rope_parameters={rope}: Megatron core has the types 'default' and 'llama3' with {fixed}."
        )
    options = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "activation_func": nn.functional.silu,
    }
    extra = {"position_embedding_type": "rope", "rotary_base": rope["rope_theta"]}
    extra |= {"rope_scaling": scaled, "rope_scaling_factor": rope.get("factor", 8.0)}
    layer, core = "model.layers.{}.", "decoder.layers.{}."
    inside = {
        "input_layernorm": ("same", "input_layernorm"),
        "self_attention.linear_qkv": ("heads", *(f"self_attn.{name}_proj" for name in "qkv")),
        "self_attention.linear_proj": ("same", "self_attn.o_proj"),
        "pre_mlp_layernorm": ("same", "post_attention_layernorm"),
        "mlp.linear_fc1": ("gated", "mlp.gate_proj", "mlp.up_proj"),
        "mlp.linear_fc2": ("same", "mlp.down_proj"),
    }
    rows = [Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary")]
    for name, (kind, *theirs) in inside.items():
        rows.append(Row(f"{core}{name}.weight", tuple(f"{layer}{one}.weight" for one in theirs), kind))
    rows += [
        Row("decoder.final_layernorm.weight", ("model.norm.weight",)),
        Row("output_layer.weight", ("lm_head.weight",), "vocabulary"),
    ]
    return options, extra, rows


def _gpt2(config: Any) -> tuple[dict[str, Any], dict[str, Any], list[Row]]:
    plain = {"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "add_cross_attention": False}
    _require(config, activation_function="gelu_new", **plain)
    options = {"normalization": "LayerNorm", "activation_func": partial(nn.functional.gelu, approximate="tanh")}
    layer, core = "transformer.h.{}.", "decoder.layers.{}."
    inside = {
        "input_layernorm": ("ln_1", "same", False),
        "self_attention.linear_qkv": ("attn.c_attn", "joined heads", True),
        "self_attention.linear_proj": ("attn.c_proj", "same", True),
        "pre_mlp_layernorm": ("ln_2", "same", False),
        "mlp.linear_fc1": ("mlp.c_fc", "same", True),
        "mlp.linear_fc2": ("mlp.c_proj", "same", True),
    }
    rows = [
        Row("embedding.word_embeddings.weight", ("transformer.wte.weight",), "vocabulary"),
        Row("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
    ]
    for name, (theirs, kind, turned) in inside.items():
        for end in ("weight", "bias"):
            rows.append(Row(f"{core}{name}.{end}", (f"{layer}{theirs}.{end}",), kind, turned and end == "weight"))
    rows += [Row(f"decoder.final_layernorm.{end}", (f"transformer.ln_f.{end}",)) for end in ("weight", "bias")]
    return (
        options,
        {"position_embedding_type": "learned_absolute"},
        [*rows, Row("output_layer.weight", ("lm_head.weight",), "vocabulary")],
    )


# By the type of a model: what core's configuration is told, what GPTModel is told, and the rows.
_FAMILIES = {"llama": _llama, "gpt2": _gpt2}


def _require(config: Any, **wanted: Any) -> None:
    for name, value in wanted.items():
        if getattr(config, name, value) != value:
            raise NotImplementedError(
                f"{name}={getattr(config, name)!r} in the model's configuration: Megatron-LM trains it here with {name}={value!r} alone. Use "
                "FullyShardedDataParallelPlugin."
            )


class Norm:
    """Builds torch's norm of a configuration; core's own needs Apex where sequences are shared."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> nn.Module:
        """Return it, its parameters marked as those whose gradients the ranks of a layer add up."""
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        made = kind(hidden_size, eps=eps)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return made


def chosen(kind: type, arguments: Mapping[str, Any], **more: Any) -> Any:
    """Return one of core's configurations from those of Megatron's arguments that it has; `more` are overridden by them."""
    own = {field.name for field in fields(kind) if field.init}
    return kind(**more | {name: value for name, value in arguments.items() if name in own and value is not None})


class Translation:
    """A transformers model as core's: its configuration, the model of this rank, and each parameter's names.

    Args:
        plugin: its sizes are read from the model.
        model: of transformers.

    Raises:
        NotImplementedError: its type, or a setting of its configuration, is not trained here.
        ValueError: it has weights that no row names.
    """

    def __init__(self, plugin: MegatronLMPlugin, model: nn.Module) -> None:
        plugin.set_network_size_args(model)
        kind, config = model.config.model_type, model.config
        if kind not in _FAMILIES:
            raise unknown_model(kind)
        self.options, self.extra, self.rows = _FAMILIES[kind](config)
        self.arguments = arguments = dict(plugin.megatron_lm_default_args)
        arguments["ffn_hidden_size"] = arguments["ffn_hidden_size"] or 4 * arguments["hidden_size"]
        heads = arguments["num_attention_heads"]
        groups = arguments.get("num_query_groups") or heads
        self.sizes = Sizes(plugin.tp_degree, groups, heads // groups, arguments["orig_vocab_size"])
        self.tied = bool(getattr(config, "tie_word_embeddings", True))
        known = {name for _, names in self.named() for name in names}
        if others := sorted(model.state_dict().keys() ^ known):
            raise ValueError(
                f"{type(model).__name__} is no plain decoder with a head: {others[:5]}. Pass the ...ForCausalLM or ...LMHeadModel."
            )

    def named(self) -> Iterator[tuple[tuple[Row, str], list[str]]]:
        """Yield each row with core's name, the layers counted through all stages, and the names of theirs."""
        for row in self.rows:
            for number in range(self.arguments["num_layers"]) if "{}" in row.core else [0]:
                yield (row, row.core.format(number)), [name.format(number) for name in row.theirs]

    def build(self, plugin: MegatronLMPlugin, dtype: torch.dtype) -> nn.Module:
        """Return this rank's part of the model, with weights of chance. After core's groups were made."""
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
        from megatron.core.transformer.transformer_config import TransformerConfig

        arguments = dict(self.arguments)
        if not plugin._recomputes:
            arguments.update(dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers")))
        arguments.pop("attention_backend", None)  # core's own attention is the local one
        custom = plugin.custom_train_step_class or plugin.custom_loss_function
        arguments["calculate_per_token_loss"] = plugin.calculate_per_token_loss and not custom
        # Lengths are exchanged among stages, so that batches may differ; fused kernels need Apex or a compiler, and can be asked for.
        unfused = (
            "bias_activation_fusion",
            "bias_dropout_fusion",
            "gradient_accumulation_fusion",
            "masked_softmax_fusion",
        )
        config = chosen(
            TransformerConfig,
            arguments,
            **self.options,
            **dict.fromkeys((*unfused, "persist_layer_norm"), False),
            variable_seq_lengths=True,
            moe_token_dispatcher_type="alltoall",  # it asks for this beside variable lengths, also without experts
            params_dtype=dtype,
            pipeline_dtype=dtype,
            num_layers_in_last_pipeline_stage=plugin.decoder_last_pipeline_num_layers,
        )
        layer = get_gpt_layer_local_spec(normalization=config.normalization)
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        block = TransformerBlockSubmodules([layer] * get_num_layers_to_build(config), Norm)
        made = GPTModel(
            config,
            block,
            self.sizes.filled,
            self.arguments["max_position_embeddings"],
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=self.tied,
            **self.extra,
        )
        # Rows that fill up are no tokens: nothing is to be predicted there.
        part = self.sizes.filled // self.sizes.ranks
        beyond = (parallel_state.get_tensor_model_parallel_rank() + 1) * part - self.sizes.vocabulary
        if made.post_process and beyond > 0:
            made.output_layer.register_forward_hook(partial(_hide, min(beyond, part)))
        return made


def _hide(count: int, module: nn.Module, inputs: Any, output: Any) -> Any:
    logits, bias = output
    logits[..., -count:] = torch.finfo(logits.dtype).min
    return logits, bias
