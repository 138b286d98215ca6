"""The shape and dtype of a tensor, sent ahead of it."""

import pickle

import torch

from accelerate.comm.shapes import TensorInformation


def test_information_travels():
    information = TensorInformation(shape=torch.Size([2, 3]), dtype=torch.bfloat16)
    assert pickle.loads(pickle.dumps(information)) == information
    assert information != TensorInformation(torch.Size([2, 3]), torch.float16)
