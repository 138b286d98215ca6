"""The patch of transformers in real programs, on one process and two, on this package and, alone, on the peer's wheel.

Each program runs once and serves several tests. Run it in the environments of `make test-transformers` for the other
releases of transformers.
"""

import importlib.util
import math
import shutil
import subprocess
import sys

import pytest

from interop.launching import PEER, ROOT, SCRIPTS, figures, finished, last_figures, need, need_peer, on_peer, starter

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]
# Expensive: their tests run in one process.
SHARED = ("world", "package", "processes")
THREE_WAYS = ("(1) ", "(2) ", "(3) pass preserve_accelerator_state=False")
SLOW = pytest.mark.slow


@pytest.fixture(scope="session")
def shim_alone(tmp_path_factory):
    """Install the patch, and nothing else of this repository, from its own folder."""
    source = tmp_path_factory.mktemp("source") / "transformers_patch"
    target = tmp_path_factory.mktemp("target")
    shutil.copytree(ROOT / "src" / "transformers_patch", source, ignore=shutil.ignore_patterns("__pycache__", "build"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    return target


@pytest.fixture(scope="module", params=["ours", pytest.param("peer", marks=SLOW)])
def package(request):
    if request.param == "peer":
        need_peer()
    return request.param


@pytest.fixture(scope="module", params=[pytest.param(1, marks=SLOW), 2])
def processes(request):
    return request.param


@pytest.fixture(scope="module")
def start(package, processes, request):
    """Return what starts a program, and the environment variables that it needs."""
    if package == "ours":
        return starter(processes, ours=True), {}
    target = request.getfixturevalue("shim_alone")
    return starter(processes, ours=False), on_peer({"PYTHONPATH": str(target)})


@pytest.fixture(scope="module")
def world(package, processes, start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    return figures("shim_world.py", folder, processes, package == "ours", package, **start[1])


def test_every_class_of_arguments_shares_the_state_it_finds(world):
    assert world["unpatched"] == [False, False]
    for name in ("own", "own Seq2Seq", "TrainingArguments", "Seq2Seq"):
        assert world[name] == [True, False], name  # by itself, told to reset
    assert world["warned of a reset"] == 2


def test_a_disagreement_is_refused_on_all_ranks_and_each_way_out_works(world):
    for name, message in world["refused"].items():
        assert name in message and all(way in message for way in THREE_WAYS), message
    ways = world["ways"]  # the precision that was trained in, and whether the state was shared
    assert ways == {"change the arguments": ["no", True], "change the state": ["bf16", True], "reset": ["bf16", False]}


def test_another_timeout_or_backend_warns_once_on_one_rank(world, processes):
    group = world["group"]
    if processes == 1:  # there is no group
        assert group == {"timeout": [[0]], "backend": [[0]], "neither": [[0]]}
        return
    assert [group[name][0] for name in ("timeout", "backend", "neither")] == [[1, 0], [1, 0], [0, 0]]
    assert "ddp_timeout=77" in group["timeout"][1] and "1800 s" in group["timeout"][1]
    assert "ddp_backend='nccl'" in group["backend"][1] and "'gloo'" in group["backend"][1]


def test_losses_are_those_without_the_patch(world):
    unpatched, *patched = world["losses"]
    assert len(unpatched) == 4 and all(math.isfinite(loss) for loss in unpatched)
    assert patched == [unpatched] * 2
    first, second, evaluations, shared = world["twice"]
    assert first == second == unpatched and evaluations[0] == evaluations[1] and shared == [True, True]


def test_a_hyperparameter_search_leaves_the_accelerator_whole(world, processes):
    found = world["search"]
    if found is None:
        pytest.skip("optuna is not installed")
    rates = found["tried"]
    assert len(rates) == processes and len(set(rates[0])) == 3 and all(rank == rates[0] for rank in rates)
    assert found["shared"] is True


def test_a_batch_size_is_found(world, processes):
    found = world["batch"]
    assert found["sizes"][0] == [6] * processes
    assert all(0 < size <= 4 for size in found["sizes"][1]) and len(set(found["sizes"][1])) == 1
    assert found["steps"] == 2 and found["shared"] is True


def test_an_accelerator_may_come_after_the_arguments(world):
    assert world["afterwards"] == ["bf16", "bf16", True, True]


ORDERS = [("sentence_transformers", "trl", 1), pytest.param("trl", "sentence_transformers", 2, marks=SLOW)]


@pytest.mark.parametrize("before, after, processes", ORDERS, indirect=["processes"])
def test_libraries_imported_before_and_after_share_the_state(before, after, package, processes, start, tmp_path):
    need("trl", "sentence_transformers", "datasets")
    result = figures("shim_libraries.py", tmp_path, processes, package == "ours", before, after, **start[1])
    # The last one is the flag, which reached the library's arguments.
    assert result["before"] == result["after"] == [True, False]


def run_program(start, folder, *words, code=0, module=False):
    """Run the program that knows nothing of the patch through `python -m transformers_patch run`, next to it."""
    command, variables = start
    target = ["-m", "shim_program"] if module else ["shim_program.py"]
    # The launcher and torchrun take -m themselves.
    line = [*command, "-m", "transformers_patch", "run", *target, str(folder), str(code), *words]
    return finished(line, code=code, cwd=SCRIPTS, **variables)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=SLOW)], indirect=True)
def test_run_serves_a_script_as_it_is(start, tmp_path):
    words = ["--strategy", "mine", "--", "-m"]  # all of it is the script's
    found = last_figures(run_program(start, tmp_path, *words))
    script = SCRIPTS / "shim_program.py"
    assert found["argv"][1:] == [str(tmp_path), "0", *words] and found["argv"][0].endswith("shim_program.py")
    assert (found["name"], found["file"], found["path"]) == ("__main__", str(script), str(SCRIPTS))
    assert found["main"] is True and found["spec"] is None
    assert found["shared"] is True and found["warnings"] == []


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=SLOW)], indirect=True)
def test_run_serves_a_module_and_keeps_its_exit_code(start, tmp_path):
    # torchrun has a separate exit code for a worker that failed; a launcher of ours hands the worker's on.
    code = 5 if "torch.distributed.run" not in start[0] else 0
    found = last_figures(run_program(start, tmp_path, "-m", code=code, module=True))
    script = str(SCRIPTS / "shim_program.py")
    assert found["argv"] == [script, str(tmp_path), str(code), "-m"]
    assert (found["name"], found["file"], found["spec"]) == ("__main__", script, "shim_program")
    assert found["path"] == str(SCRIPTS) and found["shared"] is True


@SLOW
@pytest.mark.parametrize("package, processes", [("peer", 1)], indirect=True)
def test_the_patch_alone_runs_on_the_peers_accelerate(start, shim_alone):
    command, variables = start
    show = "import accelerate, transformers_patch as t; print(accelerate.__version__, accelerate.__file__, t.__file__)"
    version, theirs, ours = finished([*command, "-c", show], **variables).stdout.split()
    assert version == "1.15.0" and theirs.startswith(str(PEER))
    assert ours.startswith(str(shim_alone)) and not (shim_alone / "accelerate").exists()
