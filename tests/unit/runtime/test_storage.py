import threading

import pytest

from accelerate.runtime import storage


def test_renewing_leaves_the_old_dictionary_to_its_holders():
    slot = storage.Slot()
    old = slot.current
    old["rank"] = 3
    assert slot.renew() is slot.current
    assert slot.current == {} and old == {"rank": 3}


def test_thread_local_slot_gives_every_thread_its_own():
    slot, shared, seen = storage.Slot(thread_local=True), storage.Slot(), []
    slot.current["who"] = shared.current["who"] = "main"
    thread = threading.Thread(target=lambda: seen.extend([dict(slot.current), dict(shared.current)]))
    thread.start()
    thread.join()
    assert seen == [{}, {"who": "main"}]


def test_kept_puts_the_dictionary_back_after_an_error():
    slot = storage.Slot()
    before = slot.current
    with pytest.raises(KeyError), slot.kept():
        slot.renew()["a"] = 1
        raise KeyError
    assert slot.current is before


def test_ensure_builds_the_process_state_on_demand():
    import accelerate.process  # noqa: F401 - registers the builder

    assert storage.process.current == {}
    assert storage.ensure("process")["num_processes"] == 1
    assert storage.ensure("process") is storage.process.current


def test_ensure_names_what_to_build(monkeypatch):
    monkeypatch.setattr(storage, "_builders", {})
    with pytest.raises(RuntimeError, match="Accelerator"):
        storage.ensure("accelerator")


def test_unknown_slot_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'models'.*process, accelerator, gradient"):
        storage.register_builder("models", dict)
