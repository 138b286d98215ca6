"""transformers, TRL, PEFT, diffusers and sentence-transformers train on this package, on one process and two."""

import math

import pytest

from interop.launching import need

pytestmark = pytest.mark.interop
NEEDS = {
    "trainer.py": ["transformers"], "sft.py": ["trl", "peft", "datasets"], "lora.py": ["peft", "transformers"],
    "diffusion.py": ["diffusers", "transformers"], "sentence.py": ["sentence_transformers", "datasets"],
}  # fmt: skip
QUICK = [("trainer.py", 2)]
LATER = [(script, processes) for script in NEEDS for processes in (1, 2) if (script, processes) not in QUICK]


def numbers(value):
    return [n for item in value for n in numbers(item)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("script, processes", [*QUICK, *(pytest.param(*run, marks=pytest.mark.slow) for run in LATER)])
def test_library_trains(script, processes, run_ours):
    need(*NEEDS[script])
    result = run_ours(script, processes)
    stderr = result.pop("stderr")
    assert "already prepared" not in stderr, stderr[-3000:]
    for name, value in result.items():
        assert numbers(value) and all(math.isfinite(number) for number in numbers(value)), (name, value)
    if script == "trainer.py":
        assert result["resumed"] == pytest.approx(result["losses"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("script", NEEDS)
def test_losses_equal_the_peers(script, processes, run_ours, run_peer):
    need(*NEEDS[script])
    ours, theirs = run_ours(script, processes), run_peer(script, processes)
    for result in (ours, theirs):
        result.pop("stderr")
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert numbers(ours[name]) == pytest.approx(numbers(theirs[name]), rel=1e-6, abs=1e-7), name
