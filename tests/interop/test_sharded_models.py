"""Models of transformers and PEFT train sharded as they do whole, manually and in the Trainer; what is saved loads again."""

import re

import pytest

from interop.launching import ROOT, figures, finished, need, starter

pytestmark = pytest.mark.interop
# What the quick run omits, of meshes and the other ways to keep a checkpoint.
MORE = ["fsdp1", "context", "mesh", "shards", "fsdp1_orig", "arrived:fsdp", "arrived:tp", "arrived:ep-tp"]


@pytest.fixture
def launched(tmp_path):
    """Run a script on two processes under our launcher, and return what it wrote to stderr."""

    def run(script, *arguments, processes=2):
        result = figures(script, tmp_path, processes, True, *arguments)
        assert result["passed"]
        return result["stderr"]

    return run


def test_models_train_sharded_as_on_one_process(launched):
    need("transformers", "peft")
    assert "already prepared" not in launched("sharded_models.py")


def test_trainer_trains_sharded_and_resumes(launched):
    need("transformers")
    assert "already prepared" not in launched("sharded_trainer.py")


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [["fsdp"], ["ep-tp", "own-ep"], ["tp", "norms-tp", "ep-fsdp"]])
def test_models_that_arrive_sharded_train_as_on_one_process(launched, layouts):
    need("transformers")
    launched("arrived_models.py", "train", *layouts)


@pytest.mark.slow
def test_adapters_of_models_that_arrive_sharded_train_as_on_one_process(launched):
    need("transformers", "peft")
    launched("arrived_models.py", "adapt", "fsdp", "ep-fsdp")


@pytest.mark.slow
@pytest.mark.parametrize(
    "processes, layouts",
    [
        (2, ["tp", "fsdp2"]),
        (2, ["loaded-tp", "fsdp1", "forms"]),
        (2, ["ddp", "hand", "loaded-fsdp"]),
        (1, ["single"]),
        (4, ["fsdp2-tp", "hsdp"]),
    ],
)
def test_adapters_train_as_on_one_process_and_load_into_stock_peft(launched, processes, layouts):
    need("transformers", "peft")
    launched("adapters.py", *layouts, processes=processes)


@pytest.mark.slow
def test_models_that_arrive_sharded_on_four_processes_load_on_two(launched):
    need("transformers")
    names = ["fsdp-tp", "norms-fsdp-tp", "hsdp", "ep-in-fsdp", "ep-fsdp-tp", "own-ep-in-fsdp", "own-ep-hsdp"]
    launched("arrived_models.py", "train", *names, processes=4)
    pairs = ["fsdp<hsdp", "tp<fsdp-tp", "fsdp<fsdp-tp"]
    pairs += [f"ep-fsdp<{name}" for name in ("ep-in-fsdp", "ep-fsdp-tp", "own-ep-in-fsdp", "own-ep-hsdp")]
    launched("arrived_models.py", "load", *pairs)
    arrived = [f"arrived:{name}" for name in ("fsdp-tp", "hsdp", "ep-in-fsdp", "ep-fsdp-tp")]
    launched("sharded_trainer.py", *arrived, processes=4)


@pytest.mark.slow
def test_example_stops_and_goes_on(tmp_path):
    wrapping = ["--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_transformer_layer_cls_to_wrap", "Block"]
    launch = [*starter(2, True), "--use_fsdp", "--fsdp_version", "2", *wrapping]
    example = [str(ROOT / "examples" / "fsdp2.py"), "--checkpoint_dir", str(tmp_path / "out")]
    stopped = finished([*launch, *example, "--stop_after", "40"], cwd=tmp_path).stdout
    whole, here = map(int, re.search(r"parameters: (\d+), of which this process holds (\d+)", stopped).groups())
    assert here <= whole / 2 + 1000, stopped
    ending = ["--resume", "--updates", "100", "--require_accuracy", "0.98", "--export", str(tmp_path / "weights")]
    resumed = finished([*launch, *example, *ending], cwd=tmp_path).stdout
    assert "stopped after 40 updates" in stopped and "update 40" in resumed
    assert (tmp_path / "weights" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, words, more", [("sharded_models.py", ["all"], ["peft"]), ("sharded_trainer.py", MORE, [])]
)
def test_every_layout(script, words, more, launched):
    need("transformers", *more)
    launched(script, *words)
