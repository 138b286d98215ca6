from unittest import mock

import pytest

from accelerate import Accelerator
from accelerate.runtime import storage
from accelerate.state import AcceleratorState, GradientState, PartialState


def test_kept_puts_the_dictionary_back_after_an_error():
    slot = storage.Slot()
    before = slot.current
    with pytest.raises(KeyError), slot.kept():
        slot.renew()["a"] = 1
        raise KeyError
    assert slot.current is before and before == {}


@pytest.mark.parametrize(
    ("kind", "slot"), [(PartialState, "process"), (AcceleratorState, "accelerator"), (GradientState, "gradient")]
)
def test_what_is_assigned_on_a_state_class_takes_the_slots_place(kind, slot):
    live, slot, others = Accelerator(cpu=True), getattr(storage, slot), {}
    mine, own = slot.current, dict(slot.current)
    with mock.patch.object(kind, "_shared_state", others):
        assert slot.current is others is kind._shared_state and mine == own and live.num_processes == 1
        other = Accelerator(cpu=True)
        assert kind().__dict__ is others and others.keys() == own.keys() and mine == own
        kind._reset_state()
        assert kind._shared_state == {} and kind._shared_state is slot.current and others.keys() == own.keys()
        with slot.kept():
            slot.bind(own)
            assert kind._shared_state is own
        assert kind._shared_state == {} and other.num_processes == 1
    assert kind._shared_state is slot.current is mine


def test_the_process_state_is_built_on_demand():
    assert storage.process.current == {}
    assert storage.process.filled()["num_processes"] == 1
    assert storage.process.filled() is storage.process.current
    with pytest.raises(RuntimeError, match="Accelerator"):
        storage.Slot().filled()
