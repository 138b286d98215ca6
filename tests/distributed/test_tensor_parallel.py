"""Tensor parallelism, and clipping on meshes, on several processes."""

import pytest


def test_tensor_parallel(launch):
    assert launch("check_tensor_parallel.py").stdout.count("ok ") == 6


def test_clipping(launch):
    assert launch("check_norms.py").stdout.count("ok ") == 5


@pytest.mark.slow
def test_tensor_parallel_and_fully_shard(launch):
    assert launch("check_tensor_parallel.py", processes=4).stdout.count("ok ") == 2


@pytest.mark.slow
def test_clipping_on_meshes_of_two_dimensions(launch):
    assert launch("check_norms.py", processes=4).stdout.count("ok ") == 5


@pytest.mark.slow
def test_compiled_and_recomputed(launch):
    assert launch("check_tensor_parallel.py", "compiled", "recomputed").stdout.count("ok ") == 3
