import sys
import types
from unittest.mock import Mock, call

import pytest
import torch

from accelerate.extensions.deepspeed import wrappers as home
from accelerate.extensions.deepspeed.plugin import DeepSpeedPlugin
from accelerate.state import AcceleratorState
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper, get_active_deepspeed_plugin


@pytest.mark.parametrize("norm", [2.0, torch.tensor(2.0)])
def test_engine_steps_at_the_end_of_a_window(norm):
    engine = Mock()
    engine.get_global_grad_norm.return_value = norm
    wrapper = DeepSpeedEngineWrapper(engine)
    wrapper.backward(1.0, sync_gradients=False, retain_graph=True)
    wrapper.backward(2.0)
    boundary = call.set_gradient_accumulation_boundary
    first = [boundary(is_boundary=False), call.backward(1.0, retain_graph=True)]
    assert engine.mock_calls == [*first, boundary(is_boundary=True), call.backward(2.0), call.step()]
    assert wrapper.get_global_grad_norm() == 2.0


def test_a_held_engine_takes_no_step():
    wrapper = DeepSpeedEngineWrapper(Mock())
    wrapper._held = 2
    for _ in range(2):
        wrapper.backward(1.0)
        wrapper._held -= 1
        assert not wrapper.engine.step.called
    wrapper.backward(2.0)
    assert wrapper.engine.step.call_count == 1


def test_wrappers_leave_the_engine_alone():
    AcceleratorState(cpu=True, _from_accelerator=True)
    parameter = torch.nn.Parameter(torch.ones(1))
    inner = torch.optim.SGD([parameter], lr=0.1)
    wrapper = home.DeepSpeedOptimizerWrapper(inner)
    parameter.grad = torch.ones(1)
    wrapper.step()
    wrapper.zero_grad()
    assert parameter.item() == 1.0 and parameter.grad is not None
    assert wrapper.step_was_skipped is False
    inner.overflow = True
    assert wrapper.step_was_skipped is True and wrapper.param_groups is inner.param_groups
    schedule = home.DeepSpeedSchedulerWrapper(torch.optim.lr_scheduler.ExponentialLR(inner, 0.5), inner)
    schedule.step()
    assert schedule.get_last_lr() == [0.1]


def test_active_plugin():
    first, second = DeepSpeedPlugin(), DeepSpeedPlugin()
    second.select(_from_accelerator_state=True)
    state = types.SimpleNamespace(deepspeed_plugins={"a": first, "b": second})
    assert get_active_deepspeed_plugin(state) is second
    second._unselect()
    with pytest.raises(ValueError, match=r"the plugins are \['a', 'b'\]"):
        get_active_deepspeed_plugin(state)
    with pytest.raises(ValueError, match="there are no plugins"):
        get_active_deepspeed_plugin(types.SimpleNamespace(deepspeed_plugins=None))
    assert get_active_deepspeed_plugin(types.SimpleNamespace(deepspeed_plugins=first)) is first


def test_optimizers_for_offloaded_states(monkeypatch):
    parameters = [torch.nn.Parameter(torch.ones(1))]
    monkeypatch.setattr(home, "is_deepspeed_available", lambda: False)
    with pytest.raises(ImportError, match="deepspeed"):
        home.map_pytorch_optim_to_deepspeed(torch.optim.Adam(parameters))

    made = []
    for module, name in (("adam", "DeepSpeedCPUAdam"), ("adagrad", "DeepSpeedCPUAdagrad")):
        fake = types.ModuleType(f"deepspeed.ops.{module}")
        setattr(fake, name, lambda groups, name=name, **options: made.append((name, groups, options)))
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    for name in ("deepspeed", "deepspeed.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(home, "is_deepspeed_available", lambda: True)

    adamw = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.2)
    home.map_pytorch_optim_to_deepspeed(adamw)
    name, groups, options = made.pop()
    assert name == "DeepSpeedCPUAdam"
    assert (options["adamw_mode"], options["lr"], options["weight_decay"]) == (True, 0.1, 0.2)
    assert groups is adamw.param_groups
    home.map_pytorch_optim_to_deepspeed(torch.optim.Adam(parameters))
    assert made.pop()[2]["adamw_mode"] is False
    home.map_pytorch_optim_to_deepspeed(torch.optim.Adagrad(parameters))
    assert made.pop()[0] == "DeepSpeedCPUAdagrad"
    for kind in (torch.optim.SGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax):
        other = kind(parameters, lr=0.1)
        assert home.map_pytorch_optim_to_deepspeed(other) is other
