"""Temporary."""
import os
import pytest
@pytest.fixture(autouse=True)
def clean():
    from accelerate.state import AcceleratorState, GradientState
    env = dict(os.environ)
    AcceleratorState._reset_state(True); GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True); GradientState._reset_state()
    os.environ.clear(); os.environ.update(env)
