"""Imports modules once, and forks a rank for each client that connects (`client`).

    python server.py LISTENER LAUNCHER MODULES ["-m" or ""] PROGRAM ARGUMENT...

The first two are the numbers of sockets. The server ends when the launcher's end of the second one is closed, and its ranks with it.
It has one thread, since a fork copies no other. A rank runs the program as a new interpreter would.
"""

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import io
import os
import pkgutil
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Collection, Sequence

READY = b"ready"
# While modules are imported. CUDA that was asked for its devices cannot be used after a fork, the driver's library can; the allocator
# of pyarrow would start a thread.
_VARIABLES = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
_DESCENDANTS_S = 3.0  # how long what a failed rank has started has to end
_THREAD_ENDS_S = 1.0  # how long the kernel may list a thread that has ended
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl.h
# The driver's file that a process opens when it initialises CUDA, by torch or otherwise.
_CUDA_FILE = "/dev/nvidia-uvm"


class Server:
    """Forks ranks, passes signals on to them, and tells clients how they ended."""

    def __init__(self, listener: socket.socket, launcher: socket.socket) -> None:
        self.listener, self.launcher = listener, launcher
        self.ranks: dict[socket.socket, int] = {}
        self.ending: set[int] = set()  # processes of `end_descendants`
        self.wake, self.woken = socket.socketpair()
        self.watched = selectors.DefaultSelector()

    def serve(self) -> bytes:
        """Fork ranks until the launcher and all ranks have ended; return, in a rank only, the variables of its client."""
        for end in (self.wake, self.woken):
            end.setblocking(False)
        signal.set_wakeup_fd(self.woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for source in (self.listener, self.launcher, self.wake):
            self.watched.register(source, selectors.EVENT_READ)
        has_launcher = True
        while has_launcher or self.ranks:
            for key, _ in self.watched.select():
                if key.fileobj is self.wake:
                    self.wake.recv(4096)
                    self.report_ends(has_launcher)
                elif key.fileobj is self.listener:
                    client, _ = self.listener.accept()
                    if variables := self.fork_rank(client):
                        return variables
                elif key.fileobj is self.launcher:
                    has_launcher = False
                    self.watched.unregister(self.launcher)
                    self.watched.unregister(self.listener)
                    for rank in self.ranks.values():
                        os.killpg(rank, signal.SIGTERM)
                elif key.fileobj in self.ranks:
                    self.forward(key.fileobj)
        os._exit(0)

    def fork_rank(self, client: socket.socket) -> bytes:
        """Fork a rank for a client; return its variables in the rank, and nothing in the server."""
        size, files, _, _ = socket.recv_fds(client, 8, 3)
        length, variables = int.from_bytes(size, "little"), b""
        while len(variables) < length and (part := client.recv(length - len(variables))):
            variables += part
        for process in self.ending:  # a restarted rank may need what they hold, such as ports
            os.waitpid(process, 0)
        self.ending.clear()
        rank = os.fork() if length and len(variables) == length else -1
        if rank == 0:
            self.become_rank(client, files)
            return variables
        for file in files:
            os.close(file)
        if rank > 0:
            with contextlib.suppress(OSError):  # the rank has done so, or has ended
                os.setpgid(rank, rank)
            with contextlib.suppress(OSError):  # the client has ended
                client.send(rank.to_bytes(4, "little"))
            self.ranks[client] = rank
            self.watched.register(client, selectors.EVENT_READ)
        else:
            client.close()  # which has ended
        return b""

    def become_rank(self, client: socket.socket, files: Sequence[int]) -> None:
        """Turn a copy of the server into a process with the client's streams, which ends when the server is killed."""
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for ours in (self.watched, self.listener, self.launcher, self.wake, self.woken, client, *self.ranks):
            ours.close()
        for stream, file in enumerate(files):
            os.dup2(file, stream)
            os.close(file)

    def forward(self, client: socket.socket) -> None:
        """Send a rank the signals that its client has got; kill it if the client has ended."""
        numbers = client.recv(4096)
        for number in numbers:
            os.kill(self.ranks[client], number)
        if not numbers:
            os.killpg(self.ranks[client], signal.SIGKILL)
            self.forget(client)

    def forget(self, client: socket.socket) -> None:
        """Close the connection to a client."""
        del self.ranks[client]
        self.watched.unregister(client)
        client.close()

    def report_ends(self, has_launcher: bool) -> None:
        """Tell clients how their ranks ended."""
        clients = {rank: client for client, rank in self.ranks.items()}
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            self.ending.discard(process)
            if process in clients:
                code = os.waitstatus_to_exitcode(status)
                if code or not has_launcher:
                    self.end_descendants(process)
                with contextlib.suppress(OSError):
                    clients[process].send(code.to_bytes(4, "little", signed=True))
                self.forget(clients[process])

    def end_descendants(self, group: int) -> None:
        """End what a rank has started and left, in a separate process, as that may take seconds."""
        try:
            os.killpg(group, 0)
        except OSError:
            return
        process = os.fork()
        if process == 0:
            from accelerate.launch.guard import end_groups

            self.listener.close()  # or clients would wait for this process if the server were killed
            end_groups([group], _DESCENDANTS_S)
            os._exit(0)
        self.ending.add(process)


# -- before the first fork -----------------------------------------------------------------------------------------------


def preload(modules: Sequence[str]) -> str:
    """Import modules; return why no rank can be forked afterwards, or an empty text."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            traceback.print_exc()
            return f"the module {module} cannot be imported: {type(error).__name__}: {error}"
        if fault := _lost_by_fork():
            return f"importing {module} {fault}, which a forked process cannot use. Remove it from --preload"
    return ""


def _lost_by_fork() -> str:
    """Say in words what this process has that a fork would lose; nothing if a fork loses nothing."""
    import torch

    if torch.cuda.is_initialized() or _CUDA_FILE in _open_files():
        return "initialises CUDA"
    if torch.xpu.is_initialized():
        return "initialises XPU"
    if threads := [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]:
        return f"starts the threads {', '.join(threads)}"
    if _native_threads() == 0:
        return ""
    # Libraries that can be forked, such as OpenBLAS, end their threads before a fork, and start them again.
    probe = os.fork()
    if probe == 0:
        os._exit(0)
    os.waitpid(probe, 0)
    deadline = time.monotonic() + _THREAD_ENDS_S
    while (count := _native_threads()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return f"starts {count} threads outside Python" if count else ""


def _open_files() -> set[str]:
    paths = set()
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing is closed by now
            paths.add(os.readlink(f"/proc/self/fd/{file}"))
    return paths


def _native_threads() -> int:
    return len(os.listdir("/proc/self/task")) - threading.active_count()


# -- in a rank -----------------------------------------------------------------------------------------------------------


def take_over(variables: bytes, server: int, blocked: set[int]) -> None:
    """Give a new rank the client's variables, and renew what an interpreter has from its start."""
    import torch

    from accelerate.runtime import failure

    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    os.environ.clear()
    for variable in variables.split(b"\0"):
        name, _, value = variable.partition(b"=")
        os.environb[name] = value
    if failure.LAUNCHER in os.environ:  # the server has started this rank for the launcher
        os.environ[failure.LAUNCHER] = str(server)
    if sys.stdout is not None and not sys.stdout.write_through:
        sys.stdout.reconfigure(line_buffering=os.isatty(1))
    random.seed()
    torch.default_generator.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    failure.watch()
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def run(kind: str, program: str, arguments: Sequence[str]) -> int:
    """Run a program as the interpreter does, and show its error; return the exit status, or minus SIGINT's number."""
    try:
        _execute(kind, program, arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
    except BaseException as error:
        # Only a module's traceback begins with Python's function that runs it.
        hidden, trace = {__file__, "" if kind else runpy._run_code.__code__.co_filename}, error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in hidden:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    else:
        return 0
    return 1


def _execute(kind: str, program: str, arguments: Sequence[str]) -> None:
    """Run a script, a folder or archive of one, or, if `kind` is "-m", a module."""
    sys.argv[:] = [kind or program, *arguments]
    sys.orig_argv[:] = [sys.executable, *([kind] if kind else []), program, *arguments]
    importlib.invalidate_caches()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    if kind or pkgutil.get_importer(program) is not None:
        runpy._run_module_as_main(program if kind else "__main__", alter_argv=bool(kind))
        return
    path = os.path.abspath(program)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    runpy._run_code(code, vars(main), None, "__main__", script_name=path)


def end(status: int, inherited: Collection[str]) -> None:
    """End a rank as the interpreter ends, except that what it has inherited from the server is not taken apart: that takes 0.4 s.

    Args:
        status: What `run` has returned.
        inherited: The modules that the server has imported.
    """

    def release() -> None:
        # Open files are written, and destructors run, when the last reference goes. No thread runs by then in an interpreter.
        threading.excepthook = lambda arguments: None
        sys.stdout, sys.stderr, sys.excepthook = sys.__stdout__, sys.__stderr__, sys.__excepthook__
        for name in ["__main__", *(name for name in list(sys.modules) if name not in inherited)]:
            if isinstance(module := sys.modules.get(name), types.ModuleType):
                vars(module).clear()
        gc.collect()

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            if stream is not None and not stream.closed:
                stream.flush()
        ctypes.CDLL(None).fflush(None)

    for step in (threading._shutdown, atexit._run_exitfuncs, flush, release, flush):
        try:
            step()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            status = status or 120  # that of an interpreter that cannot write its last output
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def main() -> None:
    """Import, then serve; in a rank, run the program."""
    listener, launcher = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    modules, kind, program, *arguments = sys.argv[3:]
    for ours in (listener, launcher):
        ours.set_inheritable(False)
    if not getattr(sys.flags, "safe_path", False):
        is_path = not kind and pkgutil.get_importer(program) is not None
        sys.path[0] = os.getcwd() if kind else program if is_path else os.path.dirname(os.path.realpath(program))
    os.environ.update(_VARIABLES)
    gc.disable()
    if fault := preload(modules.split(",")):
        launcher.send(fault.encode())
        os._exit(1)
    gc.enable()
    gc.freeze()  # the collector would touch, and so copy, the memory that ranks share
    for (
        finalizer
    ) in weakref.finalize._registry:  # what belongs to the server, such as temporary folders, ranks leave alone
        finalizer.atexit = False
    # A scheduler that signals every process of a job must not end the server before its ranks.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGCHLD})
    server = os.getpid()
    launcher.send(READY)
    variables = Server(listener, launcher).serve()
    take_over(variables, server, blocked)
    inherited = frozenset(sys.modules)
    end(run(kind, program, arguments), inherited)


if __name__ == "__main__":
    main()
