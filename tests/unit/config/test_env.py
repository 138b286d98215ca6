"""The worker's side of the option table."""

import pytest

from accelerate.config import env


def test_given_reads_the_variable():
    assert env.given("mixed_precision", {"ACCELERATE_MIXED_PRECISION": "BF16"}) == "bf16"
    assert env.given("dynamo_use_dynamic", {"ACCELERATE_DYNAMO_USE_DYNAMIC": "True"}) is True
    assert env.given("mixed_precision", {"ACCELERATE_MIXED_PRECISION": ""}) is None
    assert env.given("mixed_precision", {}) is None
    assert env.given("machine_rank", {}) is None


def test_given_reads_this_process_by_default(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert env.given("gradient_accumulation_steps") == 4


def test_bad_value_names_the_variable():
    with pytest.raises(ValueError, match="ACCELERATE_MIXED_PRECISION is 'fp17'; choose one of no, fp16, bf16, fp8"):
        env.given("mixed_precision", {"ACCELERATE_MIXED_PRECISION": "fp17"})


def test_unknown_option():
    with pytest.raises(KeyError):
        env.given("nothing", {})


def test_value_of_falls_back_to_the_default():
    assert env.value_of("dynamo_mode", {}) == "default"
    assert env.value_of("dynamo_mode", {"ACCELERATE_DYNAMO_MODE": "max-autotune"}) == "max-autotune"


def test_settings_of_a_feature():
    settings = env.settings_of("fsdp", {"FSDP_VERSION": "2"})
    assert settings["fsdp_version"] == "2"
    assert settings["fsdp_min_num_params"] == 100_000_000


def test_is_requested():
    assert env.is_requested("fsdp", {"ACCELERATE_USE_FSDP": "true"})
    assert not env.is_requested("fsdp", {"ACCELERATE_USE_FSDP": "0"})
    assert not env.is_requested("fsdp", {})


def test_read_all_knows_the_variables():
    found = env.read_all({"OMP_NUM_THREADS": "3", "ACCELERATE_FP8_OVERRIDE_DGRAD": "1", "PATH": "x"})
    assert found == {
        "num_cpu_threads_per_process": (3, "OMP_NUM_THREADS"),
        "fp8_override_linear_precision": ((False, True, False), "ACCELERATE_FP8_OVERRIDE_FPROP"),
    }


def test_an_argument_over_the_environment_over_the_plugins_default(monkeypatch):
    assert env.setting(None, "fsdp_use_orig_params", False) is False
    assert env.setting(None, "gradient_clipping", "auto") == env.setting("auto", "gradient_clipping", "auto") == "auto"
    assert (env.setting("3", "zero_stage"), env.setting("no", "zero3_init_flag")) == (3, False)
    assert env.setting("max-autotune-no-cudagraphs", "dynamo_mode") == "max-autotune-no-cudagraphs"
    monkeypatch.setenv("FSDP_USE_ORIG_PARAMS", "true")
    monkeypatch.setenv("ACCELERATE_FP8_OVERRIDE_DGRAD", "1")
    assert env.setting(None, "fsdp_use_orig_params", False) is True
    assert env.setting(False, "fsdp_use_orig_params") is False
    assert env.setting(None, "fp8_override_linear_precision") == (False, True, False)
    with env.without_variables():
        assert env.setting(None, "fsdp_use_orig_params", False) is False


def test_a_bad_setting_is_named(monkeypatch):
    with pytest.raises(ValueError, match="stage is 'two'"):
        env.setting("two", "zero_stage", field="stage")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "two")
    with pytest.raises(ValueError, match="ACCELERATE_DEEPSPEED_ZERO_STAGE is 'two'"):
        env.setting(None, "zero_stage")
