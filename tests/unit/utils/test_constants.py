"""Names that other programs rely on."""

import torch

from accelerate.utils import constants


def test_layers_are_looked_up_when_asked_for():
    layers = constants.SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
    assert torch.nn.Linear in layers and torch.nn.ConvTranspose3d in layers and len(layers) == 7
    assert constants.SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING is layers
    assert "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING" in dir(constants) and not hasattr(constants, "NO_SUCH_NAME")
