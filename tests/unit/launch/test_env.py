"""What workers are told."""

from accelerate.config import env as worker
from accelerate.launch.env import exports, feature_exports, worker_environment

ALWAYS = {
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_CPU": "False",
}


def test_plain_run(plan):
    assert exports(plan("").settings) == ALWAYS


def test_given_settings(plan):
    line = "--cpu --mixed_precision bf16 --debug --enable_cpu_affinity"
    told = exports(plan(f"{line} --num_cpu_threads_per_process 2").settings)
    assert told == {
        **ALWAYS,
        "ACCELERATE_CPU_AFFINITY": "1",
        "ACCELERATE_DEBUG_MODE": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_CPU": "True",
        "OMP_NUM_THREADS": "2",
    }


def test_workers_read_back_what_was_resolved(plan):
    settings = plan("--dynamo_backend inductor --dynamo_use_dynamic --mixed_precision fp16").settings
    told = exports(settings)
    for name in ("dynamo_backend", "dynamo_use_dynamic", "dynamo_use_fullgraph", "mixed_precision", "cpu"):
        assert worker.value_of(name, told) == settings[name].value


def test_options_of_features_that_are_off_stay_away(plan):
    told = exports(plan("--zero_stage 2 --fsdp_version 2 --gradient_accumulation_steps 2").settings)
    assert told == ALWAYS


def test_accumulation_steps_are_for_deepspeed(plan):
    engine = plan("--use_deepspeed --gradient_accumulation_steps 2")
    assert exports(engine.settings)["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "2"
    other = plan("--gradient_accumulation_steps 2")
    assert other.notes == ("--gradient_accumulation_steps has no effect without --use_deepspeed.",)
    by_hand = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "5"}
    assert worker_environment(other, by_hand)["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "5"


def test_feature_exports(plan):
    settings = plan("--fsdp_version 2 --fsdp_transformer_layer_cls_to_wrap A,B").settings
    told = feature_exports("fsdp", settings)
    assert told["FSDP_VERSION"] == "2"
    assert told["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "A,B"
    assert told["FSDP_OFFLOAD_PARAMS"] == "false"
    assert "FSDP_STATE_DICT_TYPE" not in told


def test_sizes_decide_what_a_mesh_is_told(plan):
    one = feature_exports("parallelism", plan("").settings)
    assert "PARALLELISM_CONFIG_CP_COMM_STRATEGY" not in one
    two = feature_exports("parallelism", plan("--parallelism_config_cp_size 2").settings)
    assert two["PARALLELISM_CONFIG_CP_COMM_STRATEGY"] == "allgather"


def test_selected_gpus(plan, gpus):
    gpus(4)
    told = worker_environment(plan("--gpu_ids 3,1"), {"HOME": "/h", "CUDA_VISIBLE_DEVICES": "0"})
    assert (told["CUDA_VISIBLE_DEVICES"], told["HOME"]) == ("3,1", "/h")
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(plan("--gpu_ids all"), {})
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(plan("--cpu --gpu_ids 1"), {})
