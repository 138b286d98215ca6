"""Runs that hang, and runs that are only slow: what `accelerate launch` says of them, and when."""

import os
import re
import sys

import pytest

from accelerate.runtime.failure import HUNG
from distributed.conftest import LAUNCH_ON_CPU, SCRIPTS, begun, done, until
from distributed.hangs import seeds

PROGRAMS = SCRIPTS.parent / "hangs"
LIMIT = {"ACCELERATE_HANG_REPORT_AFTER": "2", "ACCELERATE_HANG_ABORT_AFTER": "5"}
REPORT = re.compile(r"^(Hang|Slow): ranks? [\d, ]+ ha(?:s|ve) waited for (\d+) s in (.*(?:\n  .*)*)", re.M)


def lines_of(seed):
    """Return the line at which each rank of a seeded hang stands, by the comments there."""
    found, inside = {}, False
    for number, line in enumerate((PROGRAMS / "seeds.py").read_text("utf-8").splitlines(), 1):
        inside = line.startswith(f"def {seed}(") or (inside and not line.startswith("def "))
        for rank in (
            re.findall(r"# rank (\d)", line) if inside or seed == "locked_tracker" and "self.lock:" in line else ()
        ):
            found.setdefault(rank, f"seeds.py:{number}")
    return found


def seed(name, *texts, slow=True):
    """Return a row of the table; `texts` must be in the report."""
    return pytest.param(name, texts, id=name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        seed("skipped_gather", "all_reduce no. 1 of Long [2]", "barrier no. 1", "rank 1 went past"),
        seed(
            "early_break",
            "all_reduce no. 8 of Float [5] (accelerate.accelerator.backward)",
            "barrier no. 8",
            "rank 1 went past",
        ),
        seed("uneven_loader", "all_reduce no. 8 of Float [5]", "barrier no. 8", "unequal batches"),
        seed("other_order", "all_reduce no. 1 of Float [2]", "barrier no. 1", "another order of calls"),
        seed("other_shapes", "all_reduce no. 1 of Float [2]", "all_reduce no. 1 of Float [1]", "different shapes"),
        seed("caught_exception", "all_reduce no. 1", "rank 1 handles an exception (ValueError: bad batch)"),
        seed("dead_worker", "(accelerate.accelerator.reduce)", "workers: pid", "stopped by a signal"),
        seed("dead_rank", "barrier no. 2", "the process of rank 1 is stopped by a signal"),
        seed("sleeping_rank", "barrier no. 1", "rank 1 has stood still", "a sleep"),
        seed("locked_tracker", "barrier no. 1", "rank 0 has stood still", "a lock", slow=False),
        seed("collective_in_main_process_first", "accelerate.accelerator.gather", "barrier no. 1", "rank 0 went past"),
        seed("save_on_main_alone", "CollectiveMisuse: save_state was called by rank 0", "rank 1 did not call it"),
        seed(
            "unused_parameter",
            "all_reduce no. 4 of Float [25]",
            "barrier no. 4",
            "a parameter that not every rank's loss uses",
        ),
        seed(
            "skipped_module",
            "of module 'other'",
            "barrier no. ",
            "a module that not every rank calls (rank 0 in 'other'",
        ),
        seed("sharded_forward", " of Float [10]", "all_gather no. ", "barrier no. "),
        seed("barrier_in_thread", "barrier no. 1 (threading.join)", "all_reduce no. 1 of Float [3]"),
    ],
)
def test_a_seeded_hang_is_reported_with_ranks_lines_and_operations(launch, name, texts):
    ended = launch("../hangs/seeds.py", name, succeeds=False, environment=LIMIT)
    # `save_state` has a separate diagnosis, which is as fast, and raises.
    raises = name == "save_on_main_alone"
    _, waited, report = ("", 0, ended.stderr) if raises else REPORT.search(ended.stderr).groups()
    assert int(waited) <= 2 + 10
    places = lines_of(name)
    assert places and all(text in report for text in (*texts, *places.values())), (places, ended.stderr)
    assert ended.returncode == (1 if raises else HUNG), ended.stderr


@pytest.mark.slow
# Where four ranks reduce other shapes, gloo closes its connections, and all of them fail at once; `save_state` raises before the report.
@pytest.mark.parametrize(
    "name", [seed.__name__ for seed in seeds.SEEDS if seed not in (seeds.other_shapes, seeds.save_on_main_alone)]
)
def test_on_four_ranks_each_is_named_with_its_line(launch, name):
    ended = launch("../hangs/seeds.py", name, processes=4, succeeds=False, environment=LIMIT)
    report = REPORT.search(ended.stderr)[0]
    # Ranks in the same place are one line.
    assert set(re.findall(r"\d", " ".join(re.findall(r"\branks? ([\d, ]+)", report)))) == set("0123"), ended.stderr
    assert all(place in report for place in lines_of(name).values()), ended.stderr


@pytest.mark.slow
def test_ten_slow_programs_raise_no_false_alarm(launch):
    ended = launch("../hangs/healthy.py", environment={"ACCELERATE_HANG_REPORT_AFTER": "2"})
    assert len(re.findall(r"^ok \w+$", ended.stdout, re.M)) == 10
    assert ended.stderr.count("Slow: ") >= 7 and "for rank 1 to join the process group" in ended.stderr
    assert not re.search("Hang|Likely cause", ended.stderr), ended.stderr


# What Python sees of the clock is an hour ahead of what torch sees: so it is in a process whose clock is set back.
CLOCK = "import time\nfor name, hour in ('time', 3600), ('time_ns', 3600 * 10**9):\n"
CLOCK += "    setattr(time, name, lambda now=getattr(time, name), hour=hour: now() + hour)\n"


def test_stacks_of_a_running_job_and_what_it_leaves(tmp_path):
    """Also where the clock is set back while the job runs."""
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    command = [*LAUNCH_ON_CPU, "--num_processes", "2", "--log_dir", str(tmp_path / "logs")]
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **LIMIT, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    cli = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
    job = begun([*command, str(PROGRAMS / "seeds.py"), "early_break"], env=environment)
    until(lambda: list((tmp_path / "logs").rglob("hang.txt")), "a report")
    stacks = done([*cli, "stacks", "--job", str(job.pid)], env=environment)
    assert stacks.stdout.count("-- rank ") == 2, stacks
    assert all(
        f'"{PROGRAMS}/seeds.py", line {place.split(":")[1]}' in stacks.stdout
        for place in lines_of("early_break").values()
    )
    _, err = job.communicate(timeout=60)
    assert job.returncode == HUNG and REPORT.search(err)[1] == "Hang"
    told = done([*cli, "diagnose", str(tmp_path / "logs")], env=environment).stdout
    assert told.count("most recent call first") >= 4, told
    assert told.count("Hang: ") == 1 and told.count("ended itself") == 2, told
    nothing = done([*cli, "diagnose", str(tmp_path / "none")], env=environment)
    assert nothing.returncode == 2 and "--log_dir" in nothing.stderr
