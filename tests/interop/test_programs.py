"""Ten programs in the manner of public repositories have equal losses and metrics on this package and on the peer's.

The programs imitate only the use of Accelerate, on random data. Those that resume ask for a seedable sampler: without it the
peer's checkpoints on several processes lack the state of the sampler, and the peer draws another order after a restart.
"""

import pytest

from interop.launching import figures, need_peer

pytestmark = pytest.mark.interop
PROGRAMS = (
    "audio", "detection", "diffusion", "distillation", "gan", "graph", "reinforcement", "speech", "time_series",
    "vision_language",
)  # fmt: skip
# Programs that continue a run, and the checkpoint that they continue from.
RESUMED = {"audio": "step_3", "diffusion": "checkpoint-8", "gan": "epoch_0", "speech": "epoch_0"}
# One launch runs all programs, and all tests of it run in one process.
SHARED = ("launched",)


def resuming(written):
    """Return the arguments of programs that resume from the checkpoints of a launch."""
    return [f"{name}={written / name / 'output' / checkpoint}" for name, checkpoint in RESUMED.items()]


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def processes(request):
    need_peer()
    return request.param


@pytest.fixture(scope="module")
def launched(processes, tmp_path_factory):
    """Run all programs on the peer's package, then on this one, which also resumes from the peer's checkpoints."""
    folder = tmp_path_factory.mktemp("programs")
    peers = figures("run_programs.py", folder / "peer", processes, False, *PROGRAMS)
    ours = figures("run_programs.py", folder / "ours", processes, True, *PROGRAMS, *resuming(folder / "peer"))
    return folder, ours, peers


def figures_of(launch, name):
    run = launch[name]
    assert run["code"] == 0, run["errors"]
    assert run["figures"]["losses"]
    return run["figures"]


def check_resumed(launch, whole, name):
    """Check that a resumed run has the last figures of the uninterrupted run, bit for bit."""
    resumed, expected = figures_of(launch, f"{name}-resumed"), figures_of(whole, name)
    assert len(resumed["losses"]) < len(expected["losses"])
    for figure, values in resumed.items():
        assert values == expected[figure][-len(values) :], figure


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_has_equal_figures_on_both_packages(launched, name):
    _, ours, peers = launched
    assert figures_of(ours, name) == figures_of(peers, name)


@pytest.mark.parametrize("name", RESUMED)
def test_program_resumes_from_a_checkpoint_of_the_peer(launched, name):
    _, ours, _ = launched
    check_resumed(ours, ours, name)


@pytest.mark.slow
@pytest.mark.parametrize("reader_is_ours", [False, True])
def test_programs_resume_from_a_checkpoint_of_this_package(launched, processes, reader_is_ours, tmp_path):
    folder, ours, _ = launched
    resumed = figures("run_programs.py", tmp_path, processes, reader_is_ours, *resuming(folder / "ours"))
    for name in RESUMED:
        check_resumed(resumed, ours, name)
