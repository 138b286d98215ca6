"""Saving and loading the state of a run, given the objects themselves: the public path of `accelerate.extensions.compat.checkpointing`."""

from accelerate.base._lazy import stand_for

stand_for(__name__, "accelerate.extensions.compat.checkpointing")
