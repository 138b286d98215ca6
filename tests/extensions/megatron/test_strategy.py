"""What reaches Megatron core, by recorded calls of a stand-in: its names are core's own, which `make test-megatron` compares."""

import pytest
import torch
import torch.distributed as dist

import megatron_fake
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs, MegatronLMDummyScheduler, MegatronLMPlugin
from cases import cases

transformers = pytest.importorskip("transformers")

MODEL, OPTIMIZER, REPLICAS = "TransformerConfig", "OptimizerConfig", "DistributedDataParallelConfig"
OFFLOAD = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
NONE_RECOMPUTED = dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers"))


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def llama():
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def gpt2():
    sizes = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def prepared(model, mixed_precision="no", handlers=(), scheduler=None, kind=torch.optim.AdamW, **plugin):
    accelerator = Accelerator(
        cpu=True,
        megatron_lm_plugin=MegatronLMPlugin(**plugin),
        mixed_precision=mixed_precision,
        kwargs_handlers=[*handlers],
    )
    optimizer = kind(model.parameters(), lr=0.5, weight_decay=0.25)
    given = [scheduler(optimizer)] if scheduler else []
    return accelerator, accelerator.prepare(model, optimizer, *given)


@cases(
    "plugin, wanted",
    ({}, {MODEL: {**NONE_RECOMPUTED, "attention_dropout": 0.0, "fp16": None}, OPTIMIZER: {"clip_grad": 1.0}}),
    ({"attention_dropout": 0.1, "hidden_dropout": 0.2}, {MODEL: {"attention_dropout": 0.1, "hidden_dropout": 0.2}}),
    ({"recompute_activations": True}, {MODEL: {**NONE_RECOMPUTED, "recompute_granularity": "selective"}}),
    (
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
        {MODEL: {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}},
    ),
    ({"recompute_granularity": "full"}, {MODEL: {"recompute_method": "uniform", "recompute_num_layers": 1}}),
    (
        {"other_megatron_args": {"recompute_granularity": "selective", "distribute_saved_activations": True}},
        {MODEL: {"recompute_granularity": "selective", "distribute_saved_activations": True}},
    ),
    (
        {"use_distributed_optimizer": True, "other_megatron_args": OVERLAP},
        {
            REPLICAS: {**OVERLAP, "use_distributed_optimizer": True, "grad_reduce_in_fp32": True},
            OPTIMIZER: {"overlap_param_gather": True, "use_distributed_optimizer": True},
        },
    ),
    ({"other_megatron_args": {"bucket_size": 9}}, {REPLICAS: {"bucket_size": 9}}),
    (OFFLOAD, {OPTIMIZER: {**OFFLOAD, "optimizer_offload_fraction": 1.0}}),
    (
        {**OFFLOAD, "other_megatron_args": {"optimizer_offload_fraction": 0.5}},
        {OPTIMIZER: {"optimizer_offload_fraction": 0.5}},
    ),
    ({"use_precision_aware_optimizer": True}, {OPTIMIZER: {"use_precision_aware_optimizer": True}}),
    ({"gradient_clipping": 0.5}, {OPTIMIZER: {"clip_grad": 0.5}}),
    ({"attention_softmax_in_fp32": False}, {MODEL: {"attention_softmax_in_fp32": False}}),
    ({"decoder_last_pipeline_num_layers": 1}, {MODEL: {"num_layers_in_last_pipeline_stage": 1}}),
    ({"calculate_per_token_loss": False}, {MODEL: {"calculate_per_token_loss": False}}),
    ({"custom_loss_function": print}, {MODEL: {"calculate_per_token_loss": False}}),
    ({"other_megatron_args": {"bias_dropout_fusion": True}}, {MODEL: {"bias_dropout_fusion": True}}),
)
def test_settings_reach_core(plugin, wanted, alone, monkeypatch):
    core = megatron_fake.install(monkeypatch)
    prepared(llama(), **plugin)
    for name, values in wanted.items():
        assert {key: core.told[name].get(key) for key in values} == values


def test_fp16_is_scaled_by_core(alone, monkeypatch):
    core, handler = megatron_fake.install(monkeypatch), GradScalerKwargs(init_scale=1024.0, growth_interval=50)
    accelerator, (engine, optimizer) = prepared(llama(), "fp16", [handler], other_megatron_args={"hysteresis": 4})
    wanted = {"fp16": True, "initial_loss_scale": 1024.0, "loss_scale_window": 50, "hysteresis": 4}
    assert wanted.items() <= core.told[OPTIMIZER].items() and accelerator.scaler is None
    assert (core.told[MODEL]["fp16"], core.told[MODEL]["params_dtype"]) == (True, torch.float16)
    # Core's Float16Module is inside its DistributedDataParallel.
    assert isinstance(engine.module.module, megatron_fake.Wrapper)
    assert not accelerator.optimizer_step_was_skipped
    optimizer.optimizer.step_was_skipped = True
    assert accelerator.optimizer_step_was_skipped


def test_a_scaler_that_core_has_not_is_refused(alone, monkeypatch):
    megatron_fake.install(monkeypatch)
    with pytest.raises(ValueError, match="growth_factor=3.*only init_scale and growth_interval"):
        prepared(llama(), "fp16", [GradScalerKwargs(growth_factor=3.0)])


@pytest.mark.parametrize(
    ("apex", "layout", "divided"), [(True, "fully_reshardable", None), (False, "dp_reshardable", [1, 1])]
)
def test_a_distributed_optimizer_of_apex_is_saved_for_any_division(
    apex, layout, divided, alone, monkeypatch, tmp_path
):
    core = megatron_fake.install(monkeypatch, apex=apex)
    accelerator, _ = prepared(llama(), use_distributed_optimizer=True)
    accelerator.save_state(tmp_path / "checkpoint")
    assert core.saved["optimizer"] == {"distrib_optim_sharding_type": layout} and core.saved["divided"] == divided


def test_schedules_and_groups_reach_core(alone, monkeypatch):
    core = megatron_fake.install(monkeypatch)
    schedule = lambda optimizer: MegatronLMDummyScheduler(optimizer, total_num_steps=20, warmup_num_steps=2)  # noqa: E731
    options = {"min_lr": 0.01, "lr_decay_style": "cosine", "start_weight_decay": 0.1, "end_weight_decay": 0.2}
    _, (engine, *_) = prepared(llama(), scheduler=schedule, weight_decay_incr_style="linear", **options)
    told = core.told["OptimizerParamScheduler"]
    assert told.pop("optimizer") is engine.optimizer
    rates = {"init_lr": 0.0, "max_lr": 0.5, "min_lr": 0.01, "lr_warmup_steps": 2, "lr_decay_steps": 20}
    decays = {"start_wd": 0.1, "end_wd": 0.2, "wd_incr_steps": 20, "wd_incr_style": "linear"}
    assert told == {**rates, "lr_decay_style": "cosine", **decays}
    (group,) = engine.optimizer.param_groups
    assert (group["lr"], group["max_lr"], group["weight_decay"], group["wd_mult"]) == (0.5, 0.5, 0.25, 1.0)


def test_kinds_of_optimizers_reach_core(alone, monkeypatch):
    core = megatron_fake.install(monkeypatch)
    for kind, wanted in (
        (torch.optim.Adam, {"optimizer": "adam", "decoupled_weight_decay": False, "adam_beta2": 0.999}),
        (torch.optim.AdamW, {"optimizer": "adam", "decoupled_weight_decay": True, "lr": 0.5, "weight_decay": 0.25}),
        (torch.optim.SGD, {"optimizer": "sgd", "sgd_momentum": 0}),
    ):
        accelerator, _ = prepared(llama(), kind=kind)
        assert wanted.items() <= core.told[OPTIMIZER].items()
        accelerator.free_memory()
        accelerator.state._reset_state(True)


@pytest.mark.parametrize("build", [llama, gpt2])
def test_weights_go_in_and_come_out(build, alone, monkeypatch):
    megatron_fake.install(monkeypatch)
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator, (engine, _) = prepared(model)
    state = accelerator.get_state_dict(engine)
    assert list(state) == list(before) and all(torch.equal(state[name], before[name]) for name in before)


def test_settings_without_a_use_are_refused():
    with pytest.raises(NotImplementedError, match=r"return_logits=True.*get_state_dict"):
        Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(return_logits=True))
