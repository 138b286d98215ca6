"""Arguments that agree with the state they keep, and arguments that do not."""

import types
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from transformers_patch import agreement


def arguments(**values):
    usual = {"use_cpu": True, "fp16": False, "bf16": False, "deepspeed": None, "fsdp": "", "torch_compile": False}
    return types.SimpleNamespace(**{**usual, "ddp_backend": None, "ddp_timeout": 1800, **values})


def ways_out(error):
    return [number in str(error.value) for number in ("(1)", "(2)", "(3)", "preserve_accelerator_state=False")]


def test_arguments_that_agree_say_nothing():
    Accelerator(cpu=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agreement.check(arguments())


@pytest.mark.parametrize(
    ("state", "asked", "exported", "named"),
    [
        ("no", {"bf16": True}, None, ["'bf16'", "'no'", "bf16=False"]),
        ("no", {"fp16": True}, None, ["'fp16'", "'no'"]),
        ("no", {}, "bf16", ["'bf16'", "'no'", "ACCELERATE_MIXED_PRECISION"]),
        ("bf16", {"fp16": True}, None, ["'fp16'", "'bf16'", "bf16=True"]),
        ("bf16", {}, None, ["'no'", "'bf16'", "bf16=True"]),
    ],
)
def test_another_mixed_precision_raises(monkeypatch, state, asked, exported, named):
    Accelerator(cpu=True, mixed_precision=state)
    if exported:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", exported)
    with pytest.raises(ValueError, match="mixed precision") as error:
        agreement.check(arguments(**asked))
    assert all(text in str(error.value) for text in named) and all(ways_out(error)), error.value


def test_the_exported_mixed_precision_counts_as_asked_for(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "BF16")
    Accelerator(cpu=True, mixed_precision="bf16")
    agreement.check(arguments())


def test_a_state_of_the_process_alone_has_no_precision_yet():
    PartialState(cpu=True)
    agreement.check(arguments(bf16=True))


def test_another_device_raises_both_ways(monkeypatch):
    state = PartialState(cpu=True)
    monkeypatch.setattr(agreement, "_accelerator_type", lambda: "cuda")
    with pytest.raises(ValueError, match=r"use_cpu=False asks for the device 'cuda'.*'cpu'") as error:
        agreement.check(arguments(use_cpu=False))
    assert all(ways_out(error))
    state.device = torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r"use_cpu=True asks for the device 'cpu'.*'cuda:1'") as error:
        agreement.check(arguments())
    assert all(ways_out(error))
    agreement.check(arguments(use_cpu=False))


def test_a_machine_without_an_accelerator_needs_no_use_cpu(monkeypatch):
    PartialState(cpu=True)
    monkeypatch.setattr(agreement, "_accelerator_type", lambda: None)
    agreement.check(arguments(use_cpu=False))


def test_the_exported_choice_of_the_processor_counts(monkeypatch):
    PartialState(cpu=True)
    monkeypatch.setattr(agreement, "_accelerator_type", lambda: "cuda")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    agreement.check(arguments(use_cpu=False))


def test_an_xla_device_is_what_it_is():
    PartialState(cpu=True).device = torch.device("xla", 0)
    agreement.check(arguments())


@pytest.mark.parametrize("full", [True, False])
def test_deepspeed_needs_a_state_made_for_it(full):
    Accelerator(cpu=True) if full else PartialState(cpu=True)
    with pytest.raises(RuntimeError, match=r"`deepspeed='ds.json'` asks for DeepSpeed.*'NO'") as error:
        agreement.check(arguments(deepspeed="ds.json"))
    assert all(ways_out(error))
    AcceleratorState._shared_state["distributed_type"] = "DEEPSPEED"
    agreement.check(arguments(deepspeed="ds.json"))


def test_fsdp_needs_a_state_made_for_it_once_there_is_one():
    PartialState(cpu=True)
    agreement.check(arguments(fsdp="full_shard"))
    Accelerator(cpu=True)
    with pytest.raises(RuntimeError, match="`fsdp='full_shard'` asks for FSDP"):
        agreement.check(arguments(fsdp="full_shard"))


def test_another_mesh_raises():
    Accelerator(cpu=True)
    agreement.check(arguments(parallelism_config=None))
    with pytest.raises(ValueError, match="parallelism_config='mesh'.*has None") as error:
        agreement.check(arguments(parallelism_config="mesh"))
    assert all(ways_out(error))
    AcceleratorState._shared_state["parallelism_config"] = "mesh"
    agreement.check(arguments(parallelism_config="mesh"))


def test_compilation_that_the_state_does_not_have_warns_once():
    Accelerator(cpu=True)
    with pytest.warns(UserWarning, match="torch_compile=True is not applied") as caught:
        agreement.check(arguments(torch_compile=True))
        agreement.check(arguments(torch_compile=True))
    assert len(caught) == 1
    AcceleratorState._reset_state(True)
    agreement._warned.clear()
    Accelerator(cpu=True, dynamo_backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agreement.check(arguments(torch_compile=True))


@pytest.mark.usefixtures("process_group")
def test_a_group_that_lives_keeps_its_backend_and_timeout_and_says_so_once():
    PartialState(cpu=True)
    with pytest.warns(UserWarning) as caught:
        for _ in range(3):
            agreement.check(arguments(ddp_timeout=77, ddp_backend="nccl"))
    texts = sorted(str(warning.message) for warning in caught)
    assert len(texts) == 2
    assert "ddp_backend='nccl' is not applied" in texts[0] and "'gloo'" in texts[0]
    assert "ddp_timeout=77 (seconds) is not applied" in texts[1] and "1800 s" in texts[1]


@pytest.mark.usefixtures("process_group")
def test_an_equal_backend_and_timeout_say_nothing():
    state = PartialState(cpu=True)
    seconds = agreement._live_timeout(state.device) / timedelta(seconds=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agreement.check(arguments(ddp_timeout=seconds, ddp_backend="gloo"))


def test_a_timeout_that_torch_does_not_tell_is_not_compared(monkeypatch):
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_group", lambda: object())
    assert agreement._live_timeout(torch.device("cpu")) is None


def test_the_warning_points_at_the_line_that_built_the_arguments():
    with pytest.warns(UserWarning, match="look here") as caught:
        agreement.warn_caller("look here")
    assert caught[0].filename == __file__


def test_the_file_can_travel():
    # It is shipped into another package as it is, so it may import nothing of this one.
    text = Path(agreement.__file__).read_text("utf-8")
    assert "transformers_patch" not in text
