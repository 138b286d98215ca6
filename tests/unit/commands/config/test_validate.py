"""`accelerate config validate`: every problem of a file, with its line."""

import pytest


@pytest.fixture
def validate(accelerate, place):
    def run(text, name="c.yaml"):
        (place / name).write_text(text)
        return accelerate("config", "validate", name)

    return run


def test_everything_at_once(validate):
    lines = [
        "distributed_type: MULTI_GPU",
        "use_cpu: true",
        "num_proceses: 1",
        "mixed_precision: fp17",
        "fsdp_config:",
    ]
    lines += ["  fsdp_sharding_strategy: FULL_SHRAD", "  nonsense: 1", "num_machines: 2", "machine_rank: 2"]
    lines += ["num_processes: 3", "main_process_port: 70000", "num_processes: 5", "gpu_ids: 0,0"]
    status, _, err = validate("\n".join(lines))
    assert status == 2
    assert [line.partition(": ")[0] for line in err.splitlines()] == [
        *(f"c.yaml:{line}" for line in (2, 3, 4, 6, 7, 8, 9, 11, 12, 13)),
        "c.yaml",
    ]
    for part in [
        "use_cpu is true, and distributed_type asks for GPUs; MULTI_CPU",
        "num_proceses is unknown; did you mean num_processes?",
        "mixed_precision is 'fp17'",
        "fsdp_config.fsdp_sharding_strategy is 'FULL_SHRAD'; did you mean FULL_SHARD?",
        "fsdp_config.nonsense is unknown and has no effect",
        "main_process_ip, the address of machine 0, is missing",
        "machine_rank is 2, and num_machines is 2",
        "ports are numbers from 0 to 65535",
        "num_processes is 5, which 2 machines cannot share evenly",
        "names a device twice",
        "10 problems found",
    ]:
        assert part in err, part


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_machines: 0", "num_machines is 0; it must be at least 1"),
        ("num_processes: 3\nparallelism_config: {tp_size: 2}", "need 2"),
        ("distributed_type: MULTI_GPU\nnum_processes: 4\ngpu_ids: '0,1'", "names 2 devices for 4 processes"),
        ("deepspeed_config: {deepspeed_config_file: none.json}", "there is no such file (seen from"),
        ("deepspeed_config: {zero_stage: 4}", "deepspeed_config.zero_stage is '4'; choose one of 0, 1, 2, 3"),
        ("fsdp_config: {fsdp_offload_params: perhaps}", "write true or false"),
        ("fsdp_config: {fsdp_sharding_strategy: 6}", "choose one of FULL_SHARD"),
        ("distributed_type: XLA\nuse_cpu: yes", "asks for TPUs"),
        ("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: FSDP", "choose one of NO, DATA_PARALLEL"),
        # What cannot be read at all.
        ("", "is empty"),
    ],
)
def test_problems(validate, text, message):
    status, _, err = validate(text)
    assert status == 2 and message in err and len(err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("num_processes: 1", "distributed_type is missing"),
        ("distributed_type: 'NO'\nfp16: true", "fp16 is now mixed_precision: fp16"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 2}", "no problem found"),
        ("distributed_type: FSDP\nrdzv_backend: etcd", "no problem found"),
    ],
)
def test_notes_are_no_problems(validate, text, note):
    status, out, err = validate(text)
    assert (status, err) == (0, "") and note in out


def test_which_file(accelerate, place):
    for words, message in (
        ((), "There is no file"),
        (("none.yaml",), "--config_file is 'none.yaml': there is no such file"),
        (("a.yaml", "--config_file", "b.yaml"), "Name one file"),
    ):
        status, _, err = accelerate("config", "validate", *words)
        assert status == 2 and message in err
    (place / "home" / "accelerate").mkdir(parents=True)
    (place / "home" / "accelerate" / "default_config.yaml").write_text("distributed_type: 'NO'")
    assert accelerate("config", "validate")[0] == 0
