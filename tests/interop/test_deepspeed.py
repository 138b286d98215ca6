"""The Trainer with DeepSpeed, beside the same run without; `make test-deepspeed` has the environment."""

import pytest

from interop.programs import need

pytestmark = [pytest.mark.interop, pytest.mark.slow]


def test_the_trainer_trains_saves_and_resumes(run_ours):
    need("transformers", "deepspeed")
    plain = run_ours("trainer.py", 2)
    for stage in ("2", "3"):
        found = run_ours("trainer.py", 2, stage)
        for name in ("losses", "resumed", "eval_loss", "prediction"):
            assert found[name] == pytest.approx(plain[name], abs=1e-4), (stage, name)


def test_the_trainer_shares_sequences(run_ours):
    need("transformers", "deepspeed")
    whole = run_ours("trainer_ulysses.py", 2)
    for stage in ("1", "3"):
        found = run_ours("trainer_ulysses.py", 2, stage)
        for name in ("losses", "resumed", "eval_loss"):
            assert found[name] == pytest.approx(whole[name], abs=1e-4), (stage, name)
