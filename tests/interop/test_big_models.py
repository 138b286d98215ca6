"""Models of transformers and diffusers give the same bits offloaded as whole: on the CPU, on disk, cut anywhere."""

import importlib.util

import pytest

from interop.programs import figures

pytestmark = pytest.mark.interop
# Tests of one process; each runs the script once.
SHARED = ["outcomes"]
MODELS = ["llama", "tied_llama", "mixtral", "t5", "bert", "unet"]
CHECKS = [
    *(f"{name}-{dtype}" for name in MODELS for dtype in ("float32", "bfloat16")),
    *(f"{name}-cut" for name in MODELS),
    "tied-apart",
    "computed-maps",
    "pipeline",
]


def outcomes_of(folder, *checks, **variables):
    for name in ("transformers", "diffusers"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed; `make setup` installs it")
    return figures("big_models.py", folder, 1, True, *checks, **variables)["checks"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_of(tmp_path_factory.mktemp("big_models"))


@pytest.mark.parametrize("check", CHECKS)
def test_same_bits(check, outcomes):
    assert outcomes[check]["error"] is None, outcomes[check]["error"]


def test_every_check_is_named_here(outcomes):
    assert list(outcomes) == CHECKS


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_same_bits_at_many_cuts(name, tmp_path):
    """Every setting of prefetching with every way, and 200 random cuts."""
    checks = [check for check in CHECKS if check.rpartition("-")[0] == name]
    for check, outcome in outcomes_of(tmp_path, *checks, BIG_MODELS_EXAMPLES="200").items():
        assert outcome["error"] is None, f"{check}: {outcome['error']}"
