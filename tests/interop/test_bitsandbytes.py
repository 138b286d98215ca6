"""Models that transformers quantises with bitsandbytes, on the CPU: loaded, offloaded to disk, trained with adapters."""

import pytest

from interop.launching import figures, need, need_peer

pytestmark = pytest.mark.interop
# Tests of one process; each runs the script once.
SHARED = ["checks"]
SCRIPT, TRAINERS = "bnb_models.py", "qlora_trainers.py"
QUICK = ["tokens", "same 8", "same 4", "offloaded 8", "offloaded 4"]


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    need("bitsandbytes", "transformers")
    return figures(SCRIPT, tmp_path_factory.mktemp("bnb"), 1, True, *QUICK)["checks"]


@pytest.mark.parametrize("bits", ["8", "4"])
def test_transformers_loads_and_generates(bits, checks):
    found = {name: rows for name, rows in checks["tokens"].items() if name.startswith(bits)}
    rows = next(iter(found.values()))
    assert len(found) == 3 and all(other == rows for other in found.values())
    assert [len(row) for row in rows] == [8, 8] and len({token for row in rows for token in row}) > 1


@pytest.mark.parametrize("bits", ["8", "4"])
def test_the_model_is_the_one_that_transformers_makes(bits, checks):
    assert checks[f"same {bits}"] == {"same": True}


@pytest.mark.parametrize("bits", ["8", "4"])
def test_offloaded_to_disk_it_gives_the_same_bits(bits, checks):
    assert all(checks[f"offloaded {bits}"].values()), checks[f"offloaded {bits}"]


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["8", "4"])
def test_adapters_train_on_it(bits, tmp_path):
    need("bitsandbytes", "transformers", "peft")
    found = figures(SCRIPT, tmp_path, 1, True, f"lora {bits}")["checks"][f"lora {bits}"]
    assert found["same weights"] and found["losses"][-1] < found["losses"][0]


@pytest.mark.slow
def test_adapters_train_sharded_as_under_ddp(tmp_path):
    need("bitsandbytes", "transformers", "peft")
    assert figures("qlora.py", tmp_path, 2, True)["passed"]


@pytest.mark.slow
def test_two_ranks_go_on_with_what_four_saved(tmp_path):
    need("bitsandbytes", "transformers", "peft")
    saved = figures("qlora.py", tmp_path, 4, True, "save")
    loaded = figures("qlora.py", tmp_path, 2, True, "load")
    for model in ("llama", "qlora"):
        assert loaded[model] == pytest.approx(saved[model], abs=1e-5), model


@pytest.mark.slow
def test_tokens_equal_the_peers(checks, tmp_path):
    need_peer()
    theirs = figures(SCRIPT, tmp_path, 1, False, "tokens")["checks"]
    assert theirs["tokens"] == checks["tokens"]


def check_adapters(reports, cases):
    """Check that adapters trained on packed weights, equally on all ranks."""
    for case in cases:
        report = reports[case]
        assert "error" not in report, report["error"]
        assert report["packed"] > 10 and len(set(report["weights"])) == 1 and len(set(report["losses"][0])) == 4, case


def test_adapters_train_on_a_base_that_this_package_quantises_as_on_transformers(tmp_path):
    need("bitsandbytes", "transformers", "peft")
    cases = ["loop", "loop+quantised"]
    reports = figures(TRAINERS, tmp_path, 1, True, *cases)
    check_adapters(reports, cases)
    assert reports["loop+quantised"] == reports["loop"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_trainers_of_adapters_have_the_peers_losses(processes, tmp_path):
    need("bitsandbytes", "transformers", "peft", "trl", "datasets")
    need_peer()
    cases = ["trainer", "trainer+double", "trainer+checkpointing", "sft", "sft+checkpointing"]
    cases += ["loop", "loop+checkpointing", "loop+bf16"]
    ours = figures(TRAINERS, tmp_path / "ours", processes, True, *cases, "trainer+quantised")
    peers = figures(TRAINERS, tmp_path / "peer", processes, False, *cases)
    check_adapters(ours, [*cases, "trainer+quantised"])
    for case in cases:
        assert ours[case] == peers[case], case
    assert ours["trainer+quantised"] == ours["trainer"]
