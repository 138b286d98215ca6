"""The checks of `accelerate test` pass on a setup that works, and each of them notices what it is there for."""

import types
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.config.handlers import GradientAccumulationPlugin
from accelerate.extensions.testing import checks
from accelerate.extensions.testing.checks import CHECKS, Skipped, run_checks
from accelerate.state import AcceleratorState


def test_everything_passes_here(capsys):
    run_checks(CHECKS, Accelerator(cpu=True))
    lines = capsys.readouterr().out.splitlines()
    count = len(CHECKS)
    assert len(lines) == count
    for number, (line, name) in enumerate(zip(lines, CHECKS, strict=True), 1):
        assert line.startswith(f"[{number:2}/{count}] {name} ... ok ")
        assert line.endswith(" s")


def test_a_failure_ends_the_run_and_what_a_setup_cannot_do_is_skipped(capsys):
    def skip(accelerator):
        raise Skipped("no such number format")

    def fail(accelerator):
        raise RuntimeError("what\nwent wrong")

    with pytest.raises(RuntimeError, match="The check 'second' failed on rank 0 of 1: RuntimeError: what went wrong"):
        run_checks({"fp4": skip, "second": fail, "third": fail}, Accelerator(cpu=True))
    out = capsys.readouterr().out
    assert out.startswith("[1/3] fp4 ... skipped: no such number format\n") and "third" not in out


def test_a_precision_that_is_refused_is_skipped_and_the_configured_one_comes_back(monkeypatch):
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    CHECKS["fp16"](accelerator)
    assert AcceleratorState().mixed_precision == "bf16"

    def refuse(mixed_precision=None, **rest):
        if mixed_precision == "fp16":
            raise ValueError("fp16 needs a GPU")
        return Accelerator(mixed_precision=mixed_precision)

    monkeypatch.setattr(checks, "Accelerator", refuse)
    with pytest.raises(Skipped, match="needs a GPU"):
        CHECKS["fp16"](accelerator)


def doubled(function):
    return lambda tensor, *args, **rest: 2 * function(tensor, *args, **rest) + 1


def without_first(function):
    return lambda *args, **rest: function(*args, **rest)[1:]


def without_first_row(accelerator, batch, plain=Accelerator.gather_for_metrics):
    return plain(accelerator, batch)[1:]


class Forgetful(Accelerator):
    """Forgets what it is asked to do."""

    def load_state(self, *args, **rest):
        pass


class Wasteful(Accelerator):
    """Hands out loaders that lack their last batch."""

    def prepare(self, *objects, **rest):
        prepared = super().prepare(*objects, **rest)
        return list(prepared)[:-1] if len(objects) == 1 else prepared


class Plain(Accelerator):
    """Leaves models and optimizers as they are, in float32."""

    def prepare(self, *objects, **rest):
        return [super(Plain, self).prepare(item) if isinstance(item, DataLoader) else item for item in objects]

    def backward(self, loss, **rest):
        loss.backward()


ONE_STEP = GradientAccumulationPlugin(1)
BROKEN = [
    ("processes", checks, "gather_object", without_first(checks.gather_object)),
    ("gather", checks, "gather", lambda tree: {"a": [2 * tree["a"][0] + 1]}),
    ("reduce", checks, "reduce", doubled(checks.reduce)),
    ("broadcast", checks, "broadcast", doubled(checks.broadcast)),
    ("broadcast", checks, "broadcast_object_list", lambda words, from_process: words[1:]),
    ("loader: dispatched", Accelerator, "gather_for_metrics", without_first_row),
    ("loader: every sample once", checks, "Accelerator", Wasteful),
    ("loader: every sample once", Accelerator, "gather_for_metrics", without_first_row),
    ("gradient accumulation", checks, "GradientAccumulationPlugin", lambda num_steps: ONE_STEP),
    ("training", checks, "are_the_same_tensors", lambda tensor: False),
    ("bf16", checks, "Accelerator", Plain),
    ("checkpoint and resume", checks, "Accelerator", Forgetful),
]


@pytest.mark.parametrize(
    ("name", "module", "attribute", "broken"), BROKEN, ids=[f"{case[0]}: {case[2]}" for case in BROKEN]
)
def test_each_check_notices(monkeypatch, name, module, attribute, broken):
    accelerator = Accelerator(cpu=True)
    CHECKS[name](accelerator)
    monkeypatch.setattr(module, attribute, broken)
    with pytest.raises(AssertionError):
        CHECKS[name](accelerator)


def test_a_broken_gather_is_noticed_where_python_leaves_assertions_out():
    module = types.ModuleType("checks_without_assertions")
    exec(compile(Path(checks.__file__).read_text("utf-8"), checks.__file__, "exec", optimize=1), vars(module))
    module.gather = lambda tree: {"a": [2 * tree["a"][0] + 1]}
    with pytest.raises(RuntimeError, match="The check 'gather' failed on rank 0 of 1: AssertionError: gather of"):
        module.run_checks({name: module.CHECKS[name] for name in ("processes", "gather")}, Accelerator(cpu=True))
