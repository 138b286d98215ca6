"""The reports on precision and on memory, on one process."""

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.config.enums import FP8BackendType
from accelerate.extensions.reports.memory import cached, memory_report
from accelerate.extensions.reports.precision import precision_report
from precision_table import Net, check, rows


@pytest.mark.parametrize("row", list(rows("none")), ids=lambda row: f"{row['mixed_precision']} {row['loaded in']}")
def test_the_table_of_the_guide(row):
    check(Accelerator(cpu=True, mixed_precision=row["mixed_precision"]), row)


@pytest.fixture
def trained():
    """A model after one step, with its Accelerator."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 16)).sum())
    optimizer.step()
    return accelerator, model


def test_it_prints_as_a_table(trained):
    accelerator, model = trained
    lines = str(accelerator.precision_report(model)).splitlines()
    assert lines[0] == "Net: strategy none, mixed_precision='bf16'"
    assert lines[3].split() == ["trainable", "parameters", "float32", "float32", "816", "3.2", "KiB", "3.2", "KiB"]
    assert lines[-1].split() == ["optimizer", "state", "-", "float32", "1,632", "6.4", "KiB", "6.4", "KiB"]
    with pytest.raises(TypeError, match="got 3"):
        accelerator.precision_report(3)


def test_contradictions_are_warnings(trained):
    accelerator, model = trained
    report = accelerator.precision_report(accelerator.prepare(nn.Linear(2, 2).to(torch.bfloat16)))
    assert report.dtype_of("gradients") == "bfloat16" and report.dtype_of("optimizer state") == "-"
    assert report.warnings == 2 and "pure bfloat16 training, without float32 master weights" in report.notes[0]
    assert "\nwarning: mixed_precision='bf16' asked for, but 2 trainable" in str(report)
    model.more = nn.Parameter(torch.ones(1))
    report = accelerator.precision_report(model)
    assert report.warnings == 1 and "1 of 5 trainable parameters are in no prepared optimizer" in report.notes[0]


@pytest.mark.parametrize("layers", [0, 3])
def test_layers_in_fp8(monkeypatch, layers):
    from accelerate.extensions.fp8.fp8 import ENGINES

    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(nn.Linear(2, 2))
    monkeypatch.setattr(type(ENGINES[FP8BackendType.AO]), "converted", lambda self, model: layers)
    report = precision_report(model, [], "fp8", FP8BackendType.AO)
    assert report.warnings == (not layers) and ("torchao computes no layer" in str(report)) == (not layers)
    assert report.dtype_of("forward of 3 torchao layers") == ("float8" if layers else "-")


def test_memory_is_counted_exactly_and_shared_memory_once(trained):
    accelerator, model = trained
    model.tied = nn.Parameter(model.last.weight.detach())  # another parameter over the same memory
    report = accelerator.memory_report()
    (row,) = report.rows
    assert row.parameters == (816 + 528) * 4 and row.buffers == 12 and row.gradients == 816 * 4
    assert row.optimizer == 816 * 4 * 2 + 4 * 4  # two moments, and a counter of four bytes for each parameter
    assert row.activations is None and row.peak > 2**20
    assert "not measured" in str(report)


def test_a_device_with_an_allocator(monkeypatch):
    monkeypatch.setattr(torch.mtia, "max_memory_allocated", lambda device: 1000, raising=False)
    made = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda data, dtype, device: made(data, dtype=dtype))
    report = memory_report([nn.Linear(2, 2)], [], torch.device("mtia"), lambda numbers: numbers)
    assert (report.rows[0].peak, report.rows[0].activations) == (1000, 1000)  # the model is on the CPU
    assert "torch.mtia.reset_peak_memory_stats()" in str(report)
    monkeypatch.setattr(torch.mtia, "memory_reserved", lambda device: 900, raising=False)
    monkeypatch.setattr(torch.mtia, "memory_allocated", lambda device: 400, raising=False)
    assert cached(torch.device("mtia")) == 500 and cached(torch.device("cpu")) == 0
