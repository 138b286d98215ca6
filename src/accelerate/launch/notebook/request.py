"""What was asked of a launcher of functions, checked before anything is started."""

import inspect
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.config.options import BY_NAME

# A port that nobody chose: torch's default.
DEFAULT_PORT = 29500
BACKENDS = ("static", "c10d", "etcd", "etcd-v2")


@dataclass(frozen=True)
class Request:
    """The arguments of `accelerate.launchers.notebook_launcher`, under their names; see there."""

    function: Callable[..., Any]
    args: Sequence[Any] = ()
    num_processes: int | None = None
    mixed_precision: str = "no"
    use_port: str | int = str(DEFAULT_PORT)
    master_addr: str = "127.0.0.1"
    node_rank: int = 0
    num_nodes: int = 1
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_conf: Mapping[str, Any] | None = None
    rdzv_id: str = "none"
    max_restarts: int = 0
    monitor_interval: float = 0.1
    log_line_prefix_template: str | None = None

    @property
    def precision(self) -> str | None:
        """The mixed precision in its usual spelling; None is refused by `check`."""
        return BY_NAME["mixed_precision"].parse(self.mixed_precision)

    @property
    def port(self) -> int:
        """The port as a number; 0 for none."""
        text = str(self.use_port).strip()
        return int(text) if text not in ("", "None") else 0

    @property
    def name(self) -> str:
        """The function's name, for people."""
        return name_of(self.function)

    @property
    def endpoint(self) -> str:
        """Where several machines meet."""
        return self.rdzv_endpoint or f"{self.master_addr}:{self.port or DEFAULT_PORT}"

    @property
    def chosen_port(self) -> int:
        """The port at which the processes of one machine meet; 0, a free one, unless somebody chose."""
        if self.rdzv_endpoint:
            return int(self.rdzv_endpoint.rpartition(":")[2])
        return 0 if self.port == DEFAULT_PORT else self.port


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name for people.

    Args:
        function: any callable; a `functools.partial` has the name of what it calls.
    """
    inner = getattr(function, "func", None)
    if inner is not None and not hasattr(function, "__name__"):
        return name_of(inner)
    return getattr(function, "__name__", type(function).__name__)


def check(request: Request) -> None:
    """Refuse what cannot run, by the name of the argument.

    Args:
        request: what was asked for.

    Raises:
        TypeError: an argument has the wrong type, or the function does not take `args`.
        ValueError: an argument has an impossible value.
    """
    _check_function(request)
    if request.num_processes is not None:
        _check_integer("num_processes", request.num_processes, 1, "leave it out for one process per device")
    _check_integer("num_nodes", request.num_nodes, 1, "it is the number of machines")
    _check_integer("node_rank", request.node_rank, 0, "machines are numbered from 0")
    _check_integer("max_restarts", request.max_restarts, 0, "0 is for none")
    interval = request.monitor_interval
    if isinstance(interval, bool) or not isinstance(interval, (int, float)) or not 0 < interval < float("inf"):
        raise ValueError(f"monitor_interval is {interval!r}; give a number of seconds above 0.")
    if request.node_rank >= request.num_nodes:
        raise ValueError(
            f"node_rank is {request.node_rank}, and num_nodes is {request.num_nodes}: machines are numbered from 0 to "
            f"{request.num_nodes - 1}."
        )
    if request.precision is None:
        raise ValueError("mixed_precision is None; choose one of no, fp16, bf16, fp8.")
    _check_meeting(request)


def _check_function(request: Request) -> None:
    function, args = request.function, request.args
    if not callable(function):
        hint = " Pass the function itself, without calling it." if function is None else ""
        raise TypeError(f"function is {function!r}, which cannot be called.{hint}")
    called = getattr(function, "func", function)  # of a functools.partial
    if not inspect.isroutine(called):
        called = type(called).__call__
    for kind, known in (("a coroutine", inspect.iscoroutinefunction), ("a generator", inspect.isgeneratorfunction)):
        if known(called):
            raise TypeError(
                f"function is {request.name}, {kind} function: calling it runs nothing of it. Give a plain function that "
                "runs it to its end."
            )
    if isinstance(args, (str, bytes, bytearray)) or not isinstance(args, Sequence):
        raise TypeError(
            f"args is {_short(args)}; give a tuple of the function's arguments, as in args=({_short(args)},)."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins need not have one
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        raise TypeError(f"args is {_short(args)}, which does not fit {request.name}{signature}: {error}.") from None


def _check_integer(name: str, value: Any, least: int, hint: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; give an integer ({hint}).")
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least} ({hint}).")


def _check_meeting(request: Request) -> None:
    try:
        port = request.port
    except ValueError:
        port = -1
    if not 0 <= port < 65536:
        raise ValueError(
            f"use_port is {request.use_port!r}; give a port from 1 to 65535, or leave it out for a free one."
        )
    if request.rdzv_backend not in BACKENDS:
        raise ValueError(f"rdzv_backend is {request.rdzv_backend!r}; choose one of {', '.join(BACKENDS)}.")
    if request.rdzv_conf is not None and not isinstance(request.rdzv_conf, Mapping):
        raise TypeError(f"rdzv_conf is {request.rdzv_conf!r}; give a dictionary, such as {{'timeout': 60}}.")
    if request.rdzv_endpoint:
        host, _, number = request.rdzv_endpoint.rpartition(":")
        if not host or not number.isdigit() or int(number) > 65535:
            raise ValueError(f"rdzv_endpoint is {request.rdzv_endpoint!r}; give host:port.")
    if request.num_nodes == 1:
        if request.rdzv_backend.startswith("etcd"):
            raise ValueError(f"rdzv_backend is {request.rdzv_backend!r}, which is for several machines (num_nodes).")
        return
    if not request.rdzv_endpoint and not port:
        raise ValueError(
            f"use_port is {request.use_port!r}, and num_nodes is {request.num_nodes}: several machines must all know the port. "
            "Give one, the same on each of them."
        )
    host = request.endpoint.rpartition(":")[0].strip("[]")
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        argument = "rdzv_endpoint" if request.rdzv_endpoint else "master_addr"
        value = request.rdzv_endpoint or request.master_addr
        raise ValueError(
            f"{argument} is {value!r}, and this machine knows no {host!r} ({error}). Give the name or address of machine 0."
        ) from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
