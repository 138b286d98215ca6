"""`join_uneven_inputs` on one process: which context a strategy has, and what is restored. Several: check_uneven_inputs.py."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.algorithms.join import Join

from accelerate import Accelerator
from accelerate.comm.in_step import ends_are_uneven
from accelerate.config.enums import DistributedType
from accelerate.extensions.pipeline.strategy import PipelineParallel
from accelerate.extensions.uneven_inputs import joined
from accelerate.strategies.base import Strategy
from accelerate.strategies.ddp import DataParallel


@pytest.fixture
def run(monkeypatch):
    """An Accelerator that takes itself for one of several data-parallel ranks."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.prepare(torch.utils.data.DataLoader(torch.ones(4, 1)))
    accelerator.state.distributed_type = DistributedType.MULTI_CPU
    accelerator._strategy = Strategy()
    return accelerator


class Own(Strategy):
    """Has its own context, as a strategy of another package may."""

    def __init__(self):
        self.events = []

    @contextlib.contextmanager
    def join(self, joinables):
        self.events.append(joinables)
        yield
        self.events.append("ended")


def test_a_strategy_may_have_its_own_context_or_none(run):
    with run.join_uneven_inputs([]):
        assert ends_are_uneven()
    assert not ends_are_uneven()
    run._strategy = Own()
    with run.join_uneven_inputs(["model"]):
        pass
    assert run._strategy.events == [["model"], "ended"]


def test_data_parallelism_has_that_of_torch(run, monkeypatch):
    run._strategy, joining = DataParallel(), []
    monkeypatch.setattr(joined, "Join", lambda items, **options: joining.append(items) or contextlib.nullcontext())
    with run.join_uneven_inputs(("model",)):
        pass
    assert joining == [["model"]] and Join is not joined.Join


def test_pipelines_refuse_and_everything_is_as_before(run):
    run._strategy = PipelineParallel()
    sampler = SimpleNamespace(even_batches=True)
    run._dataloaders = [SimpleNamespace(batch_sampler=sampler)]
    with pytest.raises(NotImplementedError, match="pp_size"), run.join_uneven_inputs([], even_batches=False):
        pass
    assert sampler.even_batches and not ends_are_uneven()


def test_other_strategies_warn_and_one_process_does_not(run, recwarn):
    run.state.distributed_type = DistributedType.FSDP
    with pytest.warns(UserWarning, match="does nothing with DistributedType.FSDP"), run.join_uneven_inputs([]):
        assert not ends_are_uneven()
    run.state.distributed_type = DistributedType.NO
    recwarn.clear()
    with run.join_uneven_inputs([], even_batches=False):
        assert not ends_are_uneven()
    assert not recwarn


def test_items_cannot_be_counted_meanwhile(run):
    model = torch.nn.Linear(1, 1)
    with run.join_uneven_inputs([]):
        with pytest.raises(ValueError, match="inside join_uneven_inputs"), run.accumulate(model, num_items=1):
            pass
