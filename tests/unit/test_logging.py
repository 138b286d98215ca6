import logging

import pytest

from accelerate.logging import MultiProcessAdapter, get_logger
from accelerate.process import PartialState
from accelerate.runtime import storage


def test_names_rank_and_caller_once_there_is_a_state(caplog):
    with pytest.raises(RuntimeError, match="PartialState"):
        get_logger("a").info("hello")
    PartialState(cpu=True)
    with caplog.at_level("INFO"):
        get_logger("b").info("%s things", 3)
        get_logger("d").warning("mine", main_process_only=False, in_order=True)
    assert caplog.messages == ["[RANK 0] 3 things", "[RANK 0] mine"]
    record = caplog.records[0]
    assert (record.funcName, record.name) == ("test_names_rank_and_caller_once_there_is_a_state", "b")


def test_other_ranks_are_silent_unless_asked(caplog):
    PartialState(cpu=True)
    storage.process.current["process_index"] = 1
    logger = get_logger("c")
    logger.warning("no")
    logger.warning("in order", in_order=True)
    for _ in range(3):
        logger.warning_once("yes", main_process_only=False)
    assert caplog.messages == ["[RANK 1] yes"]
    assert caplog.records[0].funcName == "test_other_ranks_are_silent_unless_asked"


def test_exceptions_and_extra_pass_through(caplog):
    PartialState(cpu=True)
    logger = MultiProcessAdapter(logging.getLogger("j"), {"run": 7})
    try:
        raise KeyError("x")
    except KeyError:
        logger.exception("failed", extra={"step": 1})
    (record,) = caplog.records
    assert record.exc_info[0] is KeyError and (record.run, record.step) == (7, 1)
