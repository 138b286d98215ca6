"""The worker's side of the option table."""

import pytest

from accelerate.config import env


def test_an_argument_over_the_environment_over_the_plugins_default_and_bad_ones_named(monkeypatch):
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
    with pytest.raises(ValueError, match="stage is 'two'"):
        env.setting("two", "zero_stage", field="stage")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "two")
    with pytest.raises(ValueError, match="ACCELERATE_DEEPSPEED_ZERO_STAGE is 'two'"):
        env.setting(None, "zero_stage")
