"""What every test starts from and must leave behind: no state, no process group, the same environment variables."""

import gc
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import warm
from warm import server


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let tests that share the fixtures that their module lists in `SHARED` run in one process, where several run tests."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        shared = [name for name in getattr(item.module, "SHARED", ()) if name in item.fixturenames]
        if shared:
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            words = [item.module.__name__, *(f"{name}={parameters.get(name)}" for name in shared)]
            # xdist takes a name that has a bracket in it for the parameters of a test, and would put it in no group.
            item.add_marker(pytest.mark.xdist_group(" ".join(words).translate({ord("["): "(", ord("]"): ")"})))


def use_temporary_folder(config: pytest.Config) -> None:
    """Let this test run use its own temporary folder, in memory where there is room, and remove it at the end.

    Tests save thousands of small files durably, which takes time on a disk.
    """
    if hasattr(config, "workerinput"):
        return  # a worker of xdist inherits the variable
    memory = Path("/dev/shm")
    roomy = "TMPDIR" not in os.environ and memory.is_dir() and shutil.disk_usage(memory).free > 4 << 30
    folder = tempfile.mkdtemp(prefix="tests_", dir=memory if roomy else None)
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all tests but those that are marked `gpu`, which check the same on each machine; start processes warm."""
    use_temporary_folder(config)
    asked_for = "gpu" in config.option.markexpr.replace("not gpu", "")
    if not asked_for and any(Path("/dev").glob("nvidia[0-9]*")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if os.environ.get("TEST_DEVICE") == "hosted":
        import hosted

        hosted.install()
    workers = getattr(config.option, "numprocesses", None)
    warm.start(replace=not workers)
    if workers and warm.worker():
        config.option.tx = [f"popen//python={warm.worker()}"] * workers


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let forks of a worker of xdist be quick: its imports leave a million objects and half a gigabyte."""
    if hasattr(session.config, "workerinput") and sys.platform.startswith("linux"):
        gc.collect()
        gc.freeze()
        server.use_huge_pages()


def pytest_unconfigure() -> None:
    """End the servers of warm processes."""
    warm.stop()


@pytest.fixture(autouse=True)
def cold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start real interpreters in tests that are marked `cold`."""
    if request.node.get_closest_marker("cold") is not None:
        monkeypatch.setattr("sys.executable", warm.REAL)
        monkeypatch.setenv("WARM", "0")


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> None:
    """Let the garbage collector pass over what is alive when a module's tests begin: imports leave a million objects or more."""
    gc.collect()
    gc.freeze()


def forget_states() -> None:
    """Reset the three state classes, leave a process group, and forget which device was found."""
    import torch.distributed as dist

    from accelerate import comm
    from accelerate.devices import table
    from accelerate.runtime import rendezvous
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    table.forget()
    if dist.is_available() and dist.is_initialized():
        comm.forget()
        rendezvous.wait_for_threads()  # torch 2.7 frees a group while it holds the interpreter, which a thread of gloo may wait for
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def clean_slate(request: pytest.FixtureRequest) -> Iterator[None]:
    """Isolate tests from each other, and fail one that leaks threads which would keep the interpreter alive."""
    import torch.distributed as dist

    before, threads = dict(os.environ), set(threading.enumerate())
    forget_states()
    yield
    leaked_group = dist.is_initialized() and "process_group" not in request.fixturenames
    forget_states()
    os.environ.clear()
    os.environ.update(before)
    # The reader of an offloaded model ends with the model, which may outlive its test.
    ends = [thread for thread in threading.enumerate() if thread.daemon or thread.name == "accelerate-prefetch_0"]
    left = set(threading.enumerate()) - threads - set(ends)
    for thread in left:
        thread.join(5)  # a pool that was shut down without waiting is about to end
    leaked = [thread.name for thread in left if thread.is_alive()]
    assert not leaked, f"threads were left running: {leaked}"
    assert not leaked_group, "a process group was left; destroy it, or ask for the fixture `process_group`"


@pytest.fixture
def process_group() -> Iterator[None]:
    """A gloo process group of one process, alive during the test; a test that asks for it may also build its own."""
    from accelerate.runtime import rendezvous

    rendezvous.init_process_group(rendezvous.ALONE, "gloo")
    yield


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A machine on which only what the test installs is there."""
    import installed  # here: it imports accelerate

    yield from installed.machine(monkeypatch)
