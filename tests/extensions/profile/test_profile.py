"""Profiles and memory snapshots."""

from types import SimpleNamespace

import pytest
import torch

from accelerate import Accelerator, ProfileKwargs


def test_profile_builds_torchs_profiler():
    traces = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 1},
        on_trace_ready=traces.append,
        record_shapes=True,
        with_flops=True,
    )
    profiler = handler.build()
    assert list(profiler.activities) == [torch.profiler.ProfilerActivity.CPU]
    assert (profiler.record_shapes, profiler.with_flops, profiler.with_stack) == (True, True, False)
    assert profiler.on_trace_ready == traces.append
    assert profiler.schedule(2) is torch.profiler.ProfilerAction.RECORD_AND_SAVE
    with pytest.raises(ValueError, match="Invalid profiler activity: 'tpu'.*cpu.*cuda"):
        ProfileKwargs(activities=["cpu", "tpu"]).build()


def test_profile_writes_a_trace(tmp_path):
    accelerator = Accelerator(cpu=True)
    with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))) as profiler:
        torch.ones(2) + 1
    assert profiler.key_averages()
    assert (tmp_path / "profile_0.json").stat().st_size > 0


@pytest.mark.parametrize("given", [True, "folder"])
def test_a_memory_snapshot_is_written_even_after_an_error(monkeypatch, tmp_path, given):
    calls = []
    memory = SimpleNamespace(
        _record_memory_history=lambda **options: calls.append(options), _dump_snapshot=lambda path: calls.append(path)
    )
    monkeypatch.setattr(torch.cpu, "memory", memory, raising=False)
    trace = str(tmp_path / "trace") if given is True else None
    folder = trace or str(tmp_path / given)
    handler = ProfileKwargs(output_trace_dir=trace, memory_snapshot=given if given is True else folder)
    with pytest.raises(MemoryError), Accelerator(cpu=True).profile(handler):
        raise MemoryError
    assert calls == [{}, f"{folder}/memory_0.pickle", {"enabled": None}] and (tmp_path / folder).is_dir()


def test_a_memory_snapshot_that_cannot_be_taken_is_refused(tmp_path):
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="memory_snapshot=True needs output_trace_dir"):
        accelerator.profile(ProfileKwargs(memory_snapshot=True)).__enter__()
    handler = ProfileKwargs(memory_snapshot=tmp_path)
    with pytest.raises(ValueError, match="no allocations on 'cpu'. Set profile_memory=True"):
        accelerator.profile(handler).__enter__()
