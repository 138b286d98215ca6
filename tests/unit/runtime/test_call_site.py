"""The line of the user's program."""

import os
import sys
import types

from accelerate.runtime.call_site import _OURS, _TORCH, call_site, describe


def library_function(name, filename):
    """Return a function that calls another one, compiled as if it were in some file."""
    code = compile(f"def {name}(function):\n    return function()\n", filename, "exec")
    scope = {"__name__": "library"}
    types.FunctionType(code, scope)()
    return scope[name]


def test_call_site_is_the_users_line_and_names_the_script_behind_a_package():
    assert call_site().startswith(f"{__file__}:")
    step = library_function("save_checkpoint", os.path.join("venv", "site-packages", "trainer.py"))
    first, _, second = step(call_site).partition(", called from ")
    assert first.endswith("trainer.py:2 in save_checkpoint")
    assert f"{__file__}:" in second and second.endswith(
        "in test_call_site_is_the_users_line_and_names_the_script_behind_a_package"
    )


def test_call_site_passes_over_torch_and_this_library(monkeypatch):
    inner = library_function("all_reduce", _TORCH + "distributed.py")
    outer = library_function("save_state", _OURS + "accelerator.py")
    frame = outer(lambda: inner(sys._getframe))
    # The lambda is the user's.
    site, inside = describe(frame)
    assert "in <lambda>" in site and inside == "library.all_reduce"
    assert "library.save_state" not in inside
