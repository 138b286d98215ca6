"""A stand-in for `python`: runs a program in a process that a server forks, and ends as that process ends.

The server's child gets this process's arguments, variables, directory, files, limits and signals. The real interpreter
runs instead where a forked process would differ: interpreter options other than -u and -B, variables that are read when the
interpreter or torch starts, another user or namespace (except for mounts), programs that are folders or come from standard input.
"""

# The modules of these names without an underscore take as long to import as the interpreter takes to start.
import _signal as signal
import _socket as socket
import marshal
import os
import resource
import sys

# Set by `warm.start`: the interpreter, the folder of the servers' sockets, `spaces()` and `fixed()` of the servers, and
# the variables of the second server's libraries.
REAL = FOLDER = ""
SPACES: list = []
FIXED: dict = {}
HUB: dict = {}

# Read when an interpreter, torch or a library starts: a process that was started with other values cannot take them over.
READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "TORCH", "PYTORCH", "KMP_", "MKL_", "MALLOC_", "COVERAGE_", "CUDA_")
READ_LATER = ("PYTHONPATH", "PYTHONUNBUFFERED", "TORCHELASTIC_", "TORCH_ELASTIC_", "TORCH_NCCL_")
READ_LATER += ("TORCH_CPP_LOG_LEVEL", "TORCHINDUCTOR_CACHE_DIR")  # torch's compiler sets it for its own processes
OF_HUB = ("HF_", "TRANSFORMERS_", "DATASETS_", "HUGGINGFACE_", "DIFFUSERS_")
LIBRARIES = (b"transformers", b"peft", b"trl", b"datasets", b"diffusers", b"tiny_models")
LIMITS = ("CORE", "FSIZE", "NOFILE", "AS", "STACK", "NPROC", "CPU", "MEMLOCK")


def spaces():
    """Return what separates this process from others: namespaces (except for mounts), root, user and group."""
    names = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid", "user", "ipc")]
    return [*names, os.readlink("/proc/self/root"), os.getuid(), os.geteuid(), os.getgid()]


def fixed(variables):
    """Return the variables that are read at the start."""
    return {k: v for k, v in variables.items() if k.startswith(READ_AT_START) and not k.startswith(READ_LATER)}


def of_hub(variables):
    """Return the variables that the second server's libraries read when they are imported."""
    return {k: v for k, v in variables.items() if k.startswith(OF_HUB)}


def parse(arguments):
    """Return whether output is unbuffered, "-c", "-m" or "", the program and its arguments; None if the server cannot run it."""
    rest, unbuffered = list(arguments), False
    while rest[:1] in (["-u"], ["-B"]):  # -B: multiprocessing passes it on, and the server writes no files either
        unbuffered |= rest.pop(0) == "-u"
    if rest[:1] in (["-c"], ["-m"]) and len(rest) > 1:
        return unbuffered, *rest[:2], rest[2:]
    if rest and rest[0].endswith(".py") and os.path.isfile(rest[0]):
        return unbuffered, "", rest[0], rest[1:]
    return None


def server_for(kind, program, arguments):
    """Return the server that has imported what a program needs; None if it needs a separate interpreter."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if any(os.path.isfile(os.path.join(path, f"{name}customize.py")) for path in paths for name in ("site", "user")):
        return None
    if of_hub(os.environ) != HUB or any(os.path.isdir(os.path.join(path, "accelerate")) for path in paths):
        return "torch"
    text = program.encode(errors="replace") if kind else b"".join(map(contents, scripts(program, arguments)))
    return "transformers" if any(word in text for word in LIBRARIES) else "torch"


def scripts(program, arguments):
    """Return a program and the scripts next to it that its arguments name, which it may import."""
    folder = os.path.dirname(program)
    named = [os.path.join(folder, word) for word in arguments if word.endswith(".py")]
    return [program, *filter(os.path.isfile, named)]


def contents(path):
    with open(path, "rb") as file:
        return file.read()


def connect():
    """Return a connection to the right server and the request; None where the real interpreter runs the program."""
    if os.environ.get("WARM") == "0" or fixed(os.environ) != FIXED or spaces() != SPACES:
        return None
    task = parse(sys.argv[1:])
    folder, called = os.path.split(sys.argv[0])
    name = task and ("transformers" if called == "worker" else server_for(*task[1:]))
    if not name:
        return None
    try:
        files = [int(fd) for fd in os.listdir("/proc/self/fd")]
        files = [fd for fd in files if fd < 3 and is_open(fd) or fd > 2 and is_open(fd) and os.get_inheritable(fd)]
        request = {
            "task": task, "files": files, "variables": dict(os.environ), "folder": os.getcwd(), "parent": os.getppid(),
            "client": os.getpid(), "executable": os.path.join(folder, called.replace("worker", "python")), "umask": os.umask(0),
            "affinity": list(os.sched_getaffinity(0)),
            "limits": [(name, resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))) for name in LIMITS],
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "ignored": [int(number) for number in CATCHABLE if signal.getsignal(number) == signal.SIG_IGN],
        }  # fmt: skip
        os.umask(request["umask"])
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(f"{FOLDER}/{name}")
    except OSError:  # the directory was removed, or the test run has ended
        return None
    return connection, files, marshal.dumps(request)


def is_open(fd):
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False


CATCHABLE = set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
CATCHABLE -= {signal.SIGPIPE, signal.SIGXFSZ}  # Python itself ignores these two
CATCHABLE -= {signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGWINCH}


def main():
    found = connect()
    if found is None:
        os.execv(REAL, [REAL, *sys.argv[1:]])
    connection, files, request = found
    child, early = [], []

    def forward(number, frame):
        if not child:
            early.append(number)
            return
        try:
            os.kill(child[0], number)
        except ProcessLookupError:
            pass

    for number in CATCHABLE:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    try:
        descriptors = b"".join(fd.to_bytes(4, sys.byteorder) for fd in files)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)
        connection.sendmsg([len(request).to_bytes(8, "little")], [rights])
        connection.sendall(request)
    except OSError:
        pass  # the same as no answer
    number = received(connection)
    if not number:  # the server could not start
        os.execv(REAL, [REAL, *sys.argv[1:]])
    child.append(int.from_bytes(number, "little"))
    # A reader of the program's output must see its end when the program closes it.
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in files:
        os.dup2(nothing, fd) if fd < 3 else os.close(fd)
    for number in early:
        forward(number, None)
    status = int.from_bytes(received(connection) or b"\x46", "little", signed=True)  # 70: the server was killed
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status in CATCHABLE:
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        os.kill(os.getpid(), -status)
    os._exit(status)


def received(connection):
    """Return the next number that the server sends; nothing if the server is gone."""
    data = b""
    try:
        while len(data) < 8:
            part = connection.recv(8 - len(data))
            if not part:
                return b""
            data += part
    except ConnectionResetError:
        return b""
    return data


if __name__ == "__main__":
    main()
