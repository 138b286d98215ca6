import pytest
import torch

from accelerate.runtime import torch_private


def test_a_name_that_torch_has_given_up_is_named_with_what_to_do(monkeypatch):
    monkeypatch.delitem(vars(torch_private), "take_tensors", raising=False)
    monkeypatch.delattr(torch._utils, "_take_tensors")
    with pytest.raises(
        ImportError, match=rf"torch {torch.__version__[:3]}.* has no take_tensors in torch._utils.*install"
    ):
        from accelerate.runtime.torch_private import take_tensors  # noqa: F401


def test_every_name_is_there():
    for name in torch_private._HOME_OF:
        assert getattr(torch_private, name) is getattr(torch_private, name)
