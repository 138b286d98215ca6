"""Torch's private names that this extension alone uses; see `runtime.torch_private`."""

import importlib

import torch


def muon_rate(lr: float, adjustment: str | None, shape: torch.Size) -> float:
    """Return the learning rate of torch's Muon for a matrix of a shape."""
    return importlib.import_module("torch.optim._muon")._adjust_lr(lr, adjustment, shape)


def hook_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let the step of an optimizer that got another class call its hooks, as those of torch's classes do."""
    optimizer._patch_step_function()
