"""An Accelerator that accumulates, from the tests of accumulation."""

from unit.training.test_gradients import halves

__all__ = ["halves"]
