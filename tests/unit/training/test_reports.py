"""The reports on precision and on memory, on one process."""

import gc
import types

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.config.enums import FP8BackendType
from accelerate.config.handlers import AutocastKwargs
from accelerate.precision.footprint import no_sync_memory_note
from accelerate.training import memory
from accelerate.training.reports import measure_activations, memory_report, precision_report
from precision_table import Net, check, rows


@pytest.mark.parametrize("row", list(rows("none")), ids=lambda row: f"{row['mixed_precision']} {row['loaded in']}")
def test_the_table_of_the_guide(row):
    check(Accelerator(cpu=True, mixed_precision=row["mixed_precision"]), row)


def test_the_table_has_every_strategy():
    assert [sum(1 for _ in rows(name)) for name in ("none", "ddp", "fsdp1", "fsdp2")] == [4, 4, 4, 4]


@pytest.fixture
def trained():
    """A model after one step, with its Accelerator and optimizer."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 16)).sum())
    optimizer.step()
    return accelerator, model, optimizer


def test_it_prints_as_a_table(trained):
    accelerator, model, _ = trained
    lines = str(precision_report(accelerator, model)).splitlines()
    assert lines[0] == "Net: strategy none, mixed_precision='bf16'"
    assert lines[3].split() == ["trainable", "parameters", "float32", "float32", "816", "3.2", "KiB", "3.2", "KiB"]
    assert lines[-1].split() == ["optimizer", "state", "-", "float32", "1,632", "6.4", "KiB", "6.4", "KiB"]


def test_something_that_is_no_model():
    with pytest.raises(TypeError, match="got 3"):
        precision_report(Accelerator(cpu=True), 3)


def test_an_untrained_model_tells_what_will_come():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    report = precision_report(accelerator, accelerator.prepare(nn.Linear(2, 2)))
    assert report.dtype_of("gradients") == "float32" and report.dtype_of("optimizer state") == "-"
    assert not report.notes


def test_pure_bfloat16_under_mixed_precision_is_a_contradiction():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    report = precision_report(accelerator, accelerator.prepare(nn.Linear(2, 2).to(torch.bfloat16)))
    assert report.warnings == 1 and "pure bfloat16 training, without float32 master weights" in report.notes[0]
    assert "\nwarning: mixed_precision='bf16' asked for, but 2 trainable" in str(report)


def test_pure_bfloat16_that_was_asked_for_is_a_note():
    accelerator = Accelerator(cpu=True)
    report = precision_report(accelerator, accelerator.prepare(nn.Linear(2, 2).to(torch.bfloat16)))
    assert report.warnings == 0 and "\nnote: pure bfloat16 training" in str(report)


def test_autocast_that_is_switched_off():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    report = precision_report(accelerator, accelerator.prepare(nn.Linear(2, 2)))
    assert report.dtype_of("forward") == "float32"
    assert report.warnings == 1 and "AutocastKwargs(enabled=False)" in report.notes[0]


def test_parameters_that_no_optimizer_has(trained):
    accelerator, model, _ = trained
    model.more = nn.Parameter(torch.ones(1))
    report = precision_report(accelerator, model)
    assert report.warnings == 1 and "1 of 5 trainable parameters are in no prepared optimizer" in report.notes[0]


def test_fp8_without_a_layer(monkeypatch):
    from accelerate.precision.fp8 import ENGINES

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(2, 2))
    run = types.SimpleNamespace(mixed_precision="fp8", fp8_backend=FP8BackendType.AO, _optimizers=[], ddp_handler=None)
    monkeypatch.setattr(type(ENGINES[FP8BackendType.AO]), "converted", lambda self, model: 0)
    report = precision_report(run, model)
    assert report.warnings == 1 and "torchao computes no layer" in report.notes[0]
    monkeypatch.setattr(type(ENGINES[FP8BackendType.AO]), "converted", lambda self, model: 3)
    report = precision_report(run, model)
    assert report.warnings == 0 and report.dtype_of("forward of 3 torchao layers") == "float8"


def test_memory_is_counted_exactly_and_shared_memory_once(trained):
    accelerator, model, _ = trained
    model.tied = nn.Parameter(model.last.weight.detach())  # another parameter over the same memory
    (row,) = memory_report(accelerator).rows
    assert row.parameters == (816 + 528) * 4 and row.buffers == 12 and row.gradients == 816 * 4
    assert row.optimizer == 816 * 4 * 2 + 4 * 4  # two moments, and a counter of four bytes for each parameter
    assert row.held == row.parameters + row.buffers + row.gradients + row.optimizer
    assert row.activations is None and row.peak > 2**20


def test_what_was_not_measured_is_not_invented(trained):
    text = str(memory_report(trained[0]))
    assert "not measured" in text and "measure_activations()" in text


def test_activations_are_what_autograd_keeps():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))
    with measure_activations(accelerator):
        for _ in range(3):  # one graph at a time
            loss = model(torch.ones(2, 4)).pow(2).sum()
            accelerator.backward(loss)
            del loss
    inputs, hidden, output = 2 * 4 * 4, 2 * 8 * 4, 2 * 4 * 4
    assert memory_report(accelerator).rows[0].activations == inputs + hidden + output
    gc.collect()
    with measure_activations(accelerator):
        held = [model(torch.ones(2, 4)).pow(2).sum() for _ in range(3)]
    assert accelerator._activations_peak == 3 * (inputs + hidden + output) and held


def test_a_device_with_an_allocator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000)
    cuda = torch.device("cuda", 0)
    peak, left, meaning = memory._peak(cuda, {(cuda, 1, 300), (torch.device("cpu"), 2, 400)})
    assert (peak, left) == (1000, 700) and "torch.cuda.reset_peak_memory_stats()" in meaning


def test_only_shards_have_a_note_on_no_sync():
    assert no_sync_memory_note(nn.Linear(4, 4)) == ""
