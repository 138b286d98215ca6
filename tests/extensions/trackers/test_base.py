"""The contract of a tracker."""

import pytest

from accelerate.extensions.trackers.base import GeneralTracker


def test_missing_definitions_are_listed():
    class Nothing(GeneralTracker):
        pass

    class Half(GeneralTracker):
        name = "half"
        requires_logging_directory = True

    class Whole(Half):
        @property
        def tracker(self):
            raise AssertionError("must not be asked before the run has started")

    with pytest.raises(NotImplementedError, match="`name`, `requires_logging_directory`, `tracker`"):
        Nothing()
    with pytest.raises(NotImplementedError, match="Half lacks.*: `tracker`"):
        Half()
    Whole()
    # A blank tracker does nothing.
    assert GeneralTracker.__module__ == "accelerate.tracking"
    blank = GeneralTracker(_blank=True)
    assert blank.start() is blank.log({}, step=1, anything=2) is blank.finish() is None
    assert blank.store_init_configuration({}) is None
