"""The pull requests for accelerate and transformers, proved on upstream's own sources, on one and two processes.

Needed: the unpacked sources in `.cache/upstream` (`make test-upstream` fetches them; another folder: `UPSTREAM_SOURCES_DIR=DIR`).
What is not there is skipped. The sources stand before this package on PYTHONPATH, and every program says what it ran.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.interop]
ROOT = Path(__file__).parents[2]
SOURCES = Path(os.environ.get("UPSTREAM_SOURCES_DIR", ROOT / ".cache" / "upstream"))
# An older transformers runs in a separate environment.
ENVIRONMENTS = {"transformers-4.57.6": ROOT / ".venv-transformers-4.57.6" / "bin" / "python"}
NEWEST = "accelerate-1.15.0"
ACCELERATES = ["accelerate-1.12.0", NEWEST]
# Releases whose layers and loop the losses' patches are written for.
RECENT = ["transformers-5.23.0", "transformers-5.24.0"]
TRANSFORMERS = ["transformers-4.57.6", *RECENT]
# The second pull request for transformers: a release, and the name that the exporter knows the patch by.
TRAINERS = [f"{release} trainer-checkpoints" for release in TRANSFORMERS]
# The third one, whose fault is another one in older releases.
LOSSES = [f"{release} auxiliary-loss" for release in RECENT]
# The fourth one, of the tensor parallelism that 5.x loads models with.
TENSOR_PARALLEL = [f"{release} tensor-parallel-losses" for release in RECENT]
# The file that each patch adds its tests in, and how many there are.
TESTS = {
    "accelerate": ("tests/test_double_prepare.py", 20),
    "transformers": ("tests/trainer/test_accelerator_state.py", 12),
    "trainer-checkpoints": ("tests/trainer/test_trainer_staging.py", 12),
    "auxiliary-loss": ("tests/trainer/test_trainer_auxiliary_loss.py", 4),
    "tensor-parallel-losses": ("tests/trainer/test_tensor_parallel_losses.py", 3),
}
IDENTITY = ["-c", "user.name=Applier", "-c", "user.email=applier@example.org", "-c", "commit.gpgsign=false"]
AUTHOR, DATE = "Ada Lovelace <ada@example.org>", "2026-01-31T12:00:00+00:00"
LIMIT_S = 400
# Threads of the gloo backend abort a process that is being torn down now and then, with plain torch as well.
ABORTED = "terminate called without an active exception"
# A model that is evaluated first and trained then; shown in docs/upstream/double-prepare.md, with what it printed.
EVALUATED_FIRST = """\
import json, os
import accelerate, torch
from accelerate import Accelerator

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
network = torch.nn.Linear(3, 1)
accelerator.prepare_model(network, evaluation_mode=True)
model = accelerator.prepare(network)
inputs = torch.full((2, 3), 1.0 + accelerator.process_index)
accelerator.backward(model(inputs).sum())
gradients = accelerator.gather(network.weight.grad[:, :1]).flatten().tolist()
if accelerator.is_main_process:
    seen = {"version": accelerate.__version__, "file": accelerate.__file__, "model": type(model).__name__}
    print(json.dumps({**seen, "listed": len(accelerator._models), "gradients": gradients}), flush=True)
accelerator.wait_for_everyone()
os._exit(0)
"""
# Ordinary programs: nothing is prepared twice in them, so nothing may change.
ORDINARY = """\
import json, os, sys, warnings
import accelerate, torch
from torch import nn
from accelerate import Accelerator
from accelerate.utils import set_seed

def train(accelerator, figures):
    set_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=3, shuffle=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            figures.append(accelerator.gather(loss.detach()[None]).tolist())
    figures.append([len(loader), scheduler.get_last_lr()[0], type(model).__name__])

def one_by_one(accelerator, figures):
    set_seed(3)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model), accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    folder = os.path.join(sys.argv[1], "state")
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    figures.append([value.tolist() for value in accelerator.get_state_dict(model).values()])

figures = []
warnings.filterwarnings("error", message=".*prepared.*")
accelerator = Accelerator(cpu=True, mixed_precision=sys.argv[2], gradient_accumulation_steps=2)
for program in (train, one_by_one):
    program(accelerator, figures)
    accelerator.free_memory()
if accelerator.is_main_process:
    print(json.dumps({"file": accelerate.__file__, "figures": figures}), flush=True)
accelerator.wait_for_everyone()
os._exit(0)
"""
# Shown in docs/upstream/state-reset.md, with what it printed.
REPRODUCTION = """\
import json, sys
import torch
import accelerate, transformers
from accelerate import Accelerator
from transformers import TrainingArguments

accelerator = Accelerator(cpu=True)
if accelerator.is_main_process:
    print(json.dumps({"accelerate": accelerate.__version__, "transformers": transformers.__version__}), flush=True)
before = accelerator.state.distributed_type
arguments = TrainingArguments(output_dir=sys.argv[1], use_cpu=True, report_to=[])
assert accelerator.state.distributed_type == before
rank = torch.tensor([accelerator.process_index])
assert accelerator.gather(rank).tolist() == list(range(accelerator.num_processes))
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    print(json.dumps({"processes": accelerator.num_processes, "arguments": arguments.world_size}), flush=True)
torch.distributed.destroy_process_group()
"""

# A Trainer that is killed in a save, and started again; docs/upstream/trainer-checkpoints.md says what was seen.
INTERRUPTED = """\
import glob, json, os, signal, sys
import torch, transformers
from transformers import Trainer, TrainingArguments

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x, labels):
        return {"loss": ((self.weight * x - labels) ** 2).mean()}

class Killed(Trainer):
    left = None

    def write(self, save, *args):
        if self.state.global_step == 4 and self.left is not None:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        save(*args)

    def _save_optimizer_and_scheduler(self, output_dir):
        self.write(super()._save_optimizer_and_scheduler, output_dir)

    def _save_scaler(self, output_dir):
        self.write(super()._save_scaler, output_dir)

    def _save_rng_state(self, output_dir):
        self.write(super()._save_rng_state, output_dir)

    def store_flos(self):
        # The state is what is written next.
        super().store_flos()
        save = self.state.save_to_json
        self.state.save_to_json = lambda path: (vars(self.state).pop("save_to_json"), self.write(save, path))

folder = sys.argv[1]
rows = [{"x": torch.tensor([1.0 + i]), "labels": torch.tensor([3.0])} for i in range(12)]

def run(place, kill=None, resume=False):
    arguments = TrainingArguments(
        place, use_cpu=True, report_to=[], disable_tqdm=True, max_steps=6, save_steps=2, learning_rate=0.1,
        per_device_train_batch_size=1, logging_strategy="no",
    )
    trainer = Killed(Line(), arguments, train_dataset=rows)
    trainer.left = kill
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model.weight.item()

MOMENTS, ended, errors = 4, [], []
for moment in range(MOMENTS):
    place = os.path.join(folder, str(moment))
    if not os.fork():
        run(place, kill=moment)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL
straight = run(os.path.join(folder, "straight"))
for moment in range(MOMENTS):
    place = os.path.join(folder, str(moment))
    try:
        ended.append(run(place, resume=True) == straight)
        assert sorted(os.listdir(place)) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"], os.listdir(place)
    except Exception as error:
        errors.append(type(error).__name__)
print(json.dumps({"file": transformers.__file__, "ended as the one that was not killed": ended, "errors": errors}))
"""
# An ordinary run of the Trainer on each rank: with the patch it leaves the same files with the same bytes.
TRAINED = """\
import hashlib, json, os, sys
import torch, transformers
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.layers(x), labels)}

os.chdir(sys.argv[1])
transformers.set_seed(3)
rows = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(16)]
options = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "max_steps": 8, "save_total_limit": 2}
options |= {"load_best_model_at_end": True, "use_cpu": True, "report_to": [], "disable_tqdm": True, "ddp_backend": "gloo"}
figures, rank = [], int(os.environ.get("RANK", 0))
for folder, more in (("plain", {}), ("weights", {"save_only_model": True}), ("each", {"save_on_each_node": True})):
    arguments = TrainingArguments(folder, **options, **more)
    trainer = Trainer(Net(), arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    figures.append([trainer.state.best_model_checkpoint, get_last_checkpoint(folder)])
    figures.append([value.tolist() for value in trainer.model.state_dict().values()])
    trainer.accelerator.wait_for_everyone()
if not rank:
    for path, _, names in sorted(os.walk(".")):
        for name in sorted(names):
            with open(os.path.join(path, name), "rb") as file:
                data = file.read()
            if name == "trainer_state.json":
                state = json.loads(data)
                for entry in state["log_history"]:
                    for key in [key for key in entry if "runtime" in key or "second" in key]:
                        del entry[key]
                data = json.dumps(state).encode()
            # The arguments have the time of day in them.
            figures.append([path, name, name == "training_args.bin" or hashlib.sha256(data).hexdigest()])
    print(json.dumps({"file": transformers.__file__, "figures": figures}), flush=True)
trainer.accelerator.wait_for_everyone()
os._exit(0)
"""
# How often the auxiliary loss of experts counts in the Trainer's loss, and what a model without experts logs;
# docs/upstream/auxiliary-loss.md has what it printed.
COUNTED = """\
import json, os, sys
import torch, transformers
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

WEIGHT, WINDOWS = 0.02, (1, 2, 4)
sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}

def run(model, rows, window, **options):
    parallel = {"ddp_backend": "gloo"} if "RANK" in os.environ else {}
    arguments = TrainingArguments(
        sys.argv[1], use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1, optim="sgd",
        per_device_train_batch_size=1, per_device_eval_batch_size=1, gradient_accumulation_steps=window, **parallel, **options,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    steps = [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]
    return steps, trainer.evaluate()["eval_loss"]

torch.manual_seed(0)
ids = torch.randint(3, 32, (16, 12))
rows = [{"input_ids": row, "labels": row} for row in ids]
mixtral = MixtralForCausalLM(MixtralConfig(**sizes, **experts, router_aux_loss_coef=WEIGHT))
with torch.no_grad():
    output = mixtral(input_ids=ids[:1], labels=ids[:1])
auxiliary = WEIGHT * output.aux_loss.item()

def times(loss):
    return round((loss - output.loss.item()) / auxiliary + 1, 3)

training = []
for window in WINDOWS:
    steps, evaluated = run(mixtral, rows[:1] * 16, window, max_steps=1, learning_rate=0.0)
    training.append(times(steps[0][0]))
llama = run(LlamaForCausalLM(LlamaConfig(**sizes)), rows, 2, max_steps=4, learning_rate=0.1)
if os.environ.get("RANK", "0") == "0":
    seen = {"file": transformers.__file__, "training": training, "evaluation": times(evaluated), "without experts": llama}
    print(json.dumps(seen), flush=True)
if torch.distributed.is_initialized():
    torch.distributed.barrier()
os._exit(0)
"""


@dataclass(frozen=True)
class Release:
    """One release: its unpacked source, the same with the patch applied, and the exported folder."""

    name: str
    patch: str
    source: Path
    patched: Path
    exported: Path

    @property
    def package(self):
        return self.name.partition("-")[0]

    @property
    def version(self):
        return self.name.partition("-")[2]

    def run(self, tree, *program, processes=0, accelerate=SOURCES / NEWEST):
        """Run Python on a tree, and transformers on an accelerate, upstream's; `processes` under torch's launcher, 0 without."""
        trees = [tree, *([accelerate] if self.package == "transformers" else [])]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
        variables = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        variables |= {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": os.pathsep.join(str(tree / "src") for tree in trees)}
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command = [str(ENVIRONMENTS.get(self.name, sys.executable)), *(launcher if processes else []), *program]
        for _ in range(3):
            done = subprocess.run(command, env=kept | variables, capture_output=True, text=True, timeout=LIMIT_S)
            if ABORTED not in done.stderr:
                break
        return done

    def figures(self, tree, *program, **options):
        """Return what a program prints on a tree, after a check that it ran on this tree."""
        done = self.run(tree, *program, **options)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        found = printed(done)
        assert Path(found.pop("file", tree)).is_relative_to(tree)
        return found


def printed(done):
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    return {name: value for line in lines for name, value in line.items()}


def git(folder, *command):
    done = subprocess.run(["git", *IDENTITY, *command], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def release(request, tmp_path_factory):
    """Export the pull request for one release, and apply it in a separate repository with `git am`."""
    name, _, patch_name = request.param.partition(" ")
    for needed in (SOURCES / name, SOURCES / NEWEST, ENVIRONMENTS.get(name, Path(sys.executable))):
        if not needed.exists():
            pytest.skip(f"{needed} is not there; `make test-upstream` makes it")
    folder = tmp_path_factory.mktemp(name)
    found = Release(name, patch_name, SOURCES / name, folder / "patched", folder / "out")
    words = ["--package", found.package, "--source", str(found.source), "--out", str(found.exported)]
    words += ["--patch", patch_name] if patch_name else []
    command = [sys.executable, str(ROOT / "tools/upstream_patches"), *words, "--author", AUTHOR, "--date", DATE]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shutil.copytree(found.source, found.patched)
    git(found.patched, "init", "--quiet")
    git(found.patched, "add", "--all", "--force")
    git(found.patched, "commit", "--quiet", "-m", "as it was released")
    (patch,) = found.exported.glob("0001-*.patch")
    git(found.patched, "apply", "--check", "--whitespace=error", str(patch))
    git(found.patched, "am", "--quiet", str(patch))
    removed = git(found.patched, "diff", "--numstat", "HEAD~1").split()[1::3]
    assert removed == ["0"] * (4 if patch_name == "trainer-checkpoints" else 3), "it only adds lines"
    return found


def of(*names):
    return pytest.mark.parametrize("release", names, indirect=True)


@pytest.fixture
def script(tmp_path):
    def write(text):
        (tmp_path / "program.py").write_text(text, "utf-8")
        return str(tmp_path / "program.py")

    return write


@of(*ACCELERATES, *TRANSFORMERS[1:], *TRAINERS[1:], *LOSSES, *TENSOR_PARALLEL)
def test_the_page_shows_the_lines_of_the_patch(release):
    name = release.patch or {"accelerate": "double-prepare", "transformers": "state-reset"}[release.package]
    (patch,) = release.exported.glob("0001-*.patch")
    page = release.exported / "page.md"
    shutil.copy(ROOT / "docs/upstream" / f"{name}.md", page)
    subprocess.run(
        [sys.executable, str(ROOT / "tools/upstream_patches/excerpt.py"), str(patch), str(page)], check=True
    )
    assert page.read_text("utf-8") == (ROOT / "docs/upstream" / f"{name}.md").read_text("utf-8")


@of(*ACCELERATES, *TRANSFORMERS, *TRAINERS, *LOSSES, *TENSOR_PARALLEL)
def test_the_exported_tests_pass_on_the_patched_package_alone(release):
    path, count = TESTS[release.patch or release.package]
    words = ["-m", "unittest", "discover", "-p", Path(path).name, "-s"]
    if release.package == "accelerate":
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    target = release.exported / path
    program = [*words, str(target if release.package == "accelerate" else target.parent)]
    after, before = release.run(release.patched, *program), release.run(release.source, *program)
    assert after.returncode == 0 and "skipped" not in after.stdout + after.stderr, after.stdout[-8000:] + after.stderr
    assert re.search(rf"\b[1-9]\d* passed|Ran {count} tests", after.stdout + after.stderr)
    assert before.returncode != 0


@of(*ACCELERATES)
@pytest.mark.parametrize("processes", [1, 2])
def test_preparing_twice(release, processes):
    def numbers(tree):
        program = str(ROOT / "examples" / "prepare_twice.py")
        # Torch's launcher makes a process group of one process, too.
        done = release.run(tree, program, "--double-prepare", processes=processes if processes > 1 else 0)
        # Rank 0 has printed everything before a process is torn down.
        assert done.returncode == 0 or ABORTED in done.stderr, done.stderr
        found = {key.strip(): value for key, value in re.findall(r"^([^:\n]+): (.*)$", done.stdout, re.M)}
        return {**found, "all": done.stdout}

    before, after = numbers(release.source), numbers(release.patched)
    calls = {f"state_dict calls, {what}_state": f"{[1] * processes} (one number a rank)" for what in ("save", "load")}
    wanted = {"warnings": "3", "models in the registry": "1", "distinct wrappers": "1", **calls}
    wanted["wrappers around the module"] = str(processes - 1)
    assert {key: after[key] for key in wanted} == wanted
    assert re.search(r"^the warning, at prepare_twice\.py:\d+: This model .* already prepared", after["all"], re.M)
    assert before["warnings"] == "0"
    if processes > 1:
        assert before["models in the registry"] == "4" and int(before["distinct wrappers"]) > 1


@of(*ACCELERATES)
def test_evaluated_first_then_trained(release, script):
    program = script(EVALUATED_FIRST)
    before = release.figures(release.source, program, processes=2)
    after = release.figures(release.patched, program, processes=2)
    wanted = {"model": "DistributedDataParallel", "listed": 1, "gradients": [3.0, 3.0]}
    assert after == {"version": release.version, **wanted}
    # 1.12.0 lists the model twice; 1.15.0 leaves it without a wrapper, and each process keeps its own gradients.
    assert (before["model"], before["listed"], before["gradients"]) == {
        "1.12.0": ("DistributedDataParallel", 2, [3.0, 3.0]),
        "1.15.0": ("Linear", 1, [2.0, 4.0]),
    }[release.version]


@of(*ACCELERATES)
@pytest.mark.parametrize("processes, precision", [(1, "no"), (2, "bf16")])
def test_ordinary_programs_are_the_same(release, script, tmp_path, processes, precision):
    program = script(ORDINARY)
    trees = (release.source, release.patched)
    runs = [(tree, program, str(tmp_path / tree.name), precision) for tree in trees]
    before, after = (release.figures(*words, processes=processes if processes > 1 else 0) for words in runs)
    assert before == after and len(before["figures"]) == 16 // processes + 2  # of two epochs, and the ends


@of(*TRANSFORMERS)
@pytest.mark.parametrize("processes", [1, 2])
def test_arguments_keep_the_state_once_patched(release, script, tmp_path, processes):
    program = [script(REPRODUCTION), str(tmp_path / "arguments")]
    versions = {"accelerate": "1.15.0", "transformers": release.version}
    kept = release.figures(release.patched, *program, processes=processes)
    assert kept == {**versions, "processes": processes, "arguments": processes}
    lost = release.run(release.source, *program, processes=processes)
    assert lost.returncode != 0 and "AttributeError" in lost.stderr and "distributed_type" in lost.stderr
    assert printed(lost) == versions


@of(*TRAINERS)
def test_a_trainer_killed_in_a_save_goes_on(release, script, tmp_path):
    def numbers(tree):
        folder = tmp_path / tree.name
        return release.figures(tree, script(INTERRUPTED), str(folder))

    before, after = numbers(release.source), numbers(release.patched)
    assert before == {"ended as the one that was not killed": [], "errors": ["FileNotFoundError"] * 4}
    assert after == {"ended as the one that was not killed": [True] * 4, "errors": []}


@of(*TRAINERS)
@pytest.mark.parametrize("processes", [1, 2])
def test_ordinary_runs_of_the_trainer_leave_the_same_files(release, script, tmp_path, processes):
    def numbers(tree):
        folder = tmp_path / tree.name
        folder.mkdir()
        return release.figures(tree, script(TRAINED), str(folder), processes=processes)

    before, after = numbers(release.source), numbers(release.patched)
    assert before == after and len(before["figures"]) > 20


@of(*LOSSES)
@pytest.mark.parametrize("processes", [1, 2])
def test_the_auxiliary_loss_counts_once(release, script, tmp_path, processes):
    program = [script(COUNTED), str(tmp_path / "arguments")]
    before, after = (
        release.figures(tree, *program, processes=processes) for tree in (release.source, release.patched)
    )
    assert before["training"] == pytest.approx([processes * window for window in (1, 2, 4)], abs=2e-3)
    assert before["evaluation"] == pytest.approx(processes, abs=2e-3)
    assert [*after["training"], after["evaluation"]] == pytest.approx([1.0] * 4, abs=2e-3)
    assert before["without experts"] == after["without experts"] and len(after["without experts"][0]) == 4


@of(*TENSOR_PARALLEL)
def test_losses_and_norms_under_tensor_parallelism_are_those_of_one_process(release, tmp_path):
    """With this repository's accelerate: upstream's has no tensor parallelism on the CPU."""
    alone, accumulated, plain = cases = ["llama arrived-tp, counted alone", "qwen arrived-tp", "llama arrived-tp"]
    program = [str(ROOT / "tests/interop/scripts/trainer_losses.py"), str(tmp_path / "arguments"), "stock", *cases]
    before, after = (
        release.figures(tree, *program, processes=2, accelerate=ROOT)["stock"]
        for tree in (release.source, release.patched)
    )
    assert before[alone][:3] == pytest.approx([2.0] * 3, abs=1e-4) and before[accumulated][-1] > 1e-4
    assert {case: worst for case, (*_, worst) in after.items() if worst > 1e-6} == {}
    assert before[plain] == after[plain]
