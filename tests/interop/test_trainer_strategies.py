"""Checkpoints of the Trainer with sharded models, adapters, streams and the Trainers of other libraries: whole, resumed with equal losses, killed."""

import sys

import pytest

from interop.launching import SCRIPTS, figures, finished, last_figures, need

pytestmark = [pytest.mark.interop, pytest.mark.slow]
SCRIPT = "trainer_strategies.py"
# The names of files that must be in the manifest.
SHARDS = {"pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__1_0.distcp", "optimizer_0/.metadata"}
FULL = {"pytorch_model_fsdp.bin", "optimizer.bin", "model.safetensors"}
ENGINE = {"latest", "global_step6/zero_pp_rank_1_mp_rank_00_optim_states.pt"}
FSDP = {
    "fsdp2+sharded": SHARDS, "fsdp2+sharded+async": SHARDS, "fsdp1+full+apply+async": FULL, "fsdp2+full+apply": FULL, "fsdp1+sharded+async": SHARDS,
}  # fmt: skip
ADAPTERS = {
    "ddp+lora": {"adapter_model.safetensors", "optimizer.pt"}, "fsdp2+lora+sharded": SHARDS,
    "fsdp1+lora+sharded": SHARDS, "fsdp2+lora+full": FULL - {"model.safetensors"} | {"adapter_model.safetensors"},
}  # fmt: skip
STREAM = {"stream+short": {"optimizer.pt", "model.safetensors"}}
PLAIN = {"optimizer.pt", "model.safetensors"}
# The average is in the optimizer's state.
AVERAGES = {"ddp+average": PLAIN, "fsdp2+average+sharded": SHARDS}
STREAMS = ["stream", "stream+short", "shuffled+apply"]


# Next to what ranks have parts of, the weights are gathered.
SPLIT = {*SHARDS, "optimizer_0/__1_0.distcp", "model.safetensors"}


def first(cases, count):
    """Return the first cases for the quick run, and all of them, marked slow."""
    return [dict(list(cases.items())[:count]), pytest.param(cases, marks=pytest.mark.slow)]


def check(found, cases):
    for case, wanted in cases.items():
        one = found[case]
        assert one["equal"], (case, one["whole"], one["rest"])
        assert wanted <= set(one["files"]) and not one["unlisted"] and not one["rotten"], (case, one)
        # Each rank has hashed its own shards.
        ranks = {name: rank for name, rank in one["files"].items() if name.endswith(".distcp")}
        assert all(name.endswith(f"__{rank}_0.distcp") for name, rank in ranks.items()), ranks
        # Two threads in one group would take each other's collectives.
        in_thread = "async" in case.split("+") and bool(ranks)
        assert not any(one["in_training_group"]) and bool(one["in_training_group"]) == in_thread, case


@pytest.mark.parametrize("cases", first({**STREAM, **FSDP, **ADAPTERS, **AVERAGES}, 3))
def test_sharded_runs_and_adapters_resume_with_equal_losses(cases, tmp_path):
    need("transformers", "peft")
    check(figures(SCRIPT, tmp_path, 2, True, *cases), cases)


@pytest.mark.parametrize(
    "processes, cases",
    [(2, ["tp", "tp+async+apply", "ep", "split+llama"]), (2, ["tp+lora"]), (4, ["tpfsdp", "fsdp2+llama+sharded+tp"])],
)
def test_models_that_are_split_resume_with_equal_losses(processes, cases, tmp_path):
    need("transformers", "peft")
    wanted = {case: SPLIT - {"model.safetensors"} if "fsdp2" in case or "lora" in case else SPLIT for case in cases}
    check(figures(SCRIPT, tmp_path, processes, True, *cases), wanted)


def test_replicas_of_shards_resume_with_equal_losses(tmp_path):
    need("transformers")
    check(figures(SCRIPT, tmp_path, 4, True, "fsdp2+sharded+hsdp"), {"fsdp2+sharded+hsdp": SHARDS})


def test_adapters_on_models_of_four_bits_resume_with_equal_losses(tmp_path):
    need("transformers", "peft", "bitsandbytes")
    cases = {"ddp+qlora": ADAPTERS["ddp+lora"], "fsdp2+qlora+sharded": SHARDS}
    check(figures(SCRIPT, tmp_path, 2, True, *cases), cases)


def test_weights_alone_of_a_model_that_is_split(tmp_path):
    need("transformers")
    found = figures(SCRIPT, tmp_path, 2, True, "tp+weights")["tp+weights"]
    assert {"model.safetensors", "trainer_state.json"} <= set(found["files"]) and not found["unlisted"], found
    assert not {name for name in found["files"] if "optimizer" in name}


def test_experts_whose_files_have_other_names_resume_with_equal_losses(tmp_path):
    need("transformers")
    check(figures(SCRIPT, tmp_path, 2, True, "ddp+experts"), {"ddp+experts": PLAIN})


LLAMA = "fsdp2+llama+sharded"
ACROSS = [f"{LLAMA}:ddp+llama", f"ddp+llama:{LLAMA}", "tp:ddp+llama", "ddp+llama:tp", f"split+llama:{LLAMA}"]
ACROSS += ["ep:ddp+experts", "fsdp2+lora+sharded:ddp+lora"]


@pytest.mark.parametrize("processes, cases", [(2, ACROSS), (4, [f"tpfsdp:{LLAMA}"])])
def test_a_run_goes_on_by_another_strategy(processes, cases, tmp_path):
    need("transformers")
    found = figures(SCRIPT, tmp_path, processes, True, *cases)
    assert all(found[case]["worst"] < 1e-5 for case in cases), found


def test_an_optimizer_that_cannot_be_converted_is_refused_on_all_ranks(tmp_path):
    need("transformers")
    told = figures(SCRIPT, tmp_path, 2, True, "ddp+experts:ep")["ddp+experts:ep"]["refused"]
    assert len(told) == 2 and all(
        "has groups of [16, 5] parameters, and this optimizer of [12, 4, 5]" in text for text in told
    )


@pytest.mark.parametrize(
    "libraries, cases",
    [
        (["datasets"], [*STREAMS]),
        pytest.param(["trl", "peft", "datasets"], ["sft", "sft+apply", "dpo", "dpo+apply"], marks=pytest.mark.slow),
        pytest.param(["trl", "datasets"], ["reward", "reward+apply", "sft+lora+async"], marks=pytest.mark.slow),
        pytest.param(["sentence_transformers", "datasets"], ["sentence", "sentence+apply"], marks=pytest.mark.slow),
        pytest.param(["bitsandbytes", "peft"], ["qlora"], marks=pytest.mark.slow),
    ],
    ids=["streams", "sft-dpo", "reward", "sentence", "qlora"],
)
def test_other_trainers_and_streams_resume_with_equal_losses(libraries, cases, tmp_path):
    need("transformers", *libraries)
    adapter = {"adapter_model.safetensors", "optimizer.pt"}
    wanted = {case: adapter if "lora" in case else PLAIN for case in cases}
    check(figures(SCRIPT, tmp_path, 1, True, *cases), wanted)


def killed(folder, count, *cases):
    """Kill runs of two ranks in and around their saves; each continues, and has the losses of one that was never stopped."""
    pytest.importorskip("fcntl", reason="runs are killed as on Linux")
    found = last_figures(
        finished([sys.executable, str(SCRIPTS / SCRIPT), "--kill", "5", str(count), str(folder), *cases])
    )
    assert all(found[case]["killed"] >= count and found[case]["in_saves"] for case in cases), found


@pytest.mark.parametrize(
    "count, cases",
    [
        (1, ["fsdp2+sharded"]),
        pytest.param(3, ["fsdp2+sharded", "fsdp2+sharded+async"], marks=pytest.mark.slow),
        pytest.param(2, ["tp", "tp+async"], marks=pytest.mark.slow),
        pytest.param(3, ["fsdp2+full+apply", "fsdp2+full+async"], marks=pytest.mark.slow),
        pytest.param(3, ["fsdp1+sharded", "fsdp1+sharded+async"], marks=pytest.mark.slow),
        pytest.param(3, ["fsdp1+full", "fsdp1+full+apply+async"], marks=pytest.mark.slow),
    ],
)
def test_every_killed_sharded_run_goes_on_with_the_same_losses(count, cases, tmp_path):
    need("transformers")
    killed(tmp_path, count, *cases)


@pytest.mark.slow
def test_deepspeed_runs_resume_with_equal_losses(tmp_path):
    need("transformers", "deepspeed")
    cases = {
        "zero0": {"latest", "global_step6/mp_rank_00_model_states.pt"}, "zero1+async": ENGINE, "zero2": ENGINE | PLAIN - {"optimizer.pt"},
        "zero3+apply": ENGINE, "zero3+gather+async": ENGINE, "zero2+lora": ENGINE, "zero3+lora": ENGINE,
    }  # fmt: skip
    check(figures(SCRIPT, tmp_path, 2, True, *cases), cases)


@pytest.mark.slow
def test_a_deepspeed_run_goes_on_by_another_strategy_and_the_other_way(tmp_path):
    need("transformers", "deepspeed")
    cases = ["zero2:ddp", "ddp:zero2", "zero3:fsdp2+sharded", "fsdp2+sharded:zero3", "zero2:zero3", "zero3:fsdp1+full"]
    found = figures(SCRIPT, tmp_path, 2, True, *cases)
    assert all(found[case].get("worst", 1) < 1e-5 for case in cases), found


@pytest.mark.slow
@pytest.mark.parametrize("cases", [["zero2", "zero2+async"], ["zero3+gather", "zero3+async"]])
def test_every_killed_deepspeed_run_goes_on_with_the_same_losses(cases, tmp_path):
    need("transformers", "deepspeed")
    killed(tmp_path, 2, *cases)
