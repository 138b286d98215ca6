"""Warnings of releases that compute something wrong, with installed distributions of those names."""

import warnings

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.runtime import known_faults
from accelerate.utils import versions
from cases import cases


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Let a distribution of some name and version be installed."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(package, version):
        folder = tmp_path / f"{package}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        versions.installed_version.cache_clear()

    yield make
    versions.installed_version.cache_clear()


@cases(
    "package, version, wrong",
    ("deepspeed", "0.18.2", "gradients are too small"),
    ("deepspeed", "0.18.3+local", "called more than once"),
    ("deepspeed", "0.17.5", ""),
    ("deepspeed", "0.19.4", ""),
    ("bitsandbytes", "0.41.0", "round wrongly"),
    ("bitsandbytes", "0.48.0", "nonsense"),
    ("bitsandbytes", "0.48.1", ""),
)
def test_faults_are_those_of_the_installed_releases(install, package, version, wrong):
    install(package, version)
    found = [str(fault) for fault in known_faults.installed() if fault.package == package]
    assert len(found) == bool(wrong)
    assert all(f"{package} {version}: " in text and wrong in text and "https://" in text for text in found)


def test_prepare_warns_once_of_what_concerns_the_run(install):
    install("bitsandbytes", "0.41.0")
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    kind = type("Adam8bit", (torch.optim.SGD,), {"__module__": "bitsandbytes.optim.adam"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = accelerator.prepare(model)
        accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(UserWarning, match=r"bitsandbytes 0\.41\.0: 8-bit optimizers.* Use 0\.41\.1") as caught:
        accelerator.prepare(kind(model.parameters(), lr=0.1))
        accelerator.prepare(kind(model.parameters(), lr=0.1))
    assert len(caught) == 1 and caught[0].filename == __file__
