"""Start test processes from interpreters that have already imported torch.

An import of torch costs two seconds of processor time, one of transformers' Trainer nine, and the suite starts hundreds of
processes. `start()` replaces `sys.executable` by a stand-in for `python` (`client.py`). The stand-in asks a server (`server.py`)
for a process: the server has imported the packages and forks, and the child runs the program as an interpreter would. Nothing
else has run in that process before, so tests are as isolated as with new interpreters.

`WARM=0` in the environment starts real interpreters everywhere, and the mark `cold` does so for one test.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
# By name of a server's socket: the variables that it is started with besides those of the test run. No library may start threads,
# which do not survive a fork.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_ONE_THREAD["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # of pyarrow's allocator
SERVERS = {"torch": _ONE_THREAD, "transformers": {**_ONE_THREAD, "HF_HUB_OFFLINE": "1"}}
# The folder of the stand-in of this test run: processes of pytest-xdist inherit the variable.
FOLDER = "WARM_FOLDER"
REAL = os.environ.get("WARM_REAL", sys.executable)
_client: dict = {"__name__": "client"}
exec(compile((HERE / "client.py").read_text(), str(HERE / "client.py"), "exec"), _client)
_servers: list[tuple[subprocess.Popen, socket.socket]] = []


def start(replace: bool = True) -> None:
    """Start the servers if this process is the test run's first, and replace `sys.executable`."""
    if os.environ.get("WARM") == "0" or not sys.platform.startswith("linux"):
        return
    if FOLDER not in os.environ:
        os.environ[FOLDER], os.environ["WARM_REAL"] = tempfile.mkdtemp(prefix="warm_"), REAL
        folder = Path(os.environ[FOLDER])
        _write_client(folder)
        for name in SERVERS:
            _begin(folder, name)
    if replace:
        sys.executable = str(Path(os.environ[FOLDER], "python"))


def worker() -> str:
    """Return the stand-in that starts a worker of pytest-xdist, from the server that has imported most; "" where nothing is warm."""
    return os.path.join(os.environ[FOLDER], "worker") if FOLDER in os.environ else ""


def stop() -> None:
    """Restore `sys.executable`, and end the servers that this process started."""
    sys.executable = REAL
    for server, alive in _servers:
        alive.close()
        if server.wait():
            sys.stderr.write(Path(os.environ[FOLDER], f"{server.args[2]}.err").read_text())
    if _servers:
        shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)
        del os.environ["WARM_REAL"]
        _servers.clear()


def _begin(folder: Path, name: str) -> None:
    # Libraries print lines while they are imported, which are of interest if the server fails.
    with socket.socket(socket.AF_UNIX) as listener, open(folder / f"{name}.err", "w") as errors:
        listener.bind(str(folder / name))
        listener.listen(128)
        ours, theirs = socket.socketpair()
        command = [REAL, str(HERE / "server.py"), name, str(listener.fileno()), str(theirs.fileno())]
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | SERVERS[name]
        files = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.DEVNULL,
            "stderr": errors,
            "pass_fds": (listener.fileno(), theirs.fileno()),
        }
        _servers.append((subprocess.Popen(command, env=variables, start_new_session=True, **files), ours))
        theirs.close()


def _write_client(folder: Path) -> None:
    hub = _client["of_hub"]({**os.environ, **SERVERS["transformers"]})
    facts = {
        "REAL": REAL,
        "FOLDER": str(folder),
        "SPACES": _client["spaces"](),
        "FIXED": _client["fixed"](os.environ),
        "HUB": hub,
    }
    text = (HERE / "client.py").read_text()
    before, after = text.split("\n\n# Read when", 1)
    values = "".join(f"\n{name} = {value!r}" for name, value in facts.items())
    for name in ("python", "python3", "worker"):
        (folder / name).write_text(f"#!{REAL} -IS\n{before}{values}\n\n# Read when{after}")
        (folder / name).chmod(0o755)
