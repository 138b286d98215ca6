"""Models of transformers as models of Megatron core: the arguments of core's classes, and the conversion of weights.

A row maps tensors of transformers to one of core's parameters. Core's tensor has their rows in another order, so that its
equal parts along one dimension are the ranks' parts. Import applies this permutation, and export undoes it.

Source: https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/models/models.gpt.html
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from accelerate.checkpoint.state import from_first_rank
from accelerate.extensions.megatron.plugin import MegatronLMPlugin, unknown_model

# Core's modules, and the corresponding ones of a Llama and a GPT-2: in each layer, and around the layers.
_PREFIXES = ("decoder.layers.{}.", "model.layers.{}.", "transformer.h.{}.")
_INSIDE = (
    ("input_layernorm", "input_layernorm", "ln_1"),
    ("self_attention.linear_qkv", "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "attn.c_attn"),
    ("self_attention.linear_proj", "self_attn.o_proj", "attn.c_proj"),
    ("pre_mlp_layernorm", "post_attention_layernorm", "ln_2"),
    ("mlp.linear_fc1", "mlp.gate_proj mlp.up_proj", "mlp.c_fc"),
    ("mlp.linear_fc2", "mlp.down_proj", "mlp.c_proj"),
)
_AROUND = (
    ("embedding.word_embeddings", "model.embed_tokens", "transformer.wte"),
    ("embedding.position_embeddings", "", "transformer.wpe"),
    ("decoder.final_layernorm", "model.norm", "transformer.ln_f"),
    ("output_layer", "lm_head", "lm_head"),
)
# Arguments of core's classes unless the user sets them. Kernels that need Apex or a compiler are off. Lengths are exchanged
# among stages, so that batches may differ; core then requires "alltoall", also without experts.
_USUAL: dict[str, Any] = {
    **dict.fromkeys(("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"), False),
    **dict.fromkeys(("gradient_accumulation_fusion", "persist_layer_norm"), False),
    **dict.fromkeys(("variable_seq_lengths", "grad_reduce_in_fp32"), True),
    "moe_token_dispatcher_type": "alltoall",
    "optimizer_offload_fraction": 1.0,  # of the optimizer that is offloaded; core's own is nothing
}


@dataclass(frozen=True)
class Row:
    """One of core's parameters.

    Attributes:
        core: its name, the layers counted through all stages.
        sources: the names of the tensors that it is made of.
        blocks: number of groups of its rows with an equal part of all sources: groups of heads, or ranks.
        pieces: number of consecutive pieces in each source.
        transposed: whether the sources are transposed.
    """

    core: str
    sources: tuple[str, ...]
    blocks: int
    pieces: int
    transposed: bool

    def pack(self, tensors: Sequence[torch.Tensor], rows: int) -> torch.Tensor:
        """Return core's full tensor, padded with zeros to a number of rows."""
        turned = [tensor.t() if self.transposed else tensor for tensor in tensors]
        whole = torch.cat(turned)[self._order([len(tensor) for tensor in turned])]
        return nn.functional.pad(whole, [0, 0] * (whole.dim() - 1) + [0, rows - len(whole)])

    def unpack(self, whole: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
        """Return the tensors that it was made of, which have these shapes."""
        lengths = [shape[-1 if self.transposed else 0] for shape in shapes]
        parts = whole[self._order(lengths).argsort()].split(lengths)
        return [(part.t() if self.transposed else part).contiguous() for part in parts]

    def _order(self, lengths: list[int]) -> torch.Tensor:
        """Return, for each row of core's tensor, the number of its row in the concatenated sources."""
        parts = [part for places in torch.arange(sum(lengths)).split(lengths) for part in places.chunk(self.pieces)]
        return torch.cat([part.reshape(self.blocks, -1) for part in parts], 1).flatten()


# By the type of a model: its column of the modules, its required configuration, and arguments of core's classes besides sizes.
_FAMILIES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "llama": (
        1,
        {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        {
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "activation_func": nn.functional.silu,
        },
    ),
    "gpt2": (
        2,
        {
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            **dict.fromkeys(("scale_attn_by_inverse_layer_idx", "add_cross_attention"), False),
        },
        {
            "normalization": "LayerNorm",
            "activation_func": nn.GELU("tanh"),
            "position_embedding_type": "learned_absolute",
        },
    ),
}


def _rotary(config: Any) -> dict[str, Any]:
    """Return the arguments of core's classes that describe a Llama's positions."""
    usual = {"rope_theta": getattr(config, "rope_theta", 10000.0), **(getattr(config, "rope_scaling", None) or {})}
    rope = getattr(config, "rope_parameters", None) or usual
    # Core's own numbers of this kind; only the factor is passed.
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    scaled = rope.get("rope_type") == "llama3" and all(rope.get(name) == value for name, value in fixed.items())
    if not scaled and rope.get("rope_type", "default") != "default":
        raise NotImplementedError(
            f"rope_parameters={rope}: Megatron core has the types 'default' and 'llama3' with {fixed}."
        )
    scaling = {"rope_scaling": scaled, "rope_scaling_factor": rope.get("factor", 8.0)}
    return {"position_embedding_type": "rope", "rotary_base": rope["rope_theta"], **scaling}


class Norm:
    """Builds torch's norm of a configuration; core's own needs Apex where sequences are shared."""

    def __new__(  # type: ignore[misc]  # core calls a class
        cls, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> nn.Module:
        """Return it, its parameters marked as those whose gradients the ranks of a layer add up."""
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # core's mark
        return norm


def build(kind: Callable[..., Any], arguments: Mapping[str, Any], **more: Any) -> Any:
    """Return one of core's classes, built from those of Megatron's arguments that it takes; `more` are overridden by them."""
    names = inspect.signature(kind).parameters
    return kind(**more | {name: value for name, value in arguments.items() if name in names and value is not None})


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
        config: Any = model.config
        arguments = plugin.core_arguments()
        ranks: int = plugin.tp_degree  # type: ignore[assignment]  # no degree is None
        if config.model_type not in _FAMILIES:
            raise unknown_model(config.model_type)
        column, required, options = _FAMILIES[config.model_type]
        for name, value in required.items():
            if getattr(config, name, value) != value:
                raise NotImplementedError(
                    f"{name}={getattr(config, name)!r} in the model's configuration: Megatron-LM trains it here only with {name}={value!r}. Use "
                    "FullyShardedDataParallelPlugin."
                )
        if config.model_type == "llama":
            options = options | _rotary(config)
        # Rows of the vocabulary: many numbers of ranks divide them, so that another one reads a checkpoint.
        unit = math.lcm(128, ranks)
        sizes = {
            "ffn_hidden_size": arguments["ffn_hidden_size"] or 4 * arguments["hidden_size"],
            "vocab_size": math.ceil(arguments["orig_vocab_size"] / unit) * unit,
            "max_sequence_length": arguments["max_position_embeddings"],
            "share_embeddings_and_output_weights": bool(getattr(config, "tie_word_embeddings", True)),
        }
        self.plugin, self.arguments = plugin, _USUAL | options | arguments | sizes
        self.shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self.rows = self._rows(column, ranks)
        translated = {name for row in self.rows for name in row.sources}
        if others := sorted(self.shapes.keys() ^ translated):
            raise ValueError(
                f"{type(model).__name__} is no plain decoder with a head: {others[:5]}. Pass the ...ForCausalLM or ...LMHeadModel."
            )

    def _rows(self, column: int, ranks: int) -> list[Row]:
        """Return a row for each of core's parameters, of all stages."""
        names, rows = [(row[0], row[column].split()) for row in _AROUND], []
        for layer in range(self.arguments["num_layers"]):
            core_layer, their_layer = (_PREFIXES[place].format(layer) for place in (0, column))
            names += [(core_layer + row[0], [their_layer + name for name in row[column].split()]) for row in _INSIDE]
        groups = self.arguments.get("num_query_groups") or self.arguments["num_attention_heads"]
        for core, model_names in names:
            attention, inside = core.endswith("linear_qkv"), core.startswith("decoder.layers.")
            blocks = groups if attention else ranks if len(model_names) > 1 else 1
            pieces = 3 if attention and len(model_names) == 1 else 1
            for end in ("weight", "bias"):
                sources = tuple(f"{name}.{end}" for name in model_names)
                if sources and (end == "weight" or sources[0] in self.shapes):
                    rows.append(Row(f"{core}.{end}", sources, blocks, pieces, transposed=inside and column == 2))
        return rows

    def build(self, dtype: torch.dtype) -> Any:
        """Return this rank's part of the model, with weights of chance. After core's groups were made."""
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
        from megatron.core.transformer.transformer_config import TransformerConfig

        # The ranks of a layer drop the same values, however they were seeded; each stage drops others.
        seed = from_first_rank(torch.initial_seed() % 2**31)
        model_parallel_cuda_manual_seed(seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
        self.arguments |= {"params_dtype": dtype, "pipeline_dtype": dtype}
        config = build(TransformerConfig, self.arguments)
        layer = get_gpt_layer_local_spec(normalization=config.normalization)
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        model = build(
            GPTModel,
            self.arguments,
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules([layer] * get_num_layers_to_build(config), Norm),
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
        # Rows that fill up are no tokens: nothing is to be predicted there.
        part = self.arguments["vocab_size"] // self.plugin.tp_degree
        beyond = (parallel_state.get_tensor_model_parallel_rank() + 1) * part - self.arguments["orig_vocab_size"]
        if model.post_process and beyond > 0:
            model.output_layer.register_forward_hook(partial(_hide, min(beyond, part)))
        return model


def _hide(count: int, module: nn.Module, inputs: Any, output: Any) -> Any:
    logits, bias = output
    logits[..., -count:] = torch.finfo(logits.dtype).min
    return logits, bias
