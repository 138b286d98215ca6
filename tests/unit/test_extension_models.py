"""Extensions of a run: when they are attached, which settings they serve, and what they may change before a model is wrapped."""

import pytest
import torch
from torch import nn

from accelerate import Accelerator, extension
from accelerate.extension import Extension, Spec
from accelerate.modules import tensor_kinds


class Doubles(Extension):
    """Doubles the weights of new models and the learning rate of new optimizers."""

    @property
    def serves(self):
        return ("double",)

    def convert(self, model, evaluation):
        with torch.no_grad():
            model.weight.mul_(2)
        return model

    def convert_optimizer(self, optimizer):
        optimizer.param_groups[0]["lr"] *= 2


def with_spec(monkeypatch, **fields):
    spec = Spec("doubles", extension=f"{__name__}:Doubles", **fields)
    monkeypatch.setattr(extension, "_attachable", lambda: (spec,))
    monkeypatch.setattr(extension, "imported", lambda address: Doubles)


def test_an_extension_is_attached_when_settings_change_before_prepare(monkeypatch):
    with_spec(monkeypatch, attaches=lambda run: getattr(run, "doubles", False))
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    weight = model.weight.item()
    accelerator.prepare(nn.Linear(1, 1))
    accelerator.doubles = True
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert model.weight.item() == 2 * weight and optimizer.param_groups[0]["lr"] == 2
    assert len(accelerator.extensions.of_kind(Doubles)) == 1


def test_an_extension_is_attached_when_models_bring_what_it_handles(monkeypatch):
    with_spec(monkeypatch, arrives=lambda models: any(hasattr(model, "marked") for model in models))
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    assert accelerator.extensions.of_kind(Doubles) == []
    model = nn.Linear(1, 1)
    model.marked = True
    accelerator.prepare(model)
    assert len(accelerator.extensions.of_kind(Doubles)) == 1


def test_a_setting_without_its_extension_is_refused(monkeypatch):
    with_spec(monkeypatch, attaches=lambda run: True)
    accelerator = Accelerator(cpu=True)
    accelerator.extensions.require(["double"])
    with pytest.raises(ValueError, match="triple needs an extension"):
        accelerator.extensions.require(["double", "triple"])


def test_a_model_for_evaluation_does_not_train_where_layers_are_changed(monkeypatch):
    with_spec(monkeypatch, attaches=lambda run: True)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(nn.Linear(1, 1), evaluation_mode=True)
    with pytest.raises(ValueError, match="evaluation_mode=True, and double changes"):
        accelerator.prepare(model)


def test_kinds_of_tensors_change_nothing_of_ordinary_optimizers():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    state = optimizer.state_dict()
    assert tensor_kinds.kept_by(optimizer) == [] and tensor_kinds.rebuilt(optimizer, state) is state
    assert not tensor_kinds.is_parts({"step": 1}) and tensor_kinds.of_model(nn.Linear(1, 1)) == {}
