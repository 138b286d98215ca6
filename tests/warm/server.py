"""Import packages once, then fork a process for each request of `client.py`.

The server imports when the first client connects, and ends when the test run ends. A client that ends early, because it was
killed, takes its process along.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import linecache
import marshal
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
import weakref

IMPORTED = {
    "torch": """torch torch._dynamo torch.distributed torch.distributed.run torch.distributed.checkpoint torch.distributed.fsdp
        torch.distributed.tensor torch.distributed.checkpoint.state_dict torch.distributed.elastic.agent.server.local_elastic_agent
        torch.distributed.optim torch.distributed.algorithms.join torch.utils.data torch.utils.serialization.config torch.optim
        numpy safetensors.torch psutil yaml xxhash packaging.version multiprocessing.spawn unittest.mock"""
}
IMPORTED["transformers"] = (
    f"{IMPORTED['torch']} transformers transformers.trainer transformers.models.gpt2.modeling_gpt2 datasets"
)


class Child(Exception):
    """Leaves the server's loop in the new process."""


def serve(listener: socket.socket, alive: socket.socket) -> None:
    """Fork a process for each request until `alive` ends; raise Child in the new process."""
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    watched = selectors.DefaultSelector()
    for known in (listener, alive, wake):
        watched.register(known, selectors.EVENT_READ)
    children: dict[socket.socket, int] = {}
    while True:
        for key, _ in watched.select():
            connection = key.fileobj
            if connection is alive:
                return
            if connection is wake:
                wake.recv(4096)
                report(children)
            elif connection is listener:
                client, _ = listener.accept()
                watched.register(client, selectors.EVENT_READ)
            elif connection in children or not (asked := request(connection)):
                watched.unregister(connection)
                connection.close()
                if child := children.pop(connection, None):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child, signal.SIGKILL)
            elif (child := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for ours in (watched, listener, alive, wake, woken, connection, *children):
                    ours.close()
                raise Child(*asked)
            else:
                for fd in asked[1]:
                    os.close(fd)
                children[connection] = child
                with contextlib.suppress(OSError):
                    connection.sendall(child.to_bytes(8, "little"))


def report(children: dict[socket.socket, int]) -> None:
    """Tell clients how their processes ended."""
    connections = {child: connection for connection, child in children.items()}
    while True:
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if child == 0:
            return
        if connection := connections.get(child):
            children[connection] = 0  # its number may belong to another process soon
            with contextlib.suppress(OSError):
                connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "little", signed=True))


def use_huge_pages() -> None:
    """Move this process's memory to huge pages where the kernel can: a fork copies a table entry for each page."""
    madvise, collapse = ctypes.CDLL(None).madvise, 25
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps") as maps:
        mappings = [line.split() for line in maps]
    for addresses, access, _, _, inode, *name in mappings:
        start, end = (int(address, 16) for address in addresses.split("-"))
        if inode == "0" and access.startswith("rw") and name != ["[stack]"]:
            madvise(start, end - start, collapse)


def request(connection: socket.socket) -> tuple[dict, list[int]] | None:
    """Read a request and its open files; None if the client has gone."""
    size, files, _, _ = socket.recv_fds(connection, 8, 250)
    if len(size) < 8:
        return None
    data = b""
    while len(data) < int.from_bytes(size, "little"):
        data += (part := connection.recv(1 << 20))
        if not part:
            return None
    return marshal.loads(data), files


def enter_mounts_of(client: int) -> None:
    """Enter the mount namespace of a client, which may see other disks."""
    mounts = f"/proc/{client}/ns/mnt"
    if os.readlink(mounts) == os.readlink("/proc/self/ns/mnt"):
        return
    with open(mounts) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), "the mount namespace of the client cannot be entered")


def become(asked: dict, files: list[int]) -> None:
    """Take over what a new process inherits from the one that starts it."""
    import multiprocessing
    import resource

    import numpy
    import torch

    os.setsid()
    high = [os.dup2(fd, 900 + place) for place, fd in enumerate(files)]
    for fd in files:
        os.close(fd)
    for target in set(range(3)).difference(asked["files"]):
        with contextlib.suppress(OSError):
            os.close(target)
    for fd, target in zip(high, asked["files"], strict=True):
        os.dup2(fd, target, inheritable=True)
        os.close(fd)
    enter_mounts_of(asked["client"])
    os.chdir(asked["folder"])
    os.umask(asked["umask"])
    os.sched_setaffinity(0, asked["affinity"])
    for name, limit in asked["limits"]:
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), limit)
    for number in asked["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, asked["blocked"])
    os.environ.clear()
    os.environ.update(asked["variables"])
    unbuffered = asked["task"][0] or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=unbuffered)
    me, parent, current = os.getpid(), asked["parent"], os.getppid
    os.getppid = lambda: parent if os.getpid() == me else current()
    sys.executable = sys._base_executable = asked["executable"]
    multiprocessing.set_executable(sys.executable)
    numpy.random.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads.isdigit() else len(asked["affinity"]))


def watch_for_errors() -> None:
    """Let a preloaded accelerate look again whether this process is a rank, as it does when it is imported."""
    if failure := sys.modules.get("accelerate.runtime.failure"):
        sys.excepthook, failure._former = sys.__excepthook__, None
        failure.watch()


def execute(task: tuple, base: list[str]) -> None:
    """Run a program as the interpreter would."""
    _, kind, program, arguments = task
    first = {"-c": "", "-m": os.getcwd(), "": os.path.dirname(os.path.realpath(program))}[kind]
    paths = os.environ.get("PYTHONPATH")
    sys.path[:] = [first, *(paths.split(os.pathsep) if paths else []), *base]
    sys.argv[:] = [kind or program, *arguments]
    sys.orig_argv[:] = [sys.executable, *([kind] if kind else []), program, *arguments]
    importlib.invalidate_caches()
    watch_for_errors()
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__builtins__ = sys.modules["builtins"]
    if kind == "-m":
        sys.modules.pop(program, None)
        runpy._run_module_as_main(program)
        return
    name = "<string>"
    if not kind:
        name = module.__file__ = os.path.abspath(program)
        module.__loader__ = importlib.machinery.SourceFileLoader("__main__", name)
        module.__cached__ = None
        with open(program, "rb") as file:
            program = file.read()
    elif sys.version_info >= (3, 13):  # whose tracebacks show the lines of `-c`
        linecache.cache[name] = (len(program), None, program.splitlines(keepends=True), name)
    exec(compile(program, name, "exec"), module.__dict__)


def run(asked: dict, files: list[int], base: list[str]) -> None:
    """Run a request in this process, and end it as an interpreter ends."""
    status = 0
    try:
        become(asked, files)
        execute(asked["task"], base)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    streams = (stream.flush for stream in (sys.stdout, sys.stderr) if stream is not None and not stream.closed)
    for end in (threading._shutdown, atexit._run_exitfuncs, *streams):
        try:
            end()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            status = status or 120
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def main() -> None:
    name, listener, alive = sys.argv[1], socket.socket(fileno=int(sys.argv[2])), socket.socket(fileno=int(sys.argv[3]))
    for ours in (listener, alive):
        os.set_inheritable(ours.fileno(), False)
    waiting = selectors.DefaultSelector()
    for either in (listener, alive):
        waiting.register(either, selectors.EVENT_READ)
    if waiting.select()[0][0].fileobj is alive:
        return
    waiting.close()
    base = sys.path[1:]
    del sys.path[0]
    gc.disable()
    for module in IMPORTED[name].split():
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    gc.enable()
    gc.freeze()
    # At its end a process would unregister each operator that torch has registered in Python, which takes 30 ms.
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False
    use_huge_pages()
    try:
        serve(listener, alive)
    except Child as child:
        asked = child.args
    else:
        return
    run(*asked, base)


if __name__ == "__main__":
    main()
