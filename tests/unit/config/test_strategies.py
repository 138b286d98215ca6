"""The records of strategies: each distributed type has abilities, and every class that a record names is there."""

import importlib

import pytest

from accelerate.config import strategies
from accelerate.config.enums import DistributedType
from accelerate.config.strategies import Traits, specs, traits_of


def test_every_type_has_traits_under_its_name_too():
    assert all(isinstance(traits_of(member), Traits) for spec in specs() for member in spec.kinds)
    assert traits_of("MULTI_GPU") is traits_of(DistributedType.MULTI_GPU)
    with pytest.raises(ValueError, match="MULTI_CPU"):
        traits_of("MULTI_TOASTER")


@pytest.mark.parametrize("spec", specs(), ids=lambda spec: spec.name)
def test_every_class_of_a_record_is_there(spec):
    for address in filter(None, (spec.strategy, spec.state_io, spec.plugin_class)):
        module, _, name = address.partition(":")
        assert isinstance(getattr(importlib.import_module(module), name), type), address


def test_strategies_of_one_type_have_the_same_traits():
    for kind in DistributedType:
        assert len({spec.traits for spec in specs() if kind in spec.kinds}) <= 1, kind


def test_a_strategy_goes_before_one_that_exists(monkeypatch):
    records = list(specs())
    monkeypatch.setattr(strategies, "specs", lambda: records)
    with pytest.raises(ValueError, match="single.*ddp"):
        strategies.register(strategies.StrategySpec("mine", "m:C"), before="horovod")
    strategies.register(strategies.StrategySpec("mine", "m:C"), before="ddp")
    names = [spec.name for spec in records]
    assert names.index("mine") + 1 == names.index("ddp")


def test_a_registered_strategy_has_no_plugin():
    with pytest.raises(ValueError, match="'mine' has plugin='mine_plugin'.*variables"):
        strategies.register(strategies.StrategySpec("mine", "m:C", plugin="mine_plugin"))
