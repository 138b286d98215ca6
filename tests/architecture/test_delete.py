"""The core without its extensions: each folder of `accelerate.extensions` can be deleted with its row of the table."""

import compileall
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate import extension
from architecture import source
from distributed.conftest import done, plain_environment

NAMES = [spec.name for spec in extension.specs()]
# Files of tests/unit that ask for features of extensions by name, which they then lack.
NAME_FEATURES = """
    checkpoint/test_hostile_folders.py checkpoint/test_load.py checkpoint/test_peer_checkpoints.py checkpoint/test_plain_data.py checkpoint/test_save.py
    checkpoint/test_storage.py commands/test_accelerate_cli.py commands/test_hostile_input.py
    commands/test_launch.py commands/test_utils.py config/options/test_table.py config/test_env.py launch/test_config_file.py
    launch/test_example_clusters.py launch/test_example_configs.py launch/test_machines.py launch/test_option_round_trip.py
    launch/test_other_systems.py launch/test_resolve.py launch/test_secrets.py
    strategies/test_guides.py strategies/test_registry.py strategies/test_sharded.py test_accelerator.py
    test_examples.py test_extension.py tools/test_api_reference.py tools/test_pages.py
    training/test_leaks.py training/test_prepare.py training/test_saving.py transformers_patch/test_arguments.py
    transformers_patch/test_callbacks.py transformers_patch/test_checkpoints.py transformers_patch/test_engine.py transformers_patch/test_losses.py
    transformers_patch/test_main.py transformers_patch/test_registry.py transformers_patch/test_throughput.py utils/test_dataclasses.py
    utils/test_memory.py utils/test_modeling.py
"""
TRAIN = """
import sys
import torch
from accelerate import Accelerator

accelerator, model = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2), torch.nn.Linear(4, 1)
loader = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=2, shuffle=True)
schedule = torch.optim.lr_scheduler.StepLR(optimizer := torch.optim.AdamW(model.parameters()), 1)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(batch).pow(2).mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.gather_for_metrics(loss.detach())
weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
accelerator.save_state(sys.argv[1])
torch.nn.init.zeros_(accelerator.unwrap_model(model).weight)
accelerator.load_state(sys.argv[1])
assert all(torch.equal(value, weights[name]) for name, value in accelerator.get_state_dict(model).items())
if hasattr(accelerator, "save_model"):
    accelerator.save_model(model, sys.argv[1] + "-weights")
accelerator.free_memory()
accelerator.end_training()
print("trained on", accelerator.num_processes)
"""


def without(names: list[str], folder: Path) -> Path:
    """Copy the package without some extensions, and return where the copy can be imported from."""
    copy = folder / "src"
    shutil.copytree(source.SRC, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", *()))
    table = copy / "accelerate" / "extensions" / "__init__.py"
    text = table.read_text()
    for name in names:
        shutil.rmtree(copy / "accelerate" / "extensions" / name)
        text, count = re.subn(
            rf'^    "{name}",\n|(?<=\()"{name}",? ?|, "{name}"(?=[,)])', "", text, flags=re.MULTILINE
        )
        assert count == 1, f"{name!r} has {count} rows"
    table.write_text(text)
    return copy


def test_no_file_of_the_core_imports_an_extension():
    wrong = [
        f"{found.source}:{found.line} imports {found.target}"
        for name in source.modules()
        if not name.startswith("accelerate.extensions")
        for found in source.imports(name)
        if found.target.startswith("accelerate.extensions.")
    ]
    assert not wrong, "\n".join(wrong)


def check_core(names: list[str], folder: Path) -> None:
    """Require that the core without some extensions compiles, can be imported, trains, saves, loads and launches."""
    copy = without(names, folder)
    assert compileall.compile_dir(copy, quiet=1)
    stand_ins = {name for name, path in source.modules().items() if "stand_for(__name__" in path.read_text("utf-8")}
    outside = ("accelerate.extensions.", "accelerate.utils.rich")  # which needs a library
    core = [name for name in source.modules() if name not in stand_ins and not name.startswith(outside)]
    (folder / "everything.py").write_text("".join(f"import {name}\n" for name in core))
    (folder / "train.py").write_text(TRAIN)
    environment = plain_environment(folder, PYTHONPATH=str(copy), OMP_NUM_THREADS="1")

    def runs(*command: str) -> str:
        ended = done([sys.executable, *command], cwd=folder, env=environment)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    runs("everything.py")
    assert "trained on 1" in runs("train.py", "one")
    launch = ("-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "2", "train.py")
    assert "trained on 2" in runs(*launch, "two")


def test_the_core_works_without_any_extension(tmp_path):
    check_core(NAMES, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_core_works_without_one_extension(name, tmp_path):
    check_core([name], tmp_path)


@pytest.mark.slow
def test_the_core_passes_its_tests_without_any_extension(tmp_path):
    copy = without(NAMES, tmp_path)
    files = [source.ROOT / "tests" / "unit" / file for file in NAME_FEATURES.split()]
    assert all(file.exists() for file in files), "remove files that have moved"
    ignored = [f"--ignore={file}" for file in files]
    marks = ["-m", "not slow and not gpu", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *marks, *ignored, "tests/unit"]
    # Real interpreters: processes that start warm have imported the complete package.
    environment = plain_environment(tmp_path, PYTHONPATH=str(copy), OMP_NUM_THREADS="1", WARM="0")
    ended = subprocess.run(command, cwd=source.ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-6000:]
