"""Stands for a rank that the server forks (`server`): passes signals on, and ends as the rank ends.

    python -S client.py SOCKET ARGUMENT...

The rank gets this process's variables, standard streams and signals. Where the server has ended, the arguments are those of a Python
interpreter that runs the rank. This program imports nothing of the package.
"""

import os
import resource
import signal
import socket
import sys
import types

# Those that no process can catch, and those of a terminal, which stop or continue its foreground processes.
_NOT_FORWARDED = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGCONT, signal.SIGWINCH}
_NOT_FORWARDED |= {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
_SERVER_KILLED = 70  # EX_SOFTWARE of sysexits.h


def main() -> None:
    """Ask for a rank, wait for its end, and end in the same way."""
    spare = os.open(os.devnull, os.O_RDWR)
    while spare < 3:  # a stream that was closed
        spare = os.dup(spare)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(sys.argv[1])
    except OSError as error:
        print(
            f"accelerate launch: the warm process has ended ({error}): this rank starts cold.",
            file=sys.stderr,
            flush=True,
        )
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
    variables = b"\0".join(name + b"=" + value for name, value in os.environb.items())
    socket.send_fds(connection, [len(variables).to_bytes(8, "little")], [0, 1, 2])
    connection.sendall(variables)

    def forward(number: int, frame: types.FrameType | None) -> None:
        try:
            connection.send(bytes([number]))
        except OSError:  # the rank has ended
            pass

    for number in signal.valid_signals() - _NOT_FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    rank, status = received(connection), received(connection)
    if status is None:
        if rank is not None:
            try:
                os.killpg(rank, signal.SIGKILL)
            except OSError:  # all of its processes have ended
                pass
        print("accelerate launch: the warm process was killed, and this rank with it.", file=sys.stderr, flush=True)
        os._exit(_SERVER_KILLED)
    end(status)


def received(connection: socket.socket) -> int | None:
    """Return the next number that the server sends; None if it has ended."""
    try:
        number = connection.recv(4)
    except ConnectionResetError:
        return None
    return int.from_bytes(number, "little", signed=True) if number else None


def end(status: int) -> None:
    """End with an exit status; minus the number of a signal by that signal."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left one
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
