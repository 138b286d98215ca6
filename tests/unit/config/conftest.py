"""No option of the launcher is set while a plugin is built, whatever started these tests."""

import pytest

from accelerate.config.options import OPTIONS


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in (
        "ACCELERATE_CONFIG_DS_FIELDS",
        "FSDP_IGNORED_MODULES",
        *(name for option in OPTIONS for name in option.variables),
    ):
        monkeypatch.delenv(name, raising=False)
