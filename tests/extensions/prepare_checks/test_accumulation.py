"""The warning of accumulation settings that a new Accelerator changes for a live one."""

import warnings

from accelerate import Accelerator
from accelerate.state import GradientState
from accelerate.utils import GradientAccumulationPlugin


def test_a_new_accelerator_that_changes_the_steps_of_a_live_one_warns():
    def messages(**options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = Accelerator(cpu=True, **options)
        return made, [str(item.message) for item in caught if "gradient accumulation of another" in str(item.message)]

    first, quiet = messages(gradient_accumulation_steps=3)
    assert not quiet
    same, quiet = messages(gradient_accumulation_steps=3)
    assert not quiet
    second, said = messages()
    assert len(said) == 1 and "gradient_accumulation_steps from 3 to 1" in said[0]
    plugin = GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False)
    third, quiet = messages(gradient_accumulation_plugin=plugin)
    assert not quiet, "without an effect"
    fourth, said = messages(gradient_accumulation_steps=2)
    assert "gradient_accumulation_steps from 1 to 2, sync_with_dataloader from False to True" in said[0]
    for accelerator in (first, same, second, third, fourth):
        accelerator.free_memory()


def test_settings_from_before_a_reset_are_no_former_ones():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = Accelerator(cpu=True, gradient_accumulation_steps=3)
        GradientState._reset_state()
        second = Accelerator(cpu=True)
    assert first.gradient_accumulation_steps == 3 and second.gradient_accumulation_steps == 1
    assert not [item for item in caught if "gradient accumulation of another" in str(item.message)]
