"""Single questions, and whole interviews: what `accelerate config` asks, and what it writes for the answers.

Each file in `tests/fixtures/interviews` is what a person sees, with what was typed, and the configuration file that came of it. They
were recorded before the interview was generated from the option table. To record them again after a change that is meant:
`ACCELERATE_WRITE_GOLDEN=1 pytest tests/extensions/configure/test_interview.py`, and read the diff.
"""

import os
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[2] / "fixtures" / "interviews"
WRITES = bool(os.environ.get("ACCELERATE_WRITE_GOLDEN"))
GPUS = ("cuda", 4)
HERE = "1"  # machines of your own
# Name: the devices of this machine, then the answers, one a word; "-" is Enter alone.
INTERVIEWS = {
    "one_process_on_the_cpu": (("cpu", 0), f"{HERE} 1 yes no 3"),
    "one_process_on_a_gpu": (GPUS, f"{HERE} 1 no no 0,0 2 -"),
    "cpus_through_mpirun": (("cpu", 0), f"{HERE} 2 - - - yes none.txt hosts.txt x 2 x 6 fp16 -"),
    "gpus_compiled_and_bound": (GPUS, f"{HERE} 5 1 1 yes - yes 2 yes - - 8 no 2 1,2,3 0,1 yes 3 no"),
    "three_machines": (GPUS, f"{HERE} 5 two 3 3 2 10.0.0.1:1 localhost 70000 0 29511 no c10d 1 no 13 12 no 3 yes"),
    "fsdp_1_by_size": (GPUS, f"{HERE} 5 1 2 no 1 4 yes 2 0 1000 2 1 yes no no no yes - all no 2 -"),
    "fsdp_2_with_parallelism_and_fp8": (
        GPUS,
        f"{HERE} 5 2 - 10.0.0.1 - - - 2 no 2 - - 1 Block - - yes - yes 0 2 1 2 2 2 - - 4 1 - no -",
    ),
    "zero_3_on_nvme_with_ulysses": (
        GPUS,
        f"{HERE} 5 1 3 no no 4 3 3 /disk - 4 0 1.5 yes yes Mixture yes 2 2 2 no x 128 2 - - yes 3 -",
    ),
    "deepspeed_on_machines_with_a_file": (
        GPUS,
        f"{HERE} 5 2 0 10.0.0.1 - - - 3 no yes none.json hosts.txt ds.json yes 1 hosts.txt - worker-1:0 no - - - -",
    ),
    "a_pod_of_tpus": (
        ("cpu", 0),
        f"{HERE} 11 no 1x train yes pod us-central1-a - - setup.sh,x  pip,install - vm-1 vm-2 - A=1 - 16 2 yes -",
    ),
    "transformer_engine": (GPUS, f"{HERE} 5 1 1 no - - - 4 2 yes -1 1 2 2 16 1 true,false,yes -"),
    "sagemaker_by_a_profile": (
        ("cpu", 0),
        "2 1 team moon eu-west-1 my-role no inputs.tsv - 2 yes 3 no 3 2 3 no my_jobs jobs",
    ),
    "sagemaker_by_keys": (("cpu", 0), "2 2 - role yes registry/image:1 - - 1 no p3 ml.p4d.24xlarge - - - -"),
}
# What stands in the file that is replaced; everything but the gates is answered by Enter.
AGAIN = {
    "fsdp_again": "{distributed_type: FSDP, num_processes: 2, mixed_precision: bf16, debug: true, dynamo_config: "
    "{dynamo_backend: EAGER}, fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false, fsdp_auto_wrap_policy: NO_WRAP, "
    "fsdp_state_dict_type: FULL_STATE_DICT}, parallelism_config: {parallelism_config_tp_size: 2}}",
    "pod_again": "{distributed_type: XLA, main_training_function: go, tpu_use_cluster: true, tpu_name: pod, tpu_zone: z, "
    "tpu_vm: [a, b], tpu_env: [A=1], commands: [one, two], mixed_precision: bf16, downcast_bf16: true}",
    "sagemaker_again": "{compute_environment: AMAZON_SAGEMAKER, distributed_type: MODEL_PARALLEL, profile: team, region: eu-west-1, "
    "iam_role_name: role, image_uri: i, ec2_instance_type: ml.p3dn.24xlarge, num_machines: 3, py_version: py311, "
    "mixed_precision: fp16, base_job_name: nightly, sagemaker_inputs_file: in.tsv, debug: true}",
}


class Typing:
    """A keyboard and its echo; the input ends after the last answer, and never if None is given: then Enter is typed."""

    def __init__(self, answers):
        self.answers = answers

    def readline(self, size=-1):
        if self.answers == []:
            return ""
        line = self.answers.pop(0) if self.answers else ""
        print(line)
        return f"{line}\n"

    def isatty(self):
        return False


@pytest.fixture
def interview(accelerate, monkeypatch, machine, place):
    """Hold an interview; returns what is seen and what is written."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    (place / "hosts.txt").touch()
    (place / "setup.sh").touch()
    (place / "ds.json").write_text("{}")

    def hold(devices, answers):
        machine(*devices)
        typing = Typing(answers)
        monkeypatch.setattr("sys.stdin", typing)
        status, out, err = accelerate("config", "--config_file", "c.yaml")
        assert (status, err) == (0, ""), out + err
        assert not typing.answers, out
        return f"{out}\n{(place / 'c.yaml').read_text()}".replace(str(place), "/PLACE")

    return hold


def compare(name, text):
    golden = GOLDEN / f"{name}.txt"
    if WRITES:
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, "utf-8")
    assert text.splitlines() == golden.read_text("utf-8").splitlines()


@pytest.mark.parametrize("name", INTERVIEWS)
def test_what_is_asked_and_written(interview, name):
    devices, answers = INTERVIEWS[name]
    compare(name, interview(devices, ["" if word == "-" else word for word in answers.split(" ") if word]))


@pytest.mark.parametrize("name", AGAIN)
def test_the_answers_of_last_time_are_the_defaults(interview, place, name):
    (place / "c.yaml").write_text(AGAIN[name])
    compare(name, interview(GPUS, None))
    assert not (place / "c.yaml.bak").exists()  # a file without faults needs no copy


def test_single_questions(scripted):
    asker = scripted("0", "4", "x", "99999999", "²", "2", "B", "")
    assert asker.choose("Which?", ["a", "b", "c"]) == 1
    assert sum("type a number from 1 to 3" in line for line in asker.said) == 5
    assert asker.choose("Which?", ["a", "b"]) == 1 and asker.choose("Which?", ["a", "b"], 1) == 1
    asker = scripted("", "x", "3", "", "")
    assert asker.text("How many?", int) == 3
    assert "There is no default" in asker.said[0] and "invalid literal" in asker.said[1]
    assert asker.text("Which?", str, (True, False)) == (True, False) and asker.asked[-1] == "Which? [true,false]"
    assert asker.text("How many?", int, optional=True) is None
