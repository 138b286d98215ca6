import base64
import json

import pytest

from accelerate.config.deepspeed_config import HfDeepSpeedConfig

CONFIG = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "zero": 0, "nothing": None}


def test_from_dictionary_is_a_copy():
    source = {"a": {"b": 1}}
    config = HfDeepSpeedConfig(source)
    source["a"]["b"] = 2
    assert config.config == {"a": {"b": 1}}


def test_from_file_and_base64(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    encoded = base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()
    for source in (path, str(path), encoded):
        assert HfDeepSpeedConfig(source).config == CONFIG


@pytest.mark.parametrize("source", ["missing.json", "!!", 5, None, base64.urlsafe_b64encode(b"[1]").decode()])
def test_other_sources(source):
    with pytest.raises(ValueError, match="hf_ds_config is"):
        HfDeepSpeedConfig(source)


@pytest.mark.parametrize(
    ("zero", "two", "three", "offload"),
    [
        ({"stage": 3, "offload_param": {"device": "cpu"}}, False, True, True),
        ({"stage": 2, "offload_optimizer": {"device": "nvme"}}, True, False, True),
        ({"stage": 2, "offload_optimizer": {"device": "none"}}, True, False, False),
        ({"stage": "auto", "offload_optimizer": {}}, False, False, False),
        (
            {"stage": 1, "offload_optimizer": {"device": "cpu"}},
            False,
            False,
            False,
        ),  # DeepSpeed offloads from stage 2 on
    ],
)
def test_stage_and_offload(zero, two, three, offload):
    config = HfDeepSpeedConfig({"zero_optimization": zero})
    assert (config.is_zero2(), config.is_zero3(), config.is_offload()) == (two, three, offload)


def test_stage_is_noted_again_on_request():
    config = HfDeepSpeedConfig({})
    config.config["zero_optimization"] = {"stage": 2}
    assert not config.is_zero2()
    config.set_stage_and_offload()
    assert config.is_zero2()


def test_look_up():
    config = HfDeepSpeedConfig(CONFIG)
    assert config.find_config_node("zero_optimization.stage") == (CONFIG["zero_optimization"], "stage")
    assert config.find_config_node("a.b") == (None, "b")
    assert config.find_config_node("zero.b") == (None, "b")
    assert config.get_value("zero_optimization.offload_param.device") == "cpu"
    assert config.get_value("zero_optimization.x", 7) == config.get_value("x.y", 7) == 7
    assert config.is_true("zero_optimization.stage") and not config.is_true("zero") and not config.is_true("x")
    assert config.is_false("zero") and not config.is_false("x") and not config.is_false("nothing")


def test_deletion():
    config = HfDeepSpeedConfig(CONFIG)
    config.del_config_sub_tree("zero_optimization.offload_param.device")
    assert config.config["zero_optimization"]["offload_param"] == {}
    config.del_config_sub_tree("zero_optimization")
    assert "zero_optimization" not in config.config
    config.del_config_sub_tree("x.y")
    with pytest.raises(ValueError, match="x.y is not in"):
        config.del_config_sub_tree("x.y", must_exist=True)


def test_subclasses_and_public_path():
    class Mine(HfDeepSpeedConfig):
        pass

    assert Mine(CONFIG).is_zero3()
    assert HfDeepSpeedConfig.__module__ == "accelerate.utils.deepspeed"
