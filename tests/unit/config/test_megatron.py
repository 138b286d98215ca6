import types

import pytest
import torch

from accelerate.config import megatron
from accelerate.config.megatron import MegatronLMPlugin as Plugin
from accelerate.config.megatron import find_parser
from cases import cases

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


def test_logging_options_need_the_library(monkeypatch):
    monkeypatch.setattr(megatron, "is_megatron_lm_available", lambda: False)
    with pytest.raises(ImportError, match="Megatron-LM"):
        Plugin(tensorboard_dir="logs", set_all_logging_options=True)
    with pytest.raises(ValueError, match="model_type is 'tiny'"):
        find_parser("tiny")


def test_arguments():
    plugin = Plugin(recompute_activations=True, consumed_samples=[5], tensorboard_dir="logs")
    arguments = plugin.megatron_lm_default_args
    assert (arguments["recompute_granularity"], arguments["recompute_method"]) == ("selective", None)
    assert arguments["consumed_samples"] == [5, 0, 0] and arguments["tensorboard_dir"] == "logs"
    for kind, name in ((torch.optim.AdamW, "adam"), (torch.optim.SGD, "sgd")):
        plugin.set_optimizer_type(kind([torch.ones(1)], lr=0.5))
        assert (arguments["optimizer"], arguments["lr"]) == (name, 0.5)
    plugin.set_mixed_precision("bf16")
    assert arguments["bf16"] is True and arguments["DDP_impl"] == "local"
    with pytest.raises(ValueError, match="is a Rprop; Megatron-LM has Adam and SGD"):
        plugin.set_optimizer_type(torch.optim.Rprop([torch.ones(1)]))


def scheduler(total=100, warmup=10):
    return types.SimpleNamespace(total_num_steps=total, warmup_num_steps=warmup)


@cases(
    "options, expected",
    ({"lr_decay_style": "cosine"}, {"train_iters": 50, "lr_warmup_iters": 5, "lr_decay_style": "cosine"}),
    ({"train_iters": 7, "lr_warmup_iters": 3}, {"train_iters": 7, "lr_warmup_iters": 3}),
    ({"lr_warmup_fraction": 0.5}, {"lr_warmup_fraction": 0.5, "lr_warmup_iters": 0}),
    ({"train_samples": 50, "lr_warmup_samples": 4}, {"train_samples": None, "lr_warmup_samples": 0}),
)
def test_schedule_counts_steps_of_all_replicas(options, expected):
    plugin = Plugin(**options)
    plugin.set_training_args(micro_batch_size=1, dp_degree=2)
    plugin.set_scheduler_args(scheduler())
    assert {name: plugin.megatron_lm_default_args[name] for name in expected} == expected


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


@pytest.mark.parametrize(
    ("options", "batch", "lengths"), [({}, BATCH, (9, 5)), ({"decoder_seq_length": 3}, None, (16, 3))]
)
def test_t5_has_two_lengths(options, batch, lengths):
    plugin = Plugin(**options)
    plugin.set_network_size_args(model(T5), batch)
    arguments = plugin.megatron_lm_default_args
    assert (arguments["encoder_seq_length"], arguments["decoder_seq_length"]) == lengths
    assert (plugin.encoder_seq_length, plugin.decoder_seq_length) == lengths
