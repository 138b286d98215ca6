"""A Trainer's program runs unchanged as one simulated rank."""

import json
import sys

import pytest

from interop.launching import SCRIPTS, finished, need

pytestmark = [pytest.mark.interop, pytest.mark.slow]


def test_a_trainer_is_simulated(tmp_path):
    need("transformers")
    words = ["--simulate", "16x8", "--simulate_rank", "9", "--simulate_steps", "3", "--simulate_report", "report.json"]
    words += ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]
    words += [
        "--fsdp_transformer_layer_cls_to_wrap",
        "LlamaDecoderLayer",
        str(SCRIPTS / "simulated_trainer.py"),
        "out",
    ]
    ended = finished([sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *words], cwd=tmp_path)
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert (
        report["run"]["steps"] == 3 and "rank 9 of 128" in ended.stdout and "after 3 optimizer steps" in ended.stdout
    )
    # The Trainer accumulates automatically.
    [plan] = report["data"]
    assert (plan["global_batch"], plan["batches"], plan["steps"]) == (2 * 2 * 128, 16, 8)
    calls = {(call["group"], call["kind"]): call["count"] for call in report["step"]["collectives"]}
    assert (
        calls["all ranks", "reduce_scatter"] == 3 and calls["all ranks", "all_gather"] > 3
    )  # two layers and the rest
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("checkpoint-*"))
