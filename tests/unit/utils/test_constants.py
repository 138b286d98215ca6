"""Names that other programs rely on."""

import torch

from accelerate.utils import constants


def test_file_names_belong_together():
    assert constants.WEIGHTS_NAME == "pytorch_model.bin"
    assert constants.WEIGHTS_INDEX_NAME == "pytorch_model.bin.index.json"
    assert constants.SAFE_WEIGHTS_NAME == "model.safetensors"
    assert constants.SAFE_WEIGHTS_INDEX_NAME == "model.safetensors.index.json"
    assert constants.SAFE_WEIGHTS_PATTERN_NAME.format(suffix="-00001-of-00002") == "model-00001-of-00002.safetensors"
    assert constants.PROFILE_PATTERN_NAME.format(suffix=3) == "profile_3.json"


def test_operations():
    holds = {name: compare(1, 2) for name, compare in constants.STR_OPERATION_TO_FUNC.items()}
    assert holds == {">": False, ">=": False, "==": False, "!=": True, "<=": True, "<": True}


def test_layers_are_looked_up_when_asked_for():
    layers = constants.SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
    assert torch.nn.Linear in layers and torch.nn.ConvTranspose3d in layers and len(layers) == 7
    assert constants.SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING is layers
    assert "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING" in dir(constants) and not hasattr(constants, "NO_SUCH_NAME")
