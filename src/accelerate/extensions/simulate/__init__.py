"""One rank of a large run, whose other ranks are made up."""

from accelerate.extension import Spec

SPEC = Spec(
    "simulate",
    options="accelerate.extensions.simulate.options",
    runners={"simulate": "accelerate.extensions.simulate.runner"},
)
