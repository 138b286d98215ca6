import inspect
import json
import logging
import sys
import warnings

import pytest
import torch

from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate import logging as home
from accelerate.logging import MultiProcessAdapter, get_logger
from accelerate.process import PartialState
from accelerate.runtime import storage

MODEL = torch.nn.Linear(1, 1)


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


class OwnAdapter(logging.LoggerAdapter):
    """Names its caller, by the count of the upstream package."""

    def log(self, level, msg, *args, **kwargs):
        self.logger.log(level, msg, *args, stacklevel=3, **kwargs)


def line():
    return inspect.currentframe().f_back.f_lineno


def test_every_way_to_log_names_the_line_that_logs(caplog):
    PartialState(cpu=True)
    logger = get_logger("k", "INFO")
    on_top = MultiProcessAdapter(logger, {})
    start = line()
    logger.info("1")
    logger.log(logging.WARNING, "2", main_process_only=False)
    logger.error("3", in_order=True)
    logger.warning_once("4")
    logger.exception("5", exc_info=False)
    logger.critical("6", stacklevel=1)
    on_top.debug("not shown")
    logger.warning("8", stacklevel=2)
    one = lambda: logger.warning("9", stacklevel=3)  # noqa: E731
    one()
    two = lambda: on_top.warning("11", stacklevel=3)  # noqa: E731
    two()
    on_top.warning("13")
    OwnAdapter(logger, {}).warning("14")
    OwnAdapter(on_top, {}).warning("15")
    logging.LoggerAdapter(logger, {}).warning("16")
    assert [record.lineno - start for record in caplog.records] == [1, 2, 3, 4, 5, 6, 8, 10, 12, 13, 14, 15, 16]
    assert {record.pathname for record in caplog.records} == {__file__}


@pytest.mark.parametrize(
    "call",
    [
        lambda: DistributedDataParallelKwargs(comm_wrapper="bf16"),
        lambda: Accelerator(cpu=True, split_batches=True),
        lambda: [one.prepare(MODEL) for one in [Accelerator(cpu=True)] for _ in "12"],
    ],
)
def test_warnings_point_at_the_users_line(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    (warning,) = found
    assert warning.filename == __file__ and 0 <= warning.lineno - call.__code__.co_firstlineno <= 2


@pytest.fixture
def chosen(monkeypatch):
    """Let a process begin that is requested a format, with separate handlers."""

    def choose(word, *handlers, folder=""):
        PartialState(cpu=True)
        monkeypatch.setenv("ACCELERATE_LOG_FORMAT", word)
        monkeypatch.setenv("ACCELERATE_LOG_DIR", str(folder))
        monkeypatch.setattr(logging.root, "handlers", list(handlers))
        home._choose_format.cache_clear()

    yield choose
    home._choose_format.cache_clear()


def say(logger):
    try:
        raise KeyError("x")
    except KeyError:
        logger.exception("failed\nin %d", 3)
    logging.getLogger("another").warning("also")


def check_lines(text):
    first, second = map(json.loads, text.splitlines())
    assert list(first) == ["time", "level", "logger", "rank", "world_size", "file", "line", "message", "exception"]
    assert (first["level"], first["logger"], first["rank"], first["world_size"]) == ("ERROR", "m", 0, 1)
    assert (first["file"], first["line"]) == (__file__, say.__code__.co_firstlineno + 4)
    assert first["message"] == "failed\nin 3" and first["exception"].endswith("KeyError: 'x'")
    assert (second["logger"], second["message"], second["exception"]) == ("another", "also", None)
    assert first["time"].endswith("+00:00") and first["time"] <= second["time"]


def test_json_takes_the_place_of_text_on_the_terminal(chosen, capsys):
    for handlers in ([], [logging.StreamHandler(sys.stderr)]):
        chosen("json", *handlers)
        say(get_logger("m"))
        check_lines(capsys.readouterr().err)
        assert len(logging.root.handlers) == 1


def test_each_rank_has_a_file_of_json_and_the_terminal_stays(chosen, capsys, tmp_path):
    folder = tmp_path / "logs"
    chosen("JSON", logging.StreamHandler(sys.stderr), folder=folder)
    storage.process.current["process_index"] = 2
    get_logger("m").info("not here, but the file is open")
    try:
        raise KeyError("x")
    except KeyError:
        get_logger("m").exception("failed", main_process_only=False)
    (entry,) = map(json.loads, (folder / "rank_2.jsonl").read_text().splitlines())
    assert entry["rank"] == 2 and "KeyError: 'x'" in entry["exception"]
    assert capsys.readouterr().err.startswith("[RANK 2] failed\nTraceback")
    logging.root.handlers[-1].close()


def test_a_format_that_is_unknown_is_named(chosen):
    chosen("xml")
    with pytest.raises(ValueError, match="ACCELERATE_LOG_FORMAT is 'xml'; set it to json or text"):
        get_logger("m").warning("x")


@pytest.mark.parametrize("own", [[], [logging.StreamHandler]])
def test_a_folder_that_cannot_be_used_is_named_once_and_the_program_goes_on(chosen, capsys, tmp_path, own):
    (tmp_path / "file").touch()
    chosen("json", *(each(sys.stderr) for each in own), folder=tmp_path / "file" / "logs")
    for word in ("first", "second"):
        get_logger("m").warning(word)
    err = capsys.readouterr().err
    assert err.count("log as JSON") == 1 and repr(str(tmp_path / "file" / "logs")) in err and "Not a directory" in err
    assert err.index("log as JSON") < err.index("first") < err.index("second")
