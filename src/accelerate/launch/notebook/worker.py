"""The part of a launch that runs in the processes that were started."""

import os
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from accelerate.config.exit_status import PREEMPTED
from accelerate.launch.notebook import failures, output
from accelerate.launch.notebook.request import name_of

_SIGNALS = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_INTERRUPTED = 130


class Interrupted(RuntimeError):
    """A process was interrupted, and the one that started it was not."""


class Worker:
    """What a process runs: the function, after getting rid of what it inherited.

    Args:
        function: the function.
        directory: where the processes of the run write down why they fail.
        forked: the process was forked.
        to_files: put its output into files, which torch reads and prints with a prefix.
        rank: its number among all processes; None is what the environment says.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        directory: str,
        forked: bool,
        to_files: bool = False,
        rank: int | None = None,
    ) -> None:
        self.function = function
        self.directory = directory
        self.forked = forked
        self.to_files = to_files
        self.rank = rank
        self.__name__ = name_of(function)
        self.__qualname__ = getattr(function, "__qualname__", self.__name__)

    def __call__(self, *args: Any) -> None:
        """Run the function; what it returns is dropped, as it would have to be sent home and need not be picklable.

        Args:
            args: of the function.
        """
        try:
            self._begin_afresh()
            self.function(*args)
        except SystemExit as end:
            if end.code in (None, 0):
                return
            if end.code != PREEMPTED:  # then it has saved itself, and has not failed
                self._fail(end)
            raise
        except KeyboardInterrupt as error:
            # Torch takes an interrupted process for one that is done, and would wait for its result for ever.
            self._fail(error)
            raise SystemExit(_INTERRUPTED) from None
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            output.flush()

    def _fail(self, error: BaseException) -> None:
        failures.write(self.directory, error, _below(error.__traceback__), self.rank)

    def _begin_afresh(self) -> None:
        import torch

        from accelerate.state import AcceleratorState, GradientState

        _end_with_the_parent()
        if self.to_files:
            output.into_files(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]))
        else:
            output.in_whole_lines()
        if self.forked:
            os.environ["FORK_LAUNCHED"] = "1"
            _forget_handlers()
            # GNU OpenMP does not survive a fork: a parallel region would wait for threads that only the parent has.
            torch.set_num_threads(1)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def _end_with_the_parent() -> None:
    """Let the system end this process when the one that started it is killed (Linux)."""
    from torch import multiprocessing

    ask = getattr(multiprocessing, "_prctl_pr_set_pdeathsig", None)
    if ask is not None and hasattr(signal, "SIGTERM"):
        # Torch asks for SIGINT, which waits for Python; a process inside a collective would stay, with its memory on the GPU.
        ask(signal.SIGTERM)


def _below(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that is the user's: behind the launcher's own frames, if anything is."""
    rest = trace
    while rest is not None and os.path.dirname(rest.tb_frame.f_code.co_filename) == os.path.dirname(__file__):
        rest = rest.tb_next
    return rest or trace


def _forget_handlers() -> None:
    """Let signals do what they do in a fresh process: the launcher's handlers came along with the fork."""
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in _SIGNALS:
        number = getattr(signal, name, None)
        # A function of Python's would not run while the process waits inside torch, and it could not be stopped there.
        if number is not None and callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
