import base64
import json
import sys
import types
import weakref

import pytest
from torch import nn

from accelerate.extensions.deepspeed import plugin as home
from accelerate.extensions.deepspeed.plugin import DeepSpeedPlugin as Plugin
from accelerate.extensions.deepspeed.plugin import HfDeepSpeedConfig
from cases import cases

STAGE_3 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}


@pytest.fixture
def transformers(monkeypatch):
    """A transformers that remembers, weakly, which DeepSpeed config it was told of last; it returns that, or None."""

    class Registered:
        last = None

        def __init__(self, config):
            self.config = config
            Registered.last = weakref.ref(self)

    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    integrations = types.ModuleType("transformers.integrations")
    integrations.HfDeepSpeedConfig = Registered
    monkeypatch.setitem(sys.modules, "transformers.integrations", integrations)
    for name in ("is_transformers_available", "is_deepspeed_available"):
        monkeypatch.setattr(home, name, lambda: True)
    return lambda: (live := Registered.last and Registered.last()) and live.config


@pytest.fixture
def no_transformers(monkeypatch):
    monkeypatch.setattr(home, "is_transformers_available", lambda: False)


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="zero_stage is 4"):
        Plugin(zero_stage=4)
    with pytest.raises(ValueError, match="zero_optimization"):
        Plugin(hf_ds_config={"train_batch_size": 8})
    with pytest.warns(UserWarning, match="the ZeRO stage is 2"):
        assert Plugin(zero_stage=2, zero3_init_flag=True).zero3_init_flag is False


def test_no_limit_of_gradients_reaches_the_engine():
    """DeepSpeed clips at 1.0 where the configuration says nothing."""
    assert Plugin(gradient_clipping=0).deepspeed_config["gradient_clipping"] == 0
    assert Plugin().is_auto("gradient_clipping")


def test_values_of_the_config_win_and_arguments_fill_auto():
    config = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 7, "gradient_clipping": "auto"}
    plugin = Plugin(hf_ds_config=config, gradient_accumulation_steps=2, gradient_clipping=1.0, zero_stage=3)
    assert (plugin.zero_stage, plugin.gradient_accumulation_steps, plugin.gradient_clipping) == (1, 7, 1.0)


def test_launcher_settings_next_to_a_file(monkeypatch):
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "deepspeed_config_file,zero_stage,mixed_precision")
    with pytest.raises(ValueError, match="sets zero_stage, mixed_precision"):
        Plugin(hf_ds_config=STAGE_3)
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "deepspeed_config_file,zero3_init_flag")
    assert Plugin(hf_ds_config=STAGE_3).zero_stage == 3


def test_msamp(monkeypatch):
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "MSAMP")
    assert Plugin().deepspeed_config["msamp"] == {"enabled": True, "opt_level": "O1"}
    with pytest.raises(NotImplementedError, match="stage 3"):
        Plugin(zero_stage=3)
    with pytest.raises(ValueError, match="O3"):
        Plugin(msamp_opt_level="O3")


def test_process_fills_every_auto_and_reports_all_mismatches():
    config = {"zero_optimization": {"stage": 2}, "a": "auto", "b": {"c": "auto"}, "d": 1}
    plugin = Plugin(hf_ds_config=config)
    with pytest.raises(ValueError, match="`a` is 'auto'"):
        plugin.deepspeed_config_process()
    plugin.deepspeed_config_process(must_match=False, a=1, **{"b.c": 2, "d": 5, "unused": 3})
    assert (plugin.get_value("a"), plugin.get_value("b"), plugin.get_value("d")) == (1, {"c": 2}, 1)
    plugin.fill_match("no.such.key", [], **{"no.such.key": 1})
    with pytest.raises(ValueError) as caught:
        plugin.deepspeed_config_process(a=5, **{"b.c": 6, "d": 1})
    assert "- ds a=1 vs arg a=5\n- ds b.c=2 vs arg b.c=6" in str(caught.value) and "d=1" not in str(caught.value)


@cases(
    "precision, sections, fp16, bf16",
    ("no", {}, {"enabled": False}, {"enabled": False}),
    ("fp16", {}, {"enabled": True, "auto_cast": True}, {"enabled": False}),
    ("bf16", {"fp16": {"enabled": "auto"}}, {"enabled": False}, {"enabled": True}),
    ("fp16", {"fp16": {"loss_scale": 0}}, {"enabled": True, "loss_scale": 0}, {"enabled": False}),
)
def test_mixed_precision(precision, sections, fp16, bf16):
    plugin = Plugin(hf_ds_config={"zero_optimization": {"stage": 2}, **sections})
    plugin.set_mixed_precision(precision)
    assert plugin.deepspeed_config["fp16"] == fp16
    assert plugin.deepspeed_config["bf16"] == bf16


@pytest.mark.parametrize(("precision", "other"), [("bf16", "fp16"), ("fp16", "bf16"), ("fp8", "fp16")])
def test_contradicting_precision(precision, other, caplog):
    plugin = Plugin(hf_ds_config={"zero_optimization": {"stage": 2}, other: {"enabled": True}})
    with pytest.raises(ValueError, match=f"mixed_precision is '{precision}'.*{other}"):
        plugin.set_mixed_precision(precision)
    half = "fp16" if precision == "fp16" else "bf16"
    Plugin(hf_ds_config={"zero_optimization": {}, half: {"enabled": False}}).set_mixed_precision(precision)
    assert f"disables {half}" in caplog.text


def test_selection(no_transformers):
    plugin = Plugin(zero_stage=3)
    with pytest.raises(ValueError, match="select_deepspeed_plugin"):
        plugin.select()
    with pytest.raises(NotImplementedError):
        plugin.selected = True
    plugin.select(_from_accelerator_state=True)
    assert plugin.selected
    plugin._unselect()
    assert not plugin.selected
    Plugin(zero_stage=2).set_deepspeed_weakref()  # nothing to register
    with pytest.raises(ImportError, match="zero3_init_flag"):
        plugin.set_deepspeed_weakref()


def test_registration(transformers):
    config = {"zero_optimization": {"stage": 3}, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    plugin = Plugin(hf_ds_config=config)
    plugin.set_deepspeed_weakref()
    told = transformers()
    assert told["train_micro_batch_size_per_gpu"] == told["gradient_accumulation_steps"] == 1
    assert "train_batch_size" not in told
    assert plugin.is_auto("train_batch_size")
    plugin.select(_from_accelerator_state=True)
    with plugin.zero3_init_context_manager(enable=False), plugin.zero3_init_context_manager(enable=False):
        assert not plugin.is_zero3_init_enabled() and transformers() is None
    assert plugin.is_zero3_init_enabled() and transformers() == told


def test_what_transformers_knows_of(transformers):
    """Below stage 3 always; at stage 3 with the flag, without it from `prepare` on."""
    known = lambda: (config := transformers()) and config["zero_optimization"]["stage"]  # noqa: E731
    for stage in (0, 1, 2, 3):
        plugin = Plugin(zero_stage=stage)
        plugin.select(_from_accelerator_state=True)
        assert known() == stage
    whole = Plugin(zero_stage=3, zero3_init_flag=False)
    whole.select(_from_accelerator_state=True)
    assert known() is None  # nor does it know of the plugin before, which is still there
    with whole.zero3_init_context_manager(enable=True):
        assert known() == 3
    assert known() is None
    whole.set_deepspeed_weakref()
    with whole.zero3_init_context_manager(enable=False):
        assert known() is None
    assert known() == 3 and not whole.zero3_init_flag
    del whole
    assert known() is None


def test_a_configuration_of_the_users_stays_registered(transformers):
    own = sys.modules["transformers.integrations"].HfDeepSpeedConfig({"mine": True})
    Plugin(zero_stage=3, zero3_init_flag=False).select(_from_accelerator_state=True)
    assert transformers() is own.config


def test_leaf_modules(monkeypatch):
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    Plugin().set_moe_leaf_modules(model)  # nothing to do, DeepSpeed or not
    plugin = Plugin(transformer_moe_cls_names="ReLU, Linear")
    monkeypatch.setattr(home, "is_deepspeed_available", lambda: False)
    with pytest.raises(ImportError, match="DeepSpeed"):
        plugin.set_moe_leaf_modules(model)

    marked = []
    utils = types.ModuleType("deepspeed.utils")
    utils.set_z3_leaf_modules = lambda model, classes: marked.extend(classes)
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.utils", utils)
    monkeypatch.setattr(home, "is_deepspeed_available", lambda: True)
    plugin.set_moe_leaf_modules(model)
    assert marked == [nn.ReLU, nn.Linear]
    with pytest.raises(ValueError, match="holds Expert"):
        Plugin(transformer_moe_cls_names="Expert").set_moe_leaf_modules(model)


# HfDeepSpeedConfig

CONFIG = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "zero": 0, "nothing": None}


def test_from_dictionary_file_and_base64(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    encoded = base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()
    for source in (CONFIG, path, str(path), encoded):
        assert HfDeepSpeedConfig(source).config == CONFIG
    assert HfDeepSpeedConfig(CONFIG).config["zero_optimization"] is not CONFIG["zero_optimization"]
    for source in ("missing.json", "!!", 5, None, base64.urlsafe_b64encode(b"[1]").decode()):
        with pytest.raises(ValueError, match="hf_ds_config is"):
            HfDeepSpeedConfig(source)


@cases(
    "zero, two, three, offload",
    ({"stage": 3, "offload_param": {"device": "cpu"}}, False, True, True),
    ({"stage": 2, "offload_optimizer": {"device": "nvme"}}, True, False, True),
    # DeepSpeed offloads from stage 2 on.
    ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, False, False, False),
)
def test_stage_and_offload(zero, two, three, offload):
    config = HfDeepSpeedConfig({})
    config.config["zero_optimization"] = zero
    assert not (config.is_zero2() or config.is_zero3() or config.is_offload())
    config.set_stage_and_offload()  # noted on request
    assert (config.is_zero2(), config.is_zero3(), config.is_offload()) == (two, three, offload)


def test_deletion():
    config = HfDeepSpeedConfig(CONFIG)
    config.del_config_sub_tree("zero_optimization.offload_param.device")
    assert config.config["zero_optimization"]["offload_param"] == {}
    config.del_config_sub_tree("zero_optimization")
    assert "zero_optimization" not in config.config
    config.del_config_sub_tree("x.y")
    assert config.get_value("zero.b", 7) == 7 and config.is_false("zero") and not config.is_false("nothing")
    with pytest.raises(ValueError, match="x.y is not in"):
        config.del_config_sub_tree("x.y", must_exist=True)


def test_a_key_that_a_configuration_has_twice_is_refused(tmp_path):
    (tmp_path / "c.json").write_text('{"zero_optimization": {"stage": 1, "stage": 2}}')
    with pytest.raises(ValueError, match="'stage' twice"):
        Plugin(hf_ds_config=str(tmp_path / "c.json"))
