import types

import pytest
import torch

from accelerate.config import megatron
from accelerate.config.megatron import (
    MODEL_CONFIGS_TO_MEGATRON_PARSERS,
    add_model_config_to_megatron_parser,
    find_parser,
)
from accelerate.config.megatron import MegatronLMPlugin as Plugin

BATCH = {"input_ids": torch.ones(2, 9, dtype=torch.long), "labels": torch.ones(2, 5, dtype=torch.long)}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 4, "n_positions": 16, "vocab_size": 50}
_USUAL = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4}
_USUAL |= {"max_position_embeddings": 16, "vocab_size": 50}
BERT = {"model_type": "megatron-bert", **_USUAL, "num_labels": 3}
T5 = {"model_type": "t5", "num_layers": 2, "d_model": 8, "num_heads": 4, "n_positions": 16, "vocab_size": 50}
LLAMA = {**BERT, "model_type": "llama"}
GLM = dict(
    _USUAL, model_type="glm4_moe", num_hidden_layers=3, intermediate_size=32, num_key_value_heads=2, rope_theta=1e4,
    first_k_dense_replace=1, n_routed_experts=6, moe_intermediate_size=12, n_shared_experts=2, num_experts_per_tok=2,
    routed_scaling_factor=1.5, tie_word_embeddings=False, eos_token_id=7,
)  # fmt: skip


def model(config, name="Model"):
    made = type(name, (), {})()
    made.config = types.SimpleNamespace(return_dict=True, **config)
    return made


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"tensor_model_parallel_size": 1, "DDP_impl": "torch", "clip_grad": 1.0}),
        ({}, {"recompute_granularity": "full", "recompute_method": "uniform", "consumed_samples": None}),
        ({"recompute_activations": True}, {"recompute_granularity": "selective", "recompute_method": None}),
        ({"pp_degree": 2}, {"DDP_impl": "local"}),
        ({"use_distributed_optimizer": True}, {"DDP_impl": "local"}),
        ({"consumed_samples": [5]}, {"consumed_samples": [5, 0, 0]}),
        ({"other_megatron_args": {"clip_grad": 9.0, "extra": 1}}, {"clip_grad": 9.0, "extra": 1}),
        ({"tensorboard_dir": "logs"}, {"tensorboard_dir": "logs"}),
    ],
)
def test_arguments(options, expected):
    arguments = Plugin(**options).megatron_lm_default_args
    assert {name: arguments[name] for name in expected} == expected
    assert ("tensorboard_dir" in arguments) is ("tensorboard_dir" in options)


def test_logging_options_need_the_library(monkeypatch):
    monkeypatch.setattr(megatron, "is_megatron_lm_available", lambda: False)
    with pytest.raises(ImportError, match="Megatron-LM"):
        Plugin(tensorboard_dir="logs", set_all_logging_options=True)


def scheduler(total=100, warmup=10):
    return types.SimpleNamespace(total_num_steps=total, warmup_num_steps=warmup)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"lr_decay_style": "cosine"}, {"train_iters": 50, "lr_warmup_iters": 5, "lr_decay_style": "cosine"}),
        ({"train_iters": 7, "lr_warmup_iters": 3}, {"train_iters": 7, "lr_warmup_iters": 3}),
        ({"lr_warmup_fraction": 0.5}, {"lr_warmup_fraction": 0.5, "lr_warmup_iters": 0}),
        ({"train_samples": 50, "lr_warmup_samples": 4}, {"train_samples": None, "lr_warmup_samples": 0}),
    ],
)
def test_schedule_counts_steps_of_all_replicas(options, expected):
    plugin = Plugin(**options)
    plugin.set_training_args(micro_batch_size=1, dp_degree=2)
    plugin.set_scheduler_args(scheduler())
    assert {name: plugin.megatron_lm_default_args[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (torch.optim.AdamW, {"betas": (0.5, 0.25)}, {"optimizer": "adam", "adam_beta1": 0.5, "adam_beta2": 0.25}),
        (torch.optim.SGD, {"momentum": 0.75}, {"optimizer": "sgd", "sgd_momentum": 0.75}),
    ],
)
def test_optimizers_are_taken_over_and_half_precision_is_switched_on(kind, options, expected):
    plugin = Plugin()
    plugin.set_optimizer_type(kind([torch.ones(1)], lr=0.5, weight_decay=0.125, **options))
    plugin.set_mixed_precision("bf16")
    expected = {**expected, "lr": 0.5, "weight_decay": 0.125, "bf16": True, "DDP_impl": "local"}
    assert {name: plugin.megatron_lm_default_args[name] for name in expected} == expected
    with pytest.raises(ValueError, match="is a Rprop; Megatron-LM has Adam and SGD"):
        plugin.set_optimizer_type(torch.optim.Rprop([torch.ones(1)]))


def test_schedule_without_lengths():
    with pytest.raises(ValueError, match="set_training_args"):
        Plugin().set_scheduler_args(scheduler())
    plugin = Plugin()
    plugin.set_training_args(1, 1)
    with pytest.raises(ValueError, match="total_num_steps"):
        plugin.set_scheduler_args(scheduler(total=None))


@pytest.mark.parametrize("config", [GPT2, BERT, LLAMA, GLM])
@pytest.mark.parametrize(
    ("options", "batch", "length"), [({}, BATCH, 9), ({}, None, 16), ({"seq_length": 7}, BATCH, 7)]
)
def test_sequence_length(config, options, batch, length):
    plugin = Plugin(**options)
    plugin.set_network_size_args(model(config), batch)
    assert plugin.seq_length == plugin.megatron_lm_default_args["seq_length"] == length


@pytest.mark.parametrize(("config", "name"), [(GPT2, "decoder_seq_length"), (BERT, "encoder_seq_length")])
def test_a_specific_length_wins(config, name):
    plugin = Plugin(seq_length=7, **{name: 4})
    plugin.set_network_size_args(model(config), BATCH)
    assert plugin.seq_length == 4


@pytest.mark.parametrize(
    ("options", "batch", "lengths"), [({}, BATCH, (9, 5)), ({"decoder_seq_length": 3}, None, (16, 3))]
)
def test_t5_has_two_lengths(options, batch, lengths):
    plugin = Plugin(**options)
    plugin.set_network_size_args(model(T5), batch)
    arguments = plugin.megatron_lm_default_args
    assert (arguments["encoder_seq_length"], arguments["decoder_seq_length"]) == lengths
    assert (plugin.encoder_seq_length, plugin.decoder_seq_length) == lengths


def test_bert_pretrains_with_masked_words_and_a_mixture_has_its_experts():
    plugin = Plugin()
    for name, pretrains in (("BertForMaskedLM", True), ("BertForSequenceClassification", False)):
        plugin.set_network_size_args(model(BERT, name))
        assert plugin.megatron_lm_default_args["pretraining_flag"] is pretrains
    plugin.set_network_size_args(model(GLM))
    arguments = plugin.megatron_lm_default_args
    assert arguments["moe_layer_freq"] == [0, 1, 1] and arguments["moe_shared_expert_intermediate_size"] == 24
    assert (arguments["num_experts"], arguments["moe_router_topk"], arguments["kv_channels"]) == (6, 2, 2)
    assert arguments["eos_token_id"] == 7 and "fp8" not in arguments


def test_own_parser(monkeypatch):
    monkeypatch.setattr("accelerate.config.megatron.MODEL_CONFIGS_TO_MEGATRON_PARSERS", {})
    with pytest.raises(ValueError, match="model_type is 'tiny'"):
        find_parser("tiny")

    @add_model_config_to_megatron_parser("tiny")
    def parse(plugin, model, batch_data):
        plugin.megatron_lm_default_args["num_layers"] = model.config.depth

    plugin = Plugin()
    plugin.set_network_size_args(model({"model_type": "Tiny2", "depth": 5}))
    assert plugin.megatron_lm_default_args["num_layers"] == 5
    monkeypatch.undo()  # the longest fitting name wins
    monkeypatch.setitem(MODEL_CONFIGS_TO_MEGATRON_PARSERS, "llama4", "new")
    assert find_parser("llama4_text") == "new"
    assert find_parser("llama").__name__ == "parse_llama_config"
