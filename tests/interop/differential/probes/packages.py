"""`utils.imports`: what is found installed."""

from accelerate.utils import imports, versions
from interop.differential.core import probe, recorded

NAMES = recorded("utils.imports", r"is_\w+")
# The record has no signatures of these.
NAMES += [f"is_{kind}_available" for kind in "hpu mlu musa neuron npu sdaa torch_xla xpu".split()]  # noqa: SIM905


def forget():
    for function in [*vars(imports).values(), *vars(versions).values()]:
        getattr(function, "cache_clear", lambda: None)()
    getattr(imports, "_found", set()).clear()


def ask(function, *args):
    """Call a function without a separate answer from before."""
    forget()
    try:
        return bool(getattr(imports, function)(*args))
    finally:
        forget()


@probe(*(f"utils.imports:{name}" for name in NAMES), function=NAMES)
def as_it_is(function):
    return ask(function)


@probe("utils.imports:is_bf16_available", ignore=[True, False, None, "x"])
def bf16(ignore):
    return ask("is_bf16_available", ignore)
