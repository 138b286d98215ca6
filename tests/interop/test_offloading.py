"""Offloaded models give the same bits as whole ones, and transformers, PEFT, diffusers and sentence-transformers can use them."""

import importlib.util

import pytest

from interop.programs import NO_PEER, PEER, figures

pytestmark = pytest.mark.interop
LIBRARIES, MODELS = "big_libraries.py", "big_models.py"
PEER_FAILS = {
    "hooks-pickled": "its hooked forward is a local function",
    "hooks-tied": "its tied_params_map grows with each forward",
    "transformers-t5": "tied weights on the CPU and on disk",
    "peft-on-checkpoint": "no whole model to disk; and weights written anew, which PEFT cannot use",
    "diffusers-sequential": "buffers that are offloaded come back as parameters",
}


def outcomes_of(script, folder, *checks, ours=True, **variables):
    for name in ("transformers", "peft", "diffusers", "sentence_transformers"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed; `make setup` installs it")
    return figures(script, folder, 1, ours, *checks, **variables)["checks"]


def errors(outcomes):
    return {name: outcome["error"] for name, outcome in outcomes.items() if outcome["error"] is not None}


@pytest.mark.parametrize("script", [LIBRARIES, MODELS])
def test_same_bits(script, tmp_path):
    outcomes = outcomes_of(script, tmp_path)
    assert len(outcomes) >= 5 and not errors(outcomes), "\n".join(errors(outcomes).values())


@pytest.mark.slow
def test_same_bits_with_every_setting_and_many_cuts(tmp_path):
    outcomes = outcomes_of(MODELS, tmp_path, "all", BIG_MODELS_EXAMPLES="200")
    assert len(outcomes) == 15 and not errors(outcomes), "\n".join(errors(outcomes).values())


@pytest.mark.slow
def test_every_use_and_its_facts_equal_the_peers(tmp_path):
    if not PEER.exists():
        pytest.skip(NO_PEER)
    ours, theirs = (outcomes_of(LIBRARIES, tmp_path / str(ours), "all", ours=ours) for ours in (True, False))
    assert not errors(ours), "\n".join(errors(ours).values())
    assert errors(theirs).keys() == PEER_FAILS.keys(), errors(theirs)
    assert ours.keys() == theirs.keys() and len(ours) >= 25
    for name in ours.keys() - PEER_FAILS.keys():
        assert ours[name]["facts"] == theirs[name]["facts"], name
