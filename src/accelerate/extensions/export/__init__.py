"""Weights for other programs: files of a model or of its adapters, and a stream of full tensors."""

from accelerate.extension import Spec

_HOME = "accelerate.extensions.export"
SPEC = Spec(
    "export",
    methods={
        "save_model": f"{_HOME}.weights:save_model",
        "stream_weights": f"{_HOME}.weights:stream_weights",
        "save_adapter": f"{_HOME}.adapters:save_adapter",
    },
)
