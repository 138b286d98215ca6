"""The backend registry: matching, loading, extension, and strategies that are not there."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from accelerate.backends import registry
from accelerate.backends.base import Backend
from accelerate.backends.registry import BackendSpec
from accelerate.config.enums import DistributedType


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (DistributedType.NO, "single"),
        ("NO", "single"),
        (DistributedType.MULTI_CPU, "ddp"),
        ("MULTI_GPU", "ddp"),
        (DistributedType.MULTI_NPU, "ddp"),
        (DistributedType.XLA, "xla"),
    ],
)
def test_a_state_finds_its_backend(kind, name):
    assert registry.resolve(SimpleNamespace(distributed_type=kind)).name == name


@pytest.mark.parametrize(("version", "name"), [(False, "fsdp1"), (True, "fsdp2")])
def test_the_plugins_version_chooses_between_the_two_of_fsdp(version, name):
    state = SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=version)
    assert registry.resolve(state).name == name


@pytest.mark.parametrize(("size", "name"), [(1, "ddp"), (2, "tensor_parallel")])
def test_split_layers_have_a_backend_of_their_own(size, name):
    layout = SimpleNamespace(tp_enabled=size > 1)
    state = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU, parallelism_config=layout)
    assert registry.resolve(state).name == name


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM])
def test_a_strategy_that_is_not_there_says_what_works(kind):
    with pytest.raises(NotImplementedError, match="not part of this version.*data parallelism"):
        registry.resolve(SimpleNamespace(distributed_type=kind))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="single.*ddp"):
        registry.load("horovod")
    with pytest.raises(ValueError, match="single.*ddp"):
        registry.register(BackendSpec("mine", lambda state: True, "m:C"), before="horovod")


class Mine(Backend):
    """A third party's backend."""

    name = "mine"


def test_a_third_party_goes_first(monkeypatch):
    module = ModuleType("third_party_backend")
    module.Mine = Mine
    monkeypatch.setitem(sys.modules, "third_party_backend", module)
    monkeypatch.setattr(registry, "SPECS", list(registry.SPECS))
    registry.load.cache_clear()
    registry.register(BackendSpec("mine", lambda state: hasattr(state, "mine"), "third_party_backend:Mine"))
    ours = SimpleNamespace(distributed_type=DistributedType.NO)
    assert isinstance(registry.resolve(SimpleNamespace(mine=True, distributed_type=DistributedType.NO)), Mine)
    assert registry.resolve(ours).name == "single"
