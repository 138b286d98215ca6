import logging
import sys

import pytest

from accelerate.logging import MultiProcessAdapter, get_logger
from accelerate.process import PartialState
from accelerate.runtime import storage


@pytest.fixture(autouse=True)
def levels():
    before = logging.root.level
    yield
    logging.root.setLevel(before)


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


def test_level_from_argument_and_environment(monkeypatch):
    assert get_logger("f", "debug").logger.level == logging.DEBUG
    assert logging.root.level == logging.DEBUG
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
    assert get_logger("g").logger.level == logging.ERROR
    assert get_logger("h", logging.INFO).logger.level == logging.INFO
    with pytest.raises(ValueError, match="LOUD"):
        get_logger("i", "loud")


def test_exceptions_and_extra_pass_through(caplog):
    PartialState(cpu=True)
    logger = MultiProcessAdapter(logging.getLogger("j"), {"run": 7})
    try:
        raise KeyError("x")
    except KeyError:
        logger.exception("failed", extra={"step": 1})
    (record,) = caplog.records
    assert record.exc_info[0] is KeyError and (record.run, record.step) == (7, 1)


class Renaming(MultiProcessAdapter):
    def process(self, msg, kwargs):
        return f"mine: {msg}", {}


class Silent(MultiProcessAdapter):
    @staticmethod
    def _should_log(main_process_only):
        return False


def test_a_subclass_decides_what_a_message_becomes_and_who_logs(caplog):
    PartialState(cpu=True)
    assert get_logger("k").process("text", {}) == ("[RANK 0] text", {})
    assert MultiProcessAdapter._should_log(True) and MultiProcessAdapter._should_log(False)
    Renaming(logging.getLogger("k"), {}).warning("text")
    Silent(logging.getLogger("k"), {}).warning("text", main_process_only=False)
    (record,) = caplog.records
    assert record.getMessage() == "mine: text" and record.funcName == sys._getframe().f_code.co_name


def test_the_record_names_the_caller(caplog):
    PartialState(cpu=True)

    def wrapper(logger, **kwargs):
        logger.warning("text", **kwargs)

    plain = get_logger("l")
    for logger in (plain, MultiProcessAdapter(plain, {}), logging.LoggerAdapter(plain, {})):
        wrapper(logger)
        wrapper(logger, stacklevel=1)
        wrapper(logger, stacklevel=2)
        wrapper(logger, in_order=True)
    here = sys._getframe().f_code.co_name
    assert [record.funcName for record in caplog.records] == ["wrapper", "wrapper", here, "wrapper"] * 3
