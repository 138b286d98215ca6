"""Loops of Lightning Fabric and of the Accelerator share a process: each has the losses that it has alone, and leaves nothing behind."""

import pytest

from interop.launching import figures, need, need_peer

pytestmark = pytest.mark.interop
SCRIPT = "fabric_loops.py"
ALONE = ["fabric", "accelerate", "accelerate-bf16"]
IN_TURN = ["fabric>accelerate", "accelerate>fabric", "fabric-bf16>accelerate", "fabric-64>accelerate-bf16"]
MIXED = ["launched", "prepared_loader", "prepared_model", "set_up_model"]
CASES = {1: [*ALONE, *IN_TURN, *MIXED, "started"], 2: [*ALONE, *IN_TURN, "accelerate>fabric>accelerate", *MIXED]}
# Tests of one launch run in one process.
SHARED = ("launch",)
# Fabric's seed_everything leaves these for worker processes, in which Fabric alone reads them.
FABRICS = {"PL_GLOBAL_SEED", "PL_SEED_WORKERS"}


@pytest.fixture(scope="module", params=[pytest.param(count, marks=pytest.mark.slow) for count in (1, 2)])
def launch(request, tmp_path_factory):
    """Run all cases on this package; return the number of processes and the reports."""
    need("lightning_fabric")
    folder = tmp_path_factory.mktemp("fabric")
    reports = figures(SCRIPT, folder, request.param, True, *CASES[request.param])
    errors = {case: reports[case]["error"] for case in CASES[request.param] if "error" in reports[case]}
    assert not errors, errors
    return request.param, reports


def test_loops_in_turn_have_the_losses_of_each_alone(launch):
    processes, reports = launch
    alone = {name: reports[name]["losses"][name] for name in ALONE}
    assert all(losses[-1] != losses[0] for losses in alone.values())
    in_turn = [case for case in CASES[processes] if ">" in case]
    for case in in_turn:
        for name, losses in reports[case]["losses"].items():
            assert name not in alone or losses == alone[name], case
    assert len(in_turn) >= len(IN_TURN)


def test_a_loop_changes_no_setting_of_the_process(launch):
    processes, reports = launch
    for case in CASES[processes]:
        for name, changed in reports[case].get("changed", {}).items():
            allowed = FABRICS if name.startswith("fabric") else set()
            # The first loop that needs a process group starts it, and the next one takes part in it.
            first = {"process group"} if processes > 1 and case.startswith(name) else set()
            assert changed.keys() <= allowed | first, (case, name, changed)


def test_an_accelerator_in_processes_of_fabric_trains_as_alone(launch):
    processes, reports = launch
    assert reports["launched"]["losses"] == reports["accelerate"]["losses"]["accelerate"]
    assert reports["prepared_model"]["losses"] == reports["set_up_model"]["losses"]
    if processes == 1:
        assert reports["started"]["ranks"] == [0, 0, 1, 1]
        assert reports["prepared_loader"]["losses"] == reports["set_up_model"]["losses"]


@pytest.mark.slow
def test_figures_equal_the_peers(launch, tmp_path):
    need_peer()
    processes, reports = launch
    peers = figures(SCRIPT, tmp_path, processes, False, *CASES[processes])
    for case in CASES[processes]:
        assert reports[case] == peers[case], case
