"""Torch's private names that this extension alone uses; see `runtime.torch_private`."""

import sys
from typing import Any


def skip_when_compiling(code: Any) -> None:
    """Keep torch.compile, where it is loaded, from compiling a function, given by its code object."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None and hasattr(compiler, "skip_code"):
        compiler.skip_code(code)
