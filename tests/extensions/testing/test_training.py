"""The smallest model and data."""

import types

import pytest
import torch

from accelerate.extensions.testing import training
from accelerate.extensions.testing.training import RegressionDataset, RegressionModel


def test_dataset():
    data = RegressionDataset(a=2, b=3, length=500, seed=1)
    assert len(data) == 500
    assert set(data[0]) == {"x", "y"}
    assert data.x.dtype == data.y.dtype == "float32"
    assert abs((data.y - 2 * data.x - 3).mean()) < 0.02
    assert (RegressionDataset(seed=1).x == RegressionDataset(seed=1).x).all()


def test_model(capsys):
    model = RegressionModel(a=2, b=1)
    assert model(torch.tensor([1.0, 2.0])).tolist() == [3.0, 5.0]
    assert capsys.readouterr().out == "Model dtype: torch.float32, torch.float32. Input dtype: torch.float32\n"
    model(torch.ones(1))
    assert capsys.readouterr().out == ""
    assert set(dict(model.named_parameters())) == {"a", "b"}
    with pytest.raises(ValueError, match="x is None"):
        model()


@pytest.mark.parametrize(("precision", "multiple"), [("no", 1), ("fp16", 8)])
def test_sentences(precision, multiple):
    accelerator = types.SimpleNamespace(mixed_precision=precision)
    train, evaluate = training.mocked_dataloaders(accelerator, batch_size=4)
    batch = next(iter(train))
    assert batch["input_ids"].shape == batch["attention_mask"].shape
    assert batch["input_ids"].shape[1] % multiple == 0
    assert batch["labels"].shape == (4,)
    assert len(evaluate.dataset) < len(train.dataset)
    batch = next(iter(training.mocked_dataloaders_for_autoregressive_models(accelerator)[0]))
    assert torch.equal(batch["labels"], batch["input_ids"])
