"""Scripts that check themselves on real processes: one launch for each number of processes and group of scripts."""

import pytest

TRAINING = "check_training.py check_uneven_inputs.py check_wrappers.py check_prepare.py check_watching.py"
PIPELINE = "check_pipeline.py"
STATES = "check_operations.py check_processes.py"
LOADERS = "check_loaders.py check_active_loader.py check_orders.py check_streams.py check_metrics_property.py"
OF_TRANSFORMERS = "check_tensor_parallel.py check_long_sequences.py check_pippy.py"
SHARDS = "check_sharded_checkpoints.py"

QUICK = [
    (2, f"check_collective_errors.py {TRAINING}"),
    (2, LOADERS),
    (2, f"{OF_TRANSFORMERS} {PIPELINE}"),
    (
        2,
        "check_sharded.py check_adapters.py check_precision.py check_norms.py check_estimator.py check_conditional.py "
        "check_weights.py check_ema.py",
    ),
    (3, STATES),
]
SLOW = [
    (1, f"{TRAINING} check_processes.py"),
    (2, STATES),
    (4, "check_training.py check_items check_windows"),
    (1, LOADERS.replace("check_streams.py ", "")),  # one process does not divide a stream
    *((processes, LOADERS) for processes in (3, 4)),
    *((processes, f"check_metrics_property.py thousand_{seed}") for processes in (1, 2, 3, 4) for seed in (1, 2)),
    (2, f"{OF_TRANSFORMERS} check_estimator.py slow_"),
    (3, "check_pippy.py check_ slow_"),
    (4, "check_long_sequences.py check_pippy.py check_estimator.py check_ four_ slow_"),
    (4, "check_norms.py check_ four_"),
    (4, "check_sharded.py check_fsdp2_units.py check_adapters.py check_conditional.py four_"),
    (4, "check_ema.py"),
    (2, f"{PIPELINE} slow_"),
    (2, "check_fsdp2_units.py"),
    (4, f"{PIPELINE} four_"),
    (1, "check_ema.py"),
    (3, SHARDS),
    (4, f"{SHARDS} meshes_"),
]


@pytest.mark.parametrize(
    ("processes", "words"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_checks(launch, processes, words):
    if any(script in words for script in OF_TRANSFORMERS.split()):
        pytest.importorskip("transformers")
    done = launch("several.py", *words.split(), processes=processes, cpu=True if SHARDS in words else None)
    assert done.stdout.count("\ndone check_") == words.count(".py")


@pytest.mark.parametrize(
    ("script", "what", "words"),
    [
        ("check_collective_errors.py", "one_rank_fails", "the disk of the last rank is gone"),
        ("check_streams.py", "lost_process", ""),
        ("check_training.py", "out_of_memory_elsewhere", "different numbers of collectives (this one"),
        (
            "check_training.py",
            "out_of_memory_alone",
            "find_executable_batch_size was called by rank 1, but rank 0 will not",
        ),
    ],
)
def test_a_rank_that_fails_ends_the_run(launch, script, what, words):
    done = launch("several.py", script, what, succeeds=False)
    assert words in done.stderr and f"ok {what}" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["plain", "ddp", "fsdp1", "fsdp1-flat", "fsdp2", "tp"])
def test_every_strategy_reads_what_one_writes(launch, writer):
    done = launch("several.py", SHARDS, "the_wide_matrix", processes=4, cpu=True, environment={"WRITER": writer})
    assert "ok the_wide_matrix" in done.stdout
