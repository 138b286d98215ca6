"""What can be said about a tensor."""

import pickle

import torch

from accelerate.config.tensors import TensorInformation


def test_information_travels():
    information = TensorInformation(shape=torch.Size([2, 3]), dtype=torch.bfloat16)
    assert pickle.loads(pickle.dumps(information)) == information
    assert information != TensorInformation(torch.Size([2, 3]), torch.float16)
