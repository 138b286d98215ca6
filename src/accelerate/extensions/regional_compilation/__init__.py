"""Compilation of a model by its repeated blocks."""

from accelerate.extension import Spec

SPEC = Spec(
    "regional_compilation",
    methods={"_compile_regions": "accelerate.extensions.regional_compilation.regions:_compile_regions"},
)
