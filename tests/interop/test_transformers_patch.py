"""The patch of transformers in real programs, on one process and two, on this package and, alone, on the peer's wheel.

Each program runs once and serves several tests. Run it in the environments of `make test-transformers` for the other
releases of transformers.
"""

import importlib.util
import json
import math
import shutil
import subprocess
import sys

import pytest

from interop.programs import NO_PEER, PEER, ROOT, SCRIPTS, figures, finished, last_figures, on_peer, starter

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]

EVERYTHING_RESET = dict.fromkeys(("accelerator", "process state", "arguments", "trainer"), "reset")
EVERYTHING_KEPT = dict.fromkeys(EVERYTHING_RESET, "kept")
CONFIGURED = {"configured": "kept", "configured arguments": "kept"}  # transformers' own way to keep a state
HARMLESS = {"no state": ["cpu", True]}
# Expensive: their tests run in one process.
SHARED = ("outcome", "package", "processes")
THREE_WAYS = ("(1) ", "(2) ", "(3) pass preserve_accelerator_state=False")


@pytest.fixture(scope="session")
def shim_alone(tmp_path_factory):
    """Install the patch, and nothing else of this repository, from its own folder."""
    source = tmp_path_factory.mktemp("source") / "transformers_patch"
    target = tmp_path_factory.mktemp("target")
    shutil.copytree(ROOT / "src" / "transformers_patch", source, ignore=shutil.ignore_patterns("__pycache__", "build"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    return target


@pytest.fixture(scope="module", params=["ours", pytest.param("peer", marks=pytest.mark.slow)])
def package(request):
    """Whose accelerate the programs run on."""
    if request.param == "peer" and not PEER.exists():
        pytest.skip(NO_PEER)
    return request.param


@pytest.fixture(scope="module", params=[1, 2])
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
def outcome(package, processes, start, tmp_path_factory):
    """Return the figures of a program, which runs once for all tests that ask for it."""
    variables, done = start[1], {}

    def outcome(script, *arguments):
        key = (script, *arguments)
        if key not in done:
            folder = tmp_path_factory.mktemp("out")
            try:
                done[key] = figures(script, folder, processes, package == "ours", *arguments, **variables)
            except AssertionError as error:
                done[key] = error
        if isinstance(done[key], AssertionError):
            raise done[key]
        return done[key]

    return outcome


def test_every_class_of_arguments_shares_the_state_it_finds(outcome):
    result = outcome("shim_sharing.py")
    assert result["unpatched"] == [False, False]
    # by itself, told to keep, told to reset
    classes = {
        name: result[group][name] for group in ("own", "patched", "own while patched") for name in result[group]
    }
    assert set(classes) == {"own", "own Seq2Seq", "TrainingArguments", "Seq2Seq"}
    assert all(found == [True, True, False] for found in classes.values()), result
    assert result["warned of a reset"] == 4
    assert result["twice"] == [True, True]


@pytest.mark.parametrize(
    "before, after, processes",
    [
        ("trl", "sentence_transformers", 1),
        ("sentence_transformers", "trl", 2),
        pytest.param("trl", "sentence_transformers", 2, marks=pytest.mark.slow),
        pytest.param("sentence_transformers", "trl", 1, marks=pytest.mark.slow),
    ],
    indirect=["processes"],
)
def test_libraries_imported_before_and_after_share_the_state(before, after, outcome):
    for name in ("trl", "sentence_transformers", "datasets"):
        pytest.importorskip(name, reason="`make setup` installs it")
    result = outcome("shim_libraries.py", before, after)
    # The last one is the flag, which reached the library's arguments.
    assert result["before"] == result["after"] == [True, True, False]


def test_unpatched_and_reverted_arguments_reset_as_upstream_does(outcome):
    result = outcome("shim_strategies.py")
    assert result["unpatched"] == result["reverted"] == {**EVERYTHING_RESET, **CONFIGURED}


def test_each_strategy_keeps_what_it_says(outcome):
    result = outcome("shim_strategies.py")
    always = {**EVERYTHING_KEPT, **CONFIGURED, **HARMLESS, "True": "kept"}
    assert result["preserve"] == {**always, "False": "reset*"}  # with a warning
    assert result["flag"] == {**always, "False": "reset"}
    assert result["conditional"] == {**always, "arguments": "reset", "trainer": "reset", "False": "reset"}
    for word in ("preserve_accelerator_state=False", "use_configured_state=True", "Leave one of them out"):
        assert word in result["contradiction"]


def test_everything_is_put_back(outcome):
    result = outcome("shim_strategies.py")["restored"]
    called = ["preserve", "flag", "flag", "conditional", "flag", None, None]
    assert result == {"seen": [*called, "preserve", "conditional", "preserve", None], "equal": True}


def test_another_precision_is_refused_on_all_ranks_and_each_way_out_works(outcome):
    result = outcome("shim_disagreement.py")
    found = result["precision"]
    for asked, kept, message in (
        ("bf16", "no", found["bf16"]),
        ("fp16", "no", found["fp16"]),
        ("no", "bf16", found["no"]),
        ("bf16", "no", result["launched"][2]),
    ):
        assert f"ask for mixed precision {asked!r}" in message and f"is kept has {kept!r}" in message
        assert all(way in message for way in THREE_WAYS), message
        assert f'`Accelerator(mixed_precision="{asked}")`' in message
    assert "pass bf16=True" in found["no"]
    # the precision that was trained in, and whether the state was shared
    assert found["change the arguments"] == ["no", True]
    assert found["change the arguments to bf16"] == found["change the state"] == ["bf16", True]
    assert found["reset"] == ["bf16", False] and found["reset to no"] == ["no", False]
    assert result["launched"][:2] == ["bf16", True]


def test_the_environment_is_left_as_transformers_leaves_it(outcome):
    patched, unpatched = outcome("shim_disagreement.py")["left"]
    assert patched == unpatched


def test_an_engine_that_the_state_was_not_made_for_is_refused(outcome, processes):
    found = outcome("shim_disagreement.py")["engines"]
    kind = "NO" if processes == 1 else "MULTI_CPU"
    for name, argument, label in (
        ("dictionary", "deepspeed=", "DeepSpeed"),
        ("file", "deepspeed=", "DeepSpeed"),
        ("text", "deepspeed=", "DeepSpeed"),
        ("fsdp", "fsdp='full_shard'", "FSDP"),
    ):
        assert argument in found[name] and f"asks for {label}" in found[name] and f"'{kind}'" in found[name]
        assert all(way in found[name] for way in THREE_WAYS), found[name]
    assert found["left out"] == ["no", True]
    if "reset" in found:
        assert found["reset"] == found["unpatched"] and "deepspeed" in found["reset"]


def test_another_timeout_or_backend_warns_once_on_one_rank(outcome, processes):
    group = outcome("shim_disagreement.py")["group"]
    if processes == 1:  # there is no group
        assert group == {"timeout": [[0]], "backend": [[0]], "neither": [[0]]}
        return
    assert [group[name][0] for name in ("timeout", "backend", "neither")] == [[1, 0], [1, 0], [0, 0]]
    assert "ddp_timeout=77" in group["timeout"][1] and "1800 s" in group["timeout"][1]
    assert "ddp_backend='nccl'" in group["backend"][1] and "'gloo'" in group["backend"][1]


def test_losses_are_those_without_the_patch(outcome):
    unpatched, *patched = outcome("shim_trainings.py")["losses"]
    assert len(unpatched) == 4 and all(math.isfinite(loss) for loss in unpatched)
    assert len(patched) == 3 and all(losses == unpatched for losses in patched)


def test_hyperparameter_search_finds_the_same_and_leaves_the_accelerator_whole(outcome, processes):
    found = outcome("shim_trainings.py")["search"]
    if found is None:
        pytest.skip("optuna is not installed")
    rates = found["beside"]["tried"]
    assert len(rates) == processes and len(set(rates[0])) == 3 and all(rank == rates[0] for rank in rates)
    assert found["beside"] == found["alone"] == found["unpatched"]
    assert found["shared"] is True


def test_a_cell_runs_twice(outcome):
    result = outcome("shim_trainings.py")
    run = [result["losses"][0], True, True]
    assert result["notebook"] == {"runs": [run, run], "one state": True}


def test_two_trainers_in_a_row(outcome):
    result = outcome("shim_trainings.py")
    found = result["twice"]
    assert found["losses"] == [result["losses"][0]] * 2 and found["shared"] == [True, True]
    assert found["evaluations"][0] == found["evaluations"][1] and math.isfinite(found["evaluations"][0])


def test_a_batch_size_is_found(outcome, processes):
    found = outcome("shim_trainings.py")["batch"]
    assert found["sizes"][0] == [6] * processes
    assert all(0 < size <= 4 for size in found["sizes"][1]) and len(set(found["sizes"][1])) == 1
    assert found["steps"] == 2 and found["shared"] is True


def test_an_accelerator_may_come_after_the_arguments(outcome):
    assert outcome("shim_trainings.py")["afterwards"] == {
        "precisions": ["bf16", "bf16"],
        "steps": 4,
        "shared": [True, True],
        "devices": ["cpu"],
    }


def run_program(start, folder, *words, code=0, module=False):
    """Run the program that knows nothing of the patch through `python -m transformers_patch run`, beside it."""
    command, variables = start
    target = ["-m", "shim_program"] if module else ["shim_program.py"]
    # The launcher and torchrun take -m themselves.
    line = [*command, "-m", "transformers_patch", "run", *target, str(folder), str(code), *words]
    return line, variables


def test_run_serves_a_script_as_it_is(start, processes, tmp_path):
    words = ["--strategy", "mine", "--", "-m"]  # all of it is the script's
    command, variables = run_program(start, tmp_path, *words)
    found = last_figures(finished(command, cwd=SCRIPTS, **variables))
    script = SCRIPTS / "shim_program.py"
    assert found["argv"][1:] == [str(tmp_path), "0", *words] and found["argv"][0].endswith("shim_program.py")
    assert (found["name"], found["file"], found["path"]) == ("__main__", str(script), str(SCRIPTS))
    assert found["main"] is True and found["spec"] is None
    assert found["shared"] is True and found["warnings"] == []


def test_run_serves_a_module_and_keeps_its_exit_code(start, processes, tmp_path):
    # torchrun has an exit code of its own for a worker that failed; a launcher of ours hands the worker's on.
    code = 5 if "torch.distributed.run" not in start[0] else 0
    command, variables = run_program(start, tmp_path, "-m", code=code, module=True)
    found = last_figures(finished(command, code=code, cwd=SCRIPTS, **variables))
    script = str(SCRIPTS / "shim_program.py")
    assert found["argv"] == [script, str(tmp_path), str(code), "-m"]
    assert (found["name"], found["file"], found["spec"]) == ("__main__", script, "shim_program")
    assert found["path"] == str(SCRIPTS) and found["shared"] is True


def test_an_error_of_a_script_ends_all_ranks(start, processes, tmp_path):
    command, variables = run_program(start, tmp_path, "--disagree")
    done = finished(command, code=1, cwd=SCRIPTS, **variables)
    raised = done.stderr.count("ValueError: the training arguments ask for mixed precision 'bf16'")
    assert 1 <= raised <= 2 * processes, done.stderr[-3000:]
    assert not [line for line in done.stdout.splitlines() if line.startswith('{"')]


@pytest.mark.parametrize("processes", [1], indirect=True)
def test_status_names_the_release(start):
    command, variables = start
    version = finished([*command, "-c", "import transformers; print(transformers.__version__)"], **variables).stdout
    (patch,) = json.loads(finished([*command, "-m", "transformers_patch", "status", "--json"], **variables).stdout)
    assert patch["version"] == version.strip() and patch["verdict"] == "can be applied" and patch["applied"] is None


@pytest.mark.slow
@pytest.mark.parametrize("package, processes", [("peer", 1)], indirect=True)
def test_the_patch_alone_runs_on_the_peers_accelerate(start, shim_alone):
    command, variables = start
    show = "import accelerate, transformers_patch as t; print(accelerate.__version__, accelerate.__file__, t.__file__)"
    version, theirs, ours = finished([*command, "-c", show], **variables).stdout.split()
    assert version == "1.15.0" and theirs.startswith(str(PEER))
    assert ours.startswith(str(shim_alone)) and not (shim_alone / "accelerate").exists()
