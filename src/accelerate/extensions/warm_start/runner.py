"""Processes that are forked, for each attempt, from one process of this machine that has imported torch: `server`.

The launcher starts a small program in place of each rank, `client`, which asks the server for the rank, forwards signals
to it, and ends as it ends. Torch's elastic launcher watches and restarts these programs as it does ranks.
"""

import contextlib
import dataclasses
import importlib
import os
import socket
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate.config.options import FEATURES
from accelerate.config.options.schema import to_names
from accelerate.extensions.warm_start import options
from accelerate.extensions.warm_start.server import READY
from accelerate.launch import runners
from accelerate.launch.errors import LaunchError
from accelerate.launch.guard import bound
from accelerate.launch.plan import LaunchPlan, Resolved, Source, worker_environment
from accelerate.launch.resolve import resolve
from accelerate.launch.runners import Process, local

BY = "from a process of this machine that has imported torch"
# What a rank imports in its first steps, in this order.
ALWAYS = ("torch", "torch._dynamo", "torch.distributed.fsdp", "accelerate.accelerator")
_CLIENT, _SERVER = (Path(__file__).with_name(f"{name}.py") for name in ("client", "server"))
_SERVED = ("single", "local", "machines")


def starts(values: Mapping[str, Resolved], on: set[str], job: Any) -> bool:
    """Say that this runner starts the processes; a LaunchError says why it cannot."""
    if not values["warm_start"].value:
        raise LaunchError(
            f"--preload is {values['preload'].value!r}, which only --warm_start reads. Add --warm_start."
        )
    if sys.platform != "linux":
        raise LaunchError(
            f"--warm_start forks processes that have imported torch, on Linux only. This is {sys.platform}."
        )
    if values["no_python"].value:
        raise LaunchError("--no_python runs a program that --warm_start cannot fork. Remove one of the two.")
    for name in sorted(on - options.FEATURES.keys()):
        if FEATURES[name].runners:
            raise LaunchError(
                f"--warm_start: {FEATURES[name].title} starts the processes in another way. Remove one of the two."
            )
    if job and job.starts_each_process:
        raise LaunchError(
            f"--warm_start: {job.source} has started a launch for each process. Start one for each machine."
        )
    return True


def process(plan: LaunchPlan, environment: Mapping[str, str]) -> Process:
    """Return the process that each forked rank stands for."""
    cold = _without_warm_start(plan)
    started: Process = runners.module_for(cold).process(cold, worker_environment(cold, os.environ))
    return started


def run(plan: LaunchPlan, environment: Mapping[str, str], replace: bool = False) -> None:
    """Start the server, then let the runner of a cold start run and watch a client for each rank."""
    cold = _without_warm_start(plan)
    runners.print_info(plan, *(note for note in cold.notes if note not in plan.notes))
    environment = worker_environment(cold, os.environ)
    with _server(cold, to_names(plan["preload"] or ""), environment) as address:
        client = dataclasses.replace(
            cold,
            settings={**cold.settings, "no_python": Resolved(True)},
            script=sys.executable,
            script_args=("-S", str(_CLIENT), address, *cold.command[1:]),
        )
        runners.module_for(client).run(client, environment)


def _without_warm_start(plan: LaunchPlan) -> LaunchPlan:
    """Return the plan of the same command line without this module's options."""
    asked = {name: setting.value for name, setting in plan.settings.items() if setting.source is Source.COMMAND_LINE}
    asked |= {"warm_start": False, "preload": None}
    script = {"training_script": plan.script, "training_script_args": plan.script_args}
    cold = resolve(Namespace(**asked, **script, nondefault=set(asked)))
    if cold.runner not in _SERVED:
        raise LaunchError(
            f"--warm_start: the processes are started {runners.module_for(cold).BY}. Remove --warm_start."
        )
    return cold


@contextlib.contextmanager
def _server(plan: LaunchPlan, preload: list[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Start the server; yield the address of its socket once it has imported the modules. It ends with this context."""
    listener, (ours, theirs) = socket.socket(socket.AF_UNIX), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with tempfile.TemporaryDirectory(prefix="accelerate_warm_") as folder, listener, ours, theirs:
        address = os.path.join(folder, "socket")
        try:
            listener.bind(address)
        except OSError as error:
            raise LaunchError(
                f"--warm_start: no socket can be made at {address}: {error}. Choose another TMPDIR."
            ) from None
        listener.listen(128)
        files = [listener.fileno(), theirs.fileno()]
        python = [sys.executable, *(["-u"] if plan.elastic else []), str(_SERVER), *map(str, files)]
        program = ["-m" if plan["module"] else "", plan.script, *plan.script_args]
        server = subprocess.Popen(
            bound([*python, ",".join([*ALWAYS, *preload]), *program]),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            pass_fds=files,
            start_new_session=True,
        )
        listener.close()  # clients of a server that was killed are refused
        theirs.close()
        try:
            if plan.elastic:
                with local.in_one_go():  # while the server imports it, too
                    importlib.import_module("accelerate.launch.elastic")
            answer = ours.recv(1 << 16)
            if answer != READY:
                ended = f"the server ended with status {server.wait()} while it imported modules; its own messages stand above"
                raise LaunchError(f"--warm_start: {answer.decode(errors='replace') or ended}.")
            yield address
        finally:
            ours.close()
            server.terminate()  # it listens to this signal only until it is ready, and ends by the closed socket afterwards
            server.wait()
