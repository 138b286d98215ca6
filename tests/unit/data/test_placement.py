"""Batches that are in place are not touched."""

import torch

from accelerate.data.placement import CPU, keep_on_cpu, placer


def test_flat_batches_on_the_cpu_are_returned_themselves():
    tensor = torch.zeros(2)
    for batch in (tensor, {"x": tensor, "y": tensor}, [tensor, tensor], (tensor,)):
        assert keep_on_cpu(batch) is batch


def test_other_batches_are_looked_through():
    batch = {"x": {"y": torch.zeros(2)}, "text": "a", "meta": [torch.ones(1, device="cpu"), 3]}
    kept = keep_on_cpu(batch)
    assert torch.equal(kept["x"]["y"], torch.zeros(2)) and kept["text"] == "a" and kept["meta"][1] == 3


def test_the_function_is_chosen_by_device():
    assert placer(None) is None
    assert placer("cpu") is placer(CPU) is keep_on_cpu
    moved = placer(torch.device("meta"), non_blocking=True)({"x": torch.zeros(2), "n": 1})
    assert moved["x"].device.type == "meta" and moved["n"] == 1
