"""A simulated rank does what the same rank of a real run does: collectives, shapes, batches. And what a simulated run leaves behind."""

import json
import os
import sys
from pathlib import Path

import pytest

from accelerate.base.versions import is_torch_version
from distributed.conftest import SCRIPTS, done, plain_environment

pytest.importorskip("transformers")

SCRIPT = str(SCRIPTS / "check_collectives.py")
LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--quiet"]
FSDP = ["--use_fsdp", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_version"]
MESH = "--use_parallelism_config --parallelism_config_"


def found(tmp_path: Path, *words: str) -> tuple[dict, str]:
    """Launch the script, and return what it prints of rank 1, and all that it prints."""
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH")]))
    more = {"PYTHONPATH": paths} if paths else {}
    ended = done([*LAUNCH, *words], cwd=tmp_path, env=plain_environment(tmp_path, OMP_NUM_THREADS="1", **more))
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    [line] = [line for line in ended.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND ")), ended.stdout


# Ranks, options of the launch, and collectives that the run must have.
CASES = {
    "ddp": (2, [], {"all ranks all_reduce"}),
    "fsdp2": (2, [*FSDP, "2"], {"all ranks all_gather", "all ranks reduce_scatter"}),
    "fsdp2 and tp": (
        4,
        [*FSDP, "2", *f"{MESH}dp_shard_size 2 --parallelism_config_tp_size 2".split()],
        {"dp_shard all_gather", "dp_shard reduce_scatter", "tp all_reduce"},
    ),
    "hsdp": (
        4,
        [*FSDP, "2", *f"{MESH}dp_replicate_size 2 --parallelism_config_dp_shard_size 2".split()],
        {"dp_replicate all_reduce", "dp_shard all_gather"},
    ),
    "fsdp1": (2, [*FSDP, "1"], {"all ranks all_gather"}),
    "tp": (2, f"{MESH}tp_size 2".split(), {"tp all_reduce"}),
    "cp": (2, [*FSDP, "2", *f"{MESH}cp_size 2".split()], {"cp all_to_all"}),
    "sp": (2, [*FSDP, "2", *f"{MESH}sp_size 2 --parallelism_config_sp_backend torch".split()], {"sp all_to_all"}),
    "ep": (2, [*FSDP, "2", "experts"], {"dp_shard all_to_all"}),
}


@pytest.mark.skipif(is_torch_version("<", "2.10"), reason="FSDP2 on several CPU processes needs torch 2.10 or newer")
@pytest.mark.parametrize("case", ["fsdp2", *(pytest.param(c, marks=pytest.mark.slow) for c in CASES if c != "fsdp2")])
def test_a_simulated_rank_is_the_rank_of_a_real_run(case, tmp_path):
    ranks, options, kinds = CASES[case]
    split = ["--fsdp_cpu_ram_efficient_loading", "false"] if "--use_fsdp" in options else []
    experts = [word for word in options if word == "experts"]
    options = [word for word in options if word != "experts"]
    real, _ = found(tmp_path, "--cpu", "--num_processes", str(ranks), *options, *split, SCRIPT, "-", *experts)
    words = ["--simulate", f"{ranks}x1", "--simulate_rank", "1", "--simulate_report", "report.json"]
    words += ["--simulate_device", "h100-80gb"]
    simulated, text = found(tmp_path, *words, *options, *split, SCRIPT, "saved", *experts)
    if (
        experts
    ):  # how many tokens other ranks have for the experts of this one is made up: as many as it has for theirs
        mine, theirs = ({kind: size for _, kind, _, size in each["calls"]} for each in (simulated, real))
        assert mine["all_to_all"] == pytest.approx(theirs["all_to_all"], rel=0.1)
        for call, found_call in zip(simulated["calls"], real["calls"], strict=True):
            call[3] = found_call[3] if call[1] == "all_to_all" else call[3]
    assert simulated == real
    assert kinds <= {f"{group} {kind}" for group, kind, *_ in real["calls"]}
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert experts or [list(call.values()) for call in report["step"]["collectives"]] == real["calls"]
    assert report["run"]["steps"] == real["batches"] == report["data"][0]["batches"]
    assert report["step"]["memory"]["kinds"]["parameters"] >= sum(map(_count, real["shapes"])) * 4
    estimate = report["step"]["estimate"]
    parts = estimate["arithmetic"], estimate["waiting"], estimate["exposed"]
    assert sum(parts) == pytest.approx(estimate["seconds"]) and parts[0] > 0 and estimate["memory"] == 80 * 10**9
    assert (parts[1] > 0) == any(
        group in ("tp", "cp", "sp") or kind == "all_to_all" for group, kind, *_ in real["calls"]
    )
    assert "Estimated on h100-80gb" in text and estimate["links"] == ["NVLink 4", "infiniband-ndr"]
    [save] = report["checkpoints"]
    assert f"random_states_{1}.pkl" in save["files"] and report["loads"] == [save["location"]]
    if experts:  # their tokens spread evenly over the ranks, and their weights have no values
        _, text = found(tmp_path, *words, "--simulate_shapes_only", *options, *split, SCRIPT, "-", *experts)
        shapes = json.loads((tmp_path / "report.json").read_text("utf-8"))["step"]
        for one, other in zip(shapes["collectives"], report["step"]["collectives"], strict=True):
            assert one | {"bytes": 0} == other | {"bytes": 0}
            assert one["bytes"] == pytest.approx(other["bytes"], rel=0.1 * (one["kind"] == "all_to_all"))
        assert shapes["memory"]["kinds"]["optimizer"] == report["step"]["memory"]["kinds"]["optimizer"]
    assert not (tmp_path / "saved").exists() and f"rank 1 of {ranks} ({ranks} machines x 1 processes)" in text


def _count(shape: list[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


@pytest.mark.slow
def test_a_model_larger_than_memory_and_an_end_after_some_steps(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        """
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Sequential(*[torch.nn.Linear(1 << 17, 1 << 17, bias=False) for _ in range(2)])  # 128 GiB
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.zeros(1 << 14, 1), batch_size=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(loss := model(batch.expand(-1, 1 << 17)).mean())
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
raise AssertionError("it ends before")
"""
    )
    words = ["--simulate", "128x8", "--simulate_rank", "513", "--simulate_steps", "2", "--simulate_shapes_only"]
    words += ["--simulate_report", "report.json", "--use_fsdp", "--fsdp_version", "2", str(script)]
    ended = done([*LAUNCH, *words], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0 and "loss nan" in ended.stdout, ended.stdout[-3000:] + ended.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert report["run"]["steps"] == 2 and "as --simulate_steps says" in ended.stdout
    kinds = report["step"]["memory"]["kinds"]
    assert kinds["parameters"] == (2 << 34) * 4 // 1024 and kinds["optimizer"] >= 2 * kinds["parameters"]
    assert report["data"][0]["steps"] == 16 and report["data"][0]["global_batch"] == 1024
    assert ended.stdout.count("NaN") == 1


def test_the_status_of_the_program_is_that_of_the_launch_and_the_report_comes_all_the_same(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import warnings\nfrom accelerate import PartialState\nstate = PartialState()\n"
        "warnings.warn('this has no effect')\nraise SystemExit(state.process_index)\n"
    )
    words = ["--simulate", "4x2", "--simulate_rank", "5", str(script)]
    ended = done([*LAUNCH, *words], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 5, ended.stderr
    assert "rank 5 of 8" in ended.stdout and "the program ended with status 5" in ended.stdout
    assert "\nwarning: this has no effect\n" in ended.stdout and "Estimated" not in ended.stdout


def test_a_rank_that_is_sent_its_batches_is_refused(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "from torch.utils.data import DataLoader\nfrom accelerate import Accelerator, DataLoaderConfiguration\n"
        "accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))\n"
        "list(accelerator.prepare(DataLoader(range(8))))\n"
    )
    words = ["--simulate", "2x1", "--simulate_rank", "1", str(script)]
    ended = done([*LAUNCH, *words], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode and "Simulate the rank that reads (--simulate_rank 0)" in ended.stderr, ended.stderr
