"""Windows and macOS lack some of what Linux has: the launcher imports there all the same, and runs one process.

In a fresh interpreter from which those parts were taken away before our modules are imported.
"""

import subprocess
import sys

import pytest

# Torch's own files for this system are loaded before; ours must not notice the difference.
PRELOAD = """
import asyncio, concurrent.futures.thread, ctypes, importlib.util, multiprocessing, os, pathlib, shutil, signal, socket
import subprocess, sys, tempfile, threading
"""
TORCH = """
import torch, torch.distributed.launcher.api, torch.distributed.elastic.agent.server.local_elastic_agent
import torch.distributed.elastic.multiprocessing, torch.utils.data
"""
TAKE_AWAY = """
sys.platform = {platform!r}
for name in {modules!r}:
    sys.modules[name] = None  # importing it fails
for name in {os!r}:
    if hasattr(os, name): delattr(os, name)
for name in {signals!r}:
    if hasattr(signal, name): delattr(signal, name)
"""
NOT_ON_WINDOWS = (
    "fork forkpty register_at_fork killpg getpgrp getpgid setsid getsid setpgid tcgetpgrp tcsetpgrp ctermid nice "
    "sched_getaffinity sched_setaffinity geteuid getuid getgid getegid getgroups getloadavg uname statvfs "
    "mkfifo O_NOCTTY O_NONBLOCK O_CLOEXEC WNOWAIT confstr sysconf openpty"
)
NO_SIGNALS_OF_WINDOWS = (
    "SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGKILL SIGALRM SIGCHLD SIGSTOP SIGCONT SIGTSTP SIGPIPE SIGBUS SIGXCPU SIGXFSZ "
    "pthread_sigmask pthread_kill sigwait sigpending setitimer alarm pause"
)
WINDOWS = {
    "platform": "win32",
    "modules": ["fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "readline", "curses", "syslog"],
    "os": NOT_ON_WINDOWS.split(),
    "signals": NO_SIGNALS_OF_WINDOWS.split(),
}
MACOS = {"platform": "darwin", "modules": [], "os": ["sched_getaffinity", "sched_setaffinity"], "signals": []}
SYSTEMS = pytest.mark.parametrize("system", [WINDOWS, MACOS], ids=["Windows", "macOS"])


def run(system, program, *, torch=False, cwd=None):
    text = PRELOAD + (TORCH if torch else "") + TAKE_AWAY.format(**system) + program
    return subprocess.run([sys.executable, "-c", text], cwd=cwd, capture_output=True, text=True, timeout=120)


IMPORTS = """
import pkgutil, importlib
packages = ["accelerate.launch", "accelerate.commands"]
packages += [f"accelerate.extensions.{name}" for name in ("configure", "env")]
packages = [importlib.import_module(name) for name in packages if importlib.util.find_spec(name)]
names = [m.name for p in packages for m in pkgutil.walk_packages(p.__path__, p.__name__ + ".")]
assert len(names) > 20
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
"""
# What several processes need on Windows: a store without libuv, a signal that exists, and no guard.
WITHOUT_GROUPS = """
from accelerate.launch import elastic, errors, guard
from accelerate.runtime import rendezvous
assert [int(number) for number in (*elastic.FORWARDED, *elastic.STOPPING)] == [15, 2]
assert elastic._SIGNAL_OF_TORCH == "SIGBREAK"
rendezvous.TCPStore = lambda *args, **settings: settings
assert rendezvous.serve_this_machine(0, None)["use_libuv"] is False
watching = guard.Guard()
watching.watch([1])
watching.close()
guard.end_groups([], 1.0)
"""
LAUNCHES = """
from accelerate.commands import accelerate_cli, launch
launch._owns_process = lambda: True  # as the console script
cpu = ["launch", "--cpu"]
for words in (["--help"], ["launch", "--help"], [*cpu, "--num_processes", "2", "--dry_run", "script.py"], [*cpu, "script.py", "a"]):
    sys.argv = ["accelerate", *words]
    try:
        accelerate_cli.main()
    except SystemExit as end:
        if end.code:
            raise
"""
LEAVES = """
os.environ.update(ACCELERATE_LAUNCHER_PID=str(os.getppid()), TORCHELASTIC_ERROR_FILE="error.json")
from accelerate.runtime import failure
failure.watch()
raise ValueError("x")
"""


@SYSTEMS
def test_the_launcher_is_imported(system):
    done = run(system, IMPORTS + (WITHOUT_GROUPS if system is WINDOWS else ""), torch=True)
    assert done.returncode == 0, done.stderr[-3000:]


@SYSTEMS
def test_help_plan_and_a_launch_of_one_process(system, tmp_path):
    script = "import os, sys; print('ran', sys.argv[1:], os.environ['ACCELERATE_USE_CPU'], flush=True); sys.exit(7)"
    (tmp_path / "script.py").write_text(script)
    done = run(system, LAUNCHES, cwd=tmp_path)
    assert done.returncode == 7 and "ran ['a']" in done.stdout, done.stderr[-3000:]
    # A console of Windows would take the launcher for ended, so there it waits for its child.
    assert ("the script failed with exit status 7" in done.stderr) is (system is WINDOWS)


@SYSTEMS
def test_a_rank_leaves_its_traceback_there_too(system, tmp_path):
    done = run(system, LEAVES, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr == "" and (tmp_path / "error.json").exists()
