import pytest

from accelerate import PartialState
from accelerate.config.env import REMOVED
from cases import cases


@cases("name", *REMOVED)
def test_removed_variable_is_refused(monkeypatch, name):
    monkeypatch.setenv(name, "0")
    PartialState()
    PartialState._reset_state()
    monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=f"{name}='1' has no effect") as error:
        PartialState()
    assert REMOVED[name] in str(error.value)
