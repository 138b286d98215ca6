import sys
import types

from accelerate.extensions.fp8.transformer_engine import is_transformer_engine_mxfp8_available


def test_mxfp8_asks_transformer_engine(machine, monkeypatch):
    assert is_transformer_engine_mxfp8_available() is False
    machine.install("transformer_engine", "transformer-engine")
    module = types.ModuleType("transformer_engine.pytorch.fp8")
    module.check_mxfp8_support = lambda: (True, "")
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert is_transformer_engine_mxfp8_available() is True
