"""Saves in the background: `save_state` returns when the state is copied, and a thread writes the checkpoint."""

from accelerate.extension import Spec

_HERE = "accelerate.extensions.async_save.saves"

SPEC = Spec(
    "async_save",
    methods={"wait_for_checkpoint": f"{_HERE}:wait_for_checkpoint"},
    background_save=f"{_HERE}:finish_in_background",
)
