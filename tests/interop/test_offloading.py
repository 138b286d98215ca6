"""Offloaded models give the same bits as whole ones, and transformers, PEFT, diffusers and sentence-transformers can use them."""

import pytest

from interop.launching import figures, need, need_peer

pytestmark = pytest.mark.interop
PEER_FAILS = {
    "hooks-pickled": "its hooked forward is a local function",
    "transformers-t5": "tied weights on the CPU and on disk",
    "peft-on-checkpoint": "no whole model to disk; and weights written again, which PEFT cannot use",
    "diffusers-sequential": "buffers that are offloaded come back as parameters",
}


def outcomes_of(folder, *checks, ours=True):
    need("transformers", "peft", "diffusers", "sentence_transformers")
    return figures("big_libraries.py", folder, 1, ours, *checks)["checks"]


def errors(outcomes):
    return {name: outcome["error"] for name, outcome in outcomes.items() if outcome["error"] is not None}


def test_same_bits(tmp_path):
    outcomes = outcomes_of(tmp_path)
    assert len(outcomes) >= 5 and not errors(outcomes), "\n".join(errors(outcomes).values())


@pytest.mark.slow
def test_every_use_and_its_facts_equal_the_peers(tmp_path):
    need_peer()
    ours, theirs = (outcomes_of(tmp_path / str(ours), "all", ours=ours) for ours in (True, False))
    assert not errors(ours), "\n".join(errors(ours).values())
    assert errors(theirs).keys() == PEER_FAILS.keys(), errors(theirs)
    assert ours.keys() == theirs.keys() and len(ours) == 16
    for name in ours.keys() - PEER_FAILS.keys():
        assert ours[name]["facts"] == theirs[name]["facts"], name
