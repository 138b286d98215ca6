"""The questionnaire about machines of one's own, and what `accelerate launch` makes of its file."""

import os

import pytest
import yaml

from accelerate.commands.config import cluster, rules, words
from accelerate.commands.config.cluster import KINDS, ask_cluster
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.config.config_utils import KIND_WORDS
from accelerate.commands.config.interview import Interview, Step, content
from accelerate.commands.launch import launch_command_parser
from accelerate.config.options import BY_NAME, OPTIONS, SWITCH_OF_DISTRIBUTED_TYPE
from accelerate.launch import config_file
from accelerate.launch.plan import Source
from accelerate.launch.resolve import merge


@pytest.fixture(autouse=True)
def no_devices(machine):
    machine()


def test_every_key_of_a_file_has_a_question():
    assert [option.name for option in OPTIONS if option.file_key and not option.question] == []
    assert all(option.question.endswith("?") for option in OPTIONS if option.question)


def test_kinds_are_those_of_the_launcher():
    assert tuple(kind.word for kind in KINDS) == KIND_WORDS
    engines = {"DEEPSPEED", "FSDP", "MEGATRON_LM"}
    assert set(KIND_WORDS) | engines == set(SWITCH_OF_DISTRIBUTED_TYPE)


def test_words_are_accepted_by_their_options():
    for name in (*words.WORDS, *words.TRUTHS):
        for word in words.accepted(name) or ("true", "false"):
            assert str(BY_NAME[name].parse(word)) == word


@pytest.mark.parametrize("devices", [("cpu", 0), ("cuda", 1), ("cuda", 4), ("xpu", 2)], ids=str)
@pytest.mark.parametrize("seed", range(60))
def test_launch_reads_back_what_was_answered(place, at_random, machine, monkeypatch, seed, devices):
    machine(*devices)
    talks = []
    monkeypatch.setattr(cluster, "Interview", lambda *a, **k: talks.append(Interview(*a, **k)) or talks[-1])
    config = ask_cluster(at_random(f"{seed} {devices}"))
    path = config.save(place / ("c.json" if seed % 2 else "c.yaml"))
    merged = merge(launch_command_parser().parse_args(["--config_file", str(path), "train.py"]), {})
    answers = talks[0].values
    for name, value in answers.items():
        assert merged.values[name].value == value, name
        assert merged.values[name].source is Source.FILE
    switch = SWITCH_OF_DISTRIBUTED_TYPE[config.to_dict()["distributed_type"]]
    assert switch is None or merged.values[switch].value is True
    assert merged.notes == ()
    assert load_config_from_file(path).to_dict() == config.to_dict()
    problems, notes = rules.check(config_file.inspect(path))
    assert ([problem.text for problem in problems], notes) == ([], [])


@pytest.mark.parametrize("seed", range(20))
def test_the_answers_of_last_time_are_the_defaults(place, at_random, scripted, seed):
    first = ask_cluster(at_random(seed))
    before = config_file.inspect(first.save(place / "c.yaml"))

    class Enter(scripted):
        def _line(self, prompt):
            self.asked.append(prompt)
            assert len(self.asked) < 300
            return "y" if "further settings" in prompt or "its settings" in prompt or "combined" in prompt else ""

    second = ask_cluster(Enter(), before.settings.values, before.content["distributed_type"])
    kinds = [kind.word for kind in KINDS]
    if first.to_dict()["distributed_type"] in kinds:  # an engine does not say on what it ran
        new, old = second.to_dict(), first.to_dict()
        for key in (
            "distributed_type",
            "num_processes",
            "num_machines",
            "mixed_precision",
            "use_cpu",
            "main_process_ip",
        ):
            assert new.get(key) == old.get(key), key


def test_two_processes_on_the_cpu(scripted):
    asker = scripted("2", "", "", "", "", "", "bf16", "yes")
    config = ask_cluster(asker).to_dict()
    assert asker.lines == []
    assert (config["distributed_type"], config["use_cpu"], config["num_processes"]) == ("MULTI_CPU", True, 2)
    assert (config["mixed_precision"], config["debug"]) == ("bf16", True)
    assert "How many machines take part? [1]" in asker.asked


def test_several_machines_and_wrong_answers(scripted, machine):
    machine("cuda", 4, visible_env="CUDA_VISIBLE_DEVICES")
    asker = scripted(
        *("", "two", "2"),  # kind, machines
        *("2", "1"),  # rank
        *("10.0.0.1:29500", "10.0.0.1"),  # address
        *("70000", "29511"),
        *("", "", "", ""),  # network, rendezvous, engine, compilation
        *("7", "8"),  # processes
        *("no", "2", "perhaps", "no"),  # affinity, precision, debug
    )
    config = ask_cluster(asker).to_dict()
    assert (config["distributed_type"], config["num_machines"], config["machine_rank"]) == ("MULTI_GPU", 2, 1)
    assert (config["main_process_ip"], config["main_process_port"], config["num_processes"]) == ("10.0.0.1", 29511, 8)
    assert config["mixed_precision"] == "fp16"
    reasons = [line.strip() for line in asker.said if line.startswith("  ") and "." not in line[:5]]
    for part in (
        "it must be an integer",
        "2 machines have the numbers from 0 to 1",
        "the port is the next question",
        "from 1 to 65535",
        "cannot be shared evenly by 2 machines",
        "'perhaps' is neither yes nor no",
    ):
        assert any(part in reason for reason in reasons), part


def test_what_this_machine_cannot_do_is_explained(scripted, machine):
    asker = scripted("5", "", "", "", "", "", "", "4", "", "", "")
    ask_cluster(asker)
    assert any("shows no GPU of that kind" in line for line in asker.said)
    assert any("FP8 needs a GPU" in line for line in asker.said)
    machine("cuda", 1)
    asker = scripted("5", "", "", "", "3", "no", "", "", "", "", "")
    assert ask_cluster(asker).num_processes == 1
    assert any("will refuse 3 processes here" in line for line in asker.said)


@pytest.mark.parametrize(("typed", "written"), [("", None), ("socket", "socket")])
def test_the_key_for_cores_is_written_only_where_it_says_more(scripted, machine, typed, written):
    machine("cuda", 2)
    config = ask_cluster(scripted("", "", "", "", "", "", "yes", typed, "", "")).to_dict()
    assert (config["enable_cpu_affinity"], config.get("numa_affinity")) == (True, written)


def test_a_question_explains_itself(scripted):
    asker = scripted("2", "?", "", "", "", "", "", "", "")
    ask_cluster(asker)
    assert any(BY_NAME["num_machines"].help in line for line in asker.said)


def test_the_end_of_the_input(scripted):
    with pytest.raises(EOFError):
        ask_cluster(scripted("2", ""))


def test_a_file_that_is_asked_for_must_exist(scripted, place):
    asker = scripted("5", "", "3", "", "y", "no.json", "text.json", "right.json", "", "", "", "", "", "", "", "")
    (place / "text.json").write_text("a: 1")
    (place / "right.json").write_text("{}")
    config = ask_cluster(asker)
    assert config.deepspeed_config == {"deepspeed_config_file": "right.json", "zero3_init_flag": False}
    assert any("There is no file 'no.json'" in line and os.getcwd() in line for line in asker.said)
    assert any("'text.json' is no JSON file" in line for line in asker.said)


def test_an_answer_that_fits_no_longer_is_no_default(scripted):
    talk = Interview(scripted("1"), previous={"machine_rank": 3})
    talk.values["num_machines"] = 2
    assert talk.ask(Step("machine_rank", 0, check=cluster._check_rank)) == 1
    assert "[3]" not in talk.asker.asked[0]


def test_lists_are_asked_for_one_by_one(scripted):
    talk = Interview(scripted("A=1", "B=2,3", ""))
    assert talk.ask("env") == ["A=1", "B=2,3"]
    assert Interview(scripted("")).ask("env") is None
    assert Interview(scripted("yes"), previous={"env": ["A=1"]}).ask("env") == ["A=1"]


def test_content_is_what_others_write():
    found = content(
        {
            "fsdp_version": "2",
            "fsdp_offload_params": "true",
            "fp8_backend": "te",
            "fp8_override_linear_precision": (True, False, False),
            "env": ["A=1"],
            "log_dir": "x",
            "gpu_ids": None,
        }
    )
    assert yaml.safe_load(yaml.safe_dump(found)) == {
        "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True},
        "fp8_config": {"backend": "TE", "override_linear_precision": [True, False, False]},
        "tpu_env": ["A=1"],
    }
