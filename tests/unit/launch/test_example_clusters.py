"""The files of ``examples/clusters/``: what a scheduler would run is a launch that resolves, and status 75 is started again."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from accelerate.extensions.dry_run.text import show
from accelerate.launch import hardware
from accelerate.launch.resolve import resolve

CLUSTERS = Path(__file__).parents[3] / "examples" / "clusters"
# As Slurm sets them for the second task of `srun` with one task on each of four nodes.
STEP = {
    "SLURM_DISTRIBUTION": "cyclic", "SLURM_GTIDS": "1", "SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_JOB_NUM_NODES": "4",
    "SLURM_LOCALID": "0", "SLURM_NNODES": "4", "SLURM_NODEID": "1", "SLURM_NODELIST": "n[1-4]", "SLURM_NTASKS": "4", "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-4]", "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_TASKS_PER_NODE": "1(x4)", "SLURMD_NODENAME": "n2",
}  # fmt: skip


@pytest.fixture
def planned(parse, gpus, place, monkeypatch):
    """Resolve the words after `accelerate launch` on a machine with eight GPUs; return the plan and its description."""
    gpus(8)
    monkeypatch.setattr(hardware, "usable_cores", lambda: 64)
    (place / "examples").symlink_to(CLUSTERS.parent)

    def plan(words, environ):
        resolved = resolve(parse(" ".join(words)), environ)
        return resolved, show(resolved, environ)

    return plan


@pytest.mark.parametrize("name", ["slurm_ddp", "slurm_hsdp"])
def test_a_job_of_slurm_is_32_processes_on_4_nodes_that_go_on_after_status_75(name, planned):
    path = CLUSTERS / f"{name}.sbatch"
    text = path.read_text("utf-8")
    subprocess.run(["bash", "-n", path], check=True)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.M))
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-node"]) == ("4", "1", "8")
    assert "#SBATCH --requeue" in text and asked["open-mode"] == "append" and asked["signal"] == "USR1@300"
    assert re.search(r'-eq 75 \]; then\n\s+scontrol requeue "\$SLURM_JOB_ID"', text)
    command = re.search(r"^srun accelerate launch ((?:.*\\\n)*.*)", text, re.M)[1].replace("\\\n", " ")
    for variable, value in {"$SLURM_JOB_NUM_NODES": "4", "$out": "/shared/out"}.items():
        command = command.replace(variable, value)
    plan, said = planned(shlex.split(command), STEP)
    assert (plan.num_processes, plan["num_machines"], plan["machine_rank"]) == (32, 4, 1), said
    assert plan.rendezvous.host == "n1"
    if name == "slurm_hsdp":
        assert "PARALLELISM_CONFIG_DP_REPLICATE_SIZE=4" in said and "PARALLELISM_CONFIG_DP_SHARD_SIZE=8" in said


def test_pods_of_the_job_are_machines_and_status_75_counts_as_no_failure(planned):
    service, job = yaml.safe_load_all((CLUSTERS / "kubernetes_job.yaml").read_text("utf-8"))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # Each pod has a name that the others find: <job>-<index>.<service>.
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["publishNotReadyAddresses"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 2
    # What a podFailurePolicy needs, and what it says.
    assert pod["restartPolicy"] == "Never" and spec["podReplacementPolicy"] == "Failed"
    by_status = {
        status: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        for status in rule.get("onExitCodes", {}).get("values", [])
    }
    assert by_status == {75: "Ignore", 2: "FailJob"}
    assert {
        rule["onExitCodes"]["containerName"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    } == {container["name"]}
    (line,) = container["args"]
    words = shlex.split(line.replace("$JOB_COMPLETION_INDEX", "1"))
    assert words[:3] == ["exec", "accelerate", "launch"]
    plan, said = planned(words[3:], {})
    assert (plan.num_processes, plan["num_machines"], plan["machine_rank"]) == (16, 2, 1), said
    assert plan.rendezvous.host == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert {port["containerPort"] for port in container["ports"]} == {plan.rendezvous.port}


def test_the_job_fits_the_schema_of_kubernetes():
    validate = pytest.importorskip("kubernetes_validate").validate
    for document in yaml.safe_load_all((CLUSTERS / "kubernetes_job.yaml").read_text("utf-8")):
        validate(document, "1.31", strict=True)
        broken = {**document, "spec": {**document["spec"], "unknownField": 1}}
        with pytest.raises(Exception, match="unknownField"):
            validate(broken, "1.31", strict=True)


def test_the_image_has_what_the_job_starts():
    lines = (CLUSTERS / "Dockerfile").read_text("utf-8").splitlines()
    root = CLUSTERS.parents[1]
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert all((root / word).exists() for word in copied), copied
    assert {"src", "examples", "setup.py", "constraints.txt"} <= set(copied)
    assert lines[-1].startswith("CMD")
