"""Every test of the patch begins and ends with transformers as it was installed."""

from collections.abc import Iterator

import pytest

pytest.importorskip("transformers", reason="`make test` installs it")

import transformers_patch
from transformers_patch import agreement


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    """Take every patch back, and forget which warnings were given."""
    yield
    transformers_patch.revert()
    agreement._warned.clear()


@pytest.fixture
def build(tmp_path):
    def build(cls, **options):
        return cls(str(tmp_path / "out"), **{"use_cpu": True, "report_to": [], **options})

    return build
