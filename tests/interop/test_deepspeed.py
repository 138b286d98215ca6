"""The Trainer, TRL and PEFT with DeepSpeed, next to the same runs without; `make test-deepspeed` has the environment."""

import pytest
import yaml

from interop.launching import SCRIPTS, finished, last_figures, need, starter

pytestmark = [pytest.mark.interop, pytest.mark.slow]

# What a configuration file of DeepSpeed says besides its stage, with the machine's own settings left to the command line.
MACHINE = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "DEEPSPEED", "downcast_bf16": "no",
    "machine_rank": 0, "main_training_function": "main", "mixed_precision": "no", "num_machines": 1, "num_processes": 8,
    "rdzv_backend": "static", "same_network": True, "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False,
    "use_cpu": False,
}  # fmt: skip
DEVICES = {"offload_optimizer_device": "none", "offload_param_device": "none"}
STAGES = {
    1: {"gradient_accumulation_steps": 1, "zero3_init_flag": False},
    2: {**DEVICES, "zero3_init_flag": False},
    3: {**DEVICES, "zero3_init_flag": True, "zero3_save_16bit_model": True},
}
WHOLE = {"model.safetensors", "config.json"}
SHARDS = {"zero_to_fp32.py", "latest", "config.json"}


def near(found, wanted, within=1e-4):
    assert found == pytest.approx(wanted, abs=within)


def test_the_trainer_trains_evaluates_saves_and_resumes(run_ours):
    need("transformers", "deepspeed")
    plain = run_ours("trainer.py", 2)
    found = run_ours("trainer.py", 2, "2", "3", "2+optimizer", "3+scheduler", "3+gather+bf16")
    for case in ("2", "3", "2+optimizer", "3+gather+bf16"):
        for name in ("losses", "resumed", "eval_loss", "prediction"):
            near(found[case][name], plain[name], 2e-3 if "bf16" in case else 1e-4)
    near([found["3"]["alone"], found["3+scheduler"]["alone"]], [plain["alone"]] * 2)
    near(found["3+scheduler"]["resumed"], found["3+scheduler"]["losses"])
    for case, files in (("2", WHOLE), ("3", SHARDS), ("3+gather+bf16", WHOLE)):
        assert files <= set(found[case]["saved"])
    assert "model.safetensors" not in found["3"]["saved"]


def test_trl_trains_from_configuration_files(run_ours, tmp_path):
    need("trl", "peft", "datasets", "deepspeed")
    plain = run_ours("sft.py", 2, "dpo")
    for stage, settings in STAGES.items():
        file = tmp_path / f"{stage}.yaml"
        section = {"deepspeed_multinode_launcher": "standard", "zero_stage": stage, **settings}
        file.write_text(yaml.safe_dump({**MACHINE, "deepspeed_config": section}))
        command = [*starter(2, ours=True), "--config_file", str(file), str(SCRIPTS / "sft.py"), str(tmp_path), "dpo"]
        found = last_figures(finished(command))
        for name in ("sft", "lora", "dpo"):
            near(found[name], plain[name])


@pytest.mark.parametrize("stage", ["2", "3"])
def test_an_adapter_trains_is_saved_and_resumes_without_what_is_frozen(stage, run_ours):
    need("peft", "transformers", "deepspeed")
    found = run_ours("lora.py", 2, stage)
    near(found["lora_loop"], run_ours("lora.py", 2)["lora_loop"])
    near(found["resumed"], found["on"], 1e-6)


def test_models_generate_and_adapters_are_saved_and_pruned(run_ours):
    need("peft", "transformers", "deepspeed")
    assert run_ours("zero_libraries.py", 2)["done"]


def test_the_trainer_shares_sequences(run_ours):
    need("transformers", "deepspeed")
    whole = run_ours("trainer_ulysses.py", 2)
    for stage in ("1", "3"):
        found = run_ours("trainer_ulysses.py", 2, stage)
        for name in ("losses", "resumed", "eval_loss"):
            near(found[name], whole[name])
