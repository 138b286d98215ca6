import inspect
import types

import pytest

from accelerate.config.megatron import MODEL_CONFIGS_TO_MEGATRON_PARSERS
from accelerate.config.megatron import MegatronLMPlugin as Plugin

METHODS = [name for name, value in vars(Plugin).items() if name.startswith("set_") and callable(value)]


def test_arguments():
    plugin = Plugin(recompute_activations=True, consumed_samples=[5], tensorboard_dir="logs")
    arguments = plugin.megatron_lm_default_args
    assert (arguments["recompute_granularity"], arguments["recompute_method"]) == ("selective", None)
    assert arguments["consumed_samples"] == [5, 0, 0] and arguments["tensorboard_dir"] == "logs"
    assert Plugin(other_megatron_args={"lr": 1}).megatron_lm_default_args["lr"] == 1


@pytest.mark.parametrize("name", METHODS)
def test_what_a_run_would_need_says_that_there_is_none(name):
    method = getattr(Plugin(), name)
    with pytest.raises(NotImplementedError, match=f"{name} completes a run of Megatron-LM.*Use FullySharded"):
        method(*[None for given in inspect.signature(method).parameters.values() if given.default is given.empty])


@pytest.mark.parametrize("kind", MODEL_CONFIGS_TO_MEGATRON_PARSERS)
def test_no_parser_reads_a_model(kind):
    with pytest.raises(NotImplementedError, match="parse_.*is not available yet"):
        MODEL_CONFIGS_TO_MEGATRON_PARSERS[kind](Plugin(), types.SimpleNamespace(), None)
