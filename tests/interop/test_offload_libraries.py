"""transformers, PEFT, diffusers and sentence-transformers offload models with this package, as with the peer's."""

import importlib.util

import pytest

from interop.programs import NO_PEER, PEER, figures

pytestmark = pytest.mark.interop
# Tests of one process; each runs the script once.
SHARED = ["outcomes"]
CHECKS = [
    *(
        f"hooks-{name}"
        for name in [
            "anatomy",
            "copied",
            "pickled",
            "driven",
            "rewritten",
            "rebound",
            "injected",
            "taken-over",
            "tied",
        ]
    ),
    *(f"transformers-{name}" for name in ["llama", "tied_llama", "mixtral", "t5", "bert"]),
    "transformers-saved-over",
    *(f"peft-{name}" for name in ["on-offloaded", "overwrites", "with-model", "on-checkpoint"]),
    *(f"diffusers-{name}" for name in ["model", "sequential", "group", "by-hand", "from-disk", "casting"]),
    "sentence-transformers",
]
PEER_FAILS = {
    "hooks-pickled": "its hooked forward is a local function",
    "hooks-tied": "its tied_params_map grows with each forward",
    "transformers-t5": "tied weights on the CPU and on disk",
    "peft-on-checkpoint": "no whole model to disk; and weights written anew, which PEFT cannot use",
    "diffusers-sequential": "buffers that are offloaded come back as parameters",
}


def outcomes_of(folder, ours):
    return figures("big_libraries.py", folder, 1, ours)["checks"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    for name in ("transformers", "peft", "diffusers", "sentence_transformers"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed; `make setup` installs it")
    return outcomes_of(tmp_path_factory.mktemp("big_libraries"), ours=True)


@pytest.mark.parametrize("check", CHECKS)
def test_library_finds_what_it_needs(check, outcomes):
    assert outcomes[check]["error"] is None, outcomes[check]["error"]


def test_every_check_is_named_here(outcomes):
    assert list(outcomes) == CHECKS


@pytest.mark.slow
def test_facts_equal_the_peers(outcomes, tmp_path):
    if not PEER.exists():
        pytest.skip(NO_PEER)
    theirs = outcomes_of(tmp_path, ours=False)
    failing = [check for check in CHECKS if theirs[check]["error"] is not None]
    assert failing == [check for check in CHECKS if check in PEER_FAILS], [theirs[check]["error"] for check in failing]
    for check in CHECKS:
        if check not in PEER_FAILS:
            assert outcomes[check]["facts"] == theirs[check]["facts"], check
