"""Arguments that agree with the state they keep, and arguments that do not."""

import types
import warnings
from datetime import timedelta

import pytest
import torch

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from cases import cases
from transformers_patch import agreement

GPU = torch.device("cuda", 1)
WAYS = ("(1)", "(2)", "(3)", "preserve_accelerator_state=False")


def arguments(**values):
    usual = {"use_cpu": True, "fp16": False, "bf16": False, "deepspeed": None, "fsdp": "", "torch_compile": False}
    return types.SimpleNamespace(**{**usual, "ddp_backend": None, "ddp_timeout": 1800, **values})


def silent(**values):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agreement.check(arguments(**values))


@cases(
    "state, asked, exported, error, named",
    ("no", {"bf16": True}, None, ValueError, ["mixed precision 'bf16'", "'no'", "bf16=False"]),
    ("no", {"fp16": True}, None, ValueError, ["mixed precision 'fp16'", "'no'"]),
    ("no", {}, "bf16", ValueError, ["'bf16'", "'no'", "ACCELERATE_MIXED_PRECISION"]),
    ("bf16", {"fp16": True}, None, ValueError, ["'fp16'", "'bf16'", "bf16=True"]),
    ("bf16", {}, None, ValueError, ["'no'", "'bf16'", "bf16=True"]),
    ("no", {"deepspeed": "a.json"}, None, RuntimeError, ["`deepspeed='a.json'` asks for DeepSpeed", "'NO'"]),
    (None, {"deepspeed": "a.json"}, None, RuntimeError, ["`deepspeed='a.json'` asks for DeepSpeed", "'NO'"]),
    ("no", {"fsdp": "full_shard"}, None, RuntimeError, ["`fsdp='full_shard'` asks for FSDP"]),
    ("no", {"parallelism_config": "mesh"}, None, ValueError, ["parallelism_config='mesh'", "has None"]),
    (None, {"use_cpu": False}, None, ValueError, ["use_cpu=False asks for the device 'cuda'", "'cpu'"]),
)
def test_a_disagreement_raises_and_names_both_sides(monkeypatch, state, asked, exported, error, named):
    monkeypatch.setattr(agreement, "_accelerator_type", lambda: "cuda")
    PartialState(cpu=True) if state is None else Accelerator(cpu=True, mixed_precision=state)
    if exported:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", exported)
    with pytest.raises(error) as caught:
        agreement.check(arguments(**asked))
    assert all(text in str(caught.value) for text in (*named, *WAYS)), caught.value


@pytest.mark.parametrize("asked", [{"bf16": True}, {"fsdp": "full_shard"}], ids=str)
def test_a_state_of_the_process_alone_is_undecided(asked):
    PartialState(cpu=True)
    silent(**asked)


def test_what_agrees_says_nothing(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "BF16")  # the exported precision counts as asked for
    Accelerator(cpu=True, mixed_precision="bf16", dynamo_backend="eager")
    silent(torch_compile=True, parallelism_config=None)
    AcceleratorState._shared_state.update(distributed_type="DEEPSPEED", parallelism_config="mesh")
    silent(deepspeed="ds.json", parallelism_config="mesh")


def test_devices(monkeypatch):
    state = PartialState(cpu=True)
    monkeypatch.setattr(agreement, "_accelerator_type", lambda: None)
    silent(use_cpu=False)  # a machine without an accelerator
    state.device = GPU
    with pytest.raises(ValueError, match=r"use_cpu=True asks for the device 'cpu'.*'cuda:1'"):
        agreement.check(arguments())
    silent(use_cpu=False)
    state.device = torch.device("xla", 0)  # a processor as well as a TPU
    silent()
    state.device = torch.device("cpu")
    monkeypatch.setattr(agreement, "_accelerator_type", lambda: "cuda")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    silent(use_cpu=False)


def test_compilation_that_the_state_does_not_have_warns_once():
    Accelerator(cpu=True)
    with pytest.warns(UserWarning, match="torch_compile=True is not applied") as caught:
        agreement.check(arguments(torch_compile=True))
        agreement.check(arguments(torch_compile=True))
    assert len(caught) == 1


@pytest.mark.usefixtures("process_group")
def test_a_group_that_lives_keeps_its_backend_and_timeout_and_says_so_once():
    state = PartialState(cpu=True)
    silent(ddp_timeout=agreement._live_timeout(state.device) / timedelta(seconds=1), ddp_backend="gloo")
    with pytest.warns(UserWarning) as caught:
        for _ in range(3):
            agreement.check(arguments(ddp_timeout=77, ddp_backend="nccl"))
    backend, timeout = sorted(str(warning.message) for warning in caught)
    assert "ddp_backend='nccl' is not applied" in backend and "'gloo'" in backend
    assert "ddp_timeout=77 (seconds) is not applied" in timeout and "1800 s" in timeout


def test_a_timeout_that_torch_does_not_give_is_not_compared(monkeypatch):
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_group", lambda: object())
    assert agreement._live_timeout(torch.device("cpu")) is None


def test_the_warning_points_at_the_line_that_built_the_arguments():
    with pytest.warns(UserWarning, match="look here") as caught:
        agreement.warn_caller("look here")
    assert caught[0].filename == __file__
