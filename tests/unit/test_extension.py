"""Extensions: which a run has, the order of their hooks, the methods that they add, and what refuses one."""

import contextlib
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, extension
from accelerate.config.handlers import KwargsHandler
from accelerate.extension import Extension, Extensions, Spec
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.runtime.ranks import schedulers
from accelerate.training.setup import sort_handlers


class Recorder(Extension):
    """Notes each call of a hook."""

    def __init__(self, run, calls, order=50):
        super().__init__(run)
        self.calls, self.order = calls, order

    def registered(self, kind, prepared, evaluation):
        self.calls.append(("registered", kind, evaluation))

    def phase_begins(self, phase, loss):
        self.calls.append(("begins", phase, None if loss is None else loss.item()))

    def phase_ends(self, phase):
        self.calls.append(("ends", phase))

    def step_begins(self, optimizer):
        self.calls.append(("step begins", self.order))

    def step_ends(self, optimizer):
        self.calls.append(("step ends", self.order))

    def starting_workers(self, loader):
        self.calls.append(("workers", loader.num_workers))
        return contextlib.nullcontext()

    def between_batches(self, loader):
        self.calls.append(("between batches", len(loader)))

    def saving(self, plan):
        self.calls.append(("saving",))

    def loading(self, folder):
        self.calls.append(("loading",))

    def released(self):
        self.calls.append(("released",))
        self.run.extensions.remove(self)

    def ended(self):
        self.calls.append(("ended",))


@pytest.fixture
def trained():
    """A prepared model, optimizer and loader of an Accelerator with a recorder, and the recorder's calls."""
    accelerator, calls, model = Accelerator(cpu=True), [], nn.Linear(1, 1)
    accelerator.extensions.add(Recorder(accelerator, calls))
    loader = DataLoader(torch.ones(3, 1))
    prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    assert calls == [("registered", kind, False) for kind in ("model", "optimizer", "loader")]
    calls.clear()
    return accelerator, *prepared, calls


def test_the_hooks_of_a_step_and_of_an_epoch(trained):
    accelerator, model, optimizer, loader, calls = trained
    for batch in loader:
        loss = model(batch).sum() * 0 + 2
        accelerator.backward(loss)
        optimizer.step()
    step = [("begins", "backward", 2.0), ("ends", "backward"), ("step begins", 50), ("step ends", 50)]
    # The loader is requested the next batch twice: at the end of the last one the epoch is over.
    assert calls == [("between batches", 3), *step, ("between batches", 3), *step, ("between batches", 3), *step]


def test_a_step_in_the_middle_of_an_accumulation_step_calls_nothing(trained):
    accelerator, model, optimizer, _, calls = trained
    accelerator.gradient_accumulation_steps = 2
    with accelerator.accumulate(model):
        optimizer.step()
    assert calls == []


def test_a_step_that_the_scaler_skips_calls_the_hooks():
    accelerator, calls, model = Accelerator(cpu=True, mixed_precision="fp16"), [], nn.Linear(1, 1)
    accelerator.extensions.add(Recorder(accelerator, calls))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 1)).sum() * float("inf"))
    optimizer.step()
    assert optimizer.step_was_skipped and calls[-2:] == [("step begins", 50), ("step ends", 50)]


def test_checkpoints_and_the_end(trained, tmp_path):
    accelerator, *_, calls = trained
    accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path)
    accelerator.gather(torch.ones(1))
    accelerator.end_training()
    accelerator.free_memory()
    saved = [("begins", "save_state", None), ("saving",), ("ends", "save_state")]
    gathered = [("begins", "gather", None), ("ends", "gather")]
    loaded = [("begins", "load_state", None), ("loading",), ("ends", "load_state")]
    assert calls == [*saved, *loaded, *gathered, ("ended",), ("released",)]
    assert accelerator.extensions.of_kind(Recorder) == []


def test_a_refused_checkpoint_is_not_written_and_a_refused_load_changes_nothing(trained, tmp_path):
    accelerator, model, *_ = trained

    class Refusing(Extension):
        def saving(self, plan):
            raise ValueError("not now")

        loading = saving

    accelerator.save_state(tmp_path / "good")
    accelerator.extensions.add(Refusing(accelerator))
    with pytest.raises(ValueError, match="not now"):
        accelerator.save_state(tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
    nn.init.zeros_(model.weight)
    with pytest.raises(ValueError, match="not now"):
        accelerator.load_state(tmp_path / "good")
    assert model.weight.item() == 0


def test_workers_start_in_the_context_of_the_extensions(trained):
    accelerator, *_, calls = trained
    list(accelerator.prepare(DataLoader(torch.ones(1, 1), num_workers=1, multiprocessing_context="fork")))
    assert ("workers", 1) in calls


def test_hooks_are_called_by_order_and_phases_end_after_errors():
    run, calls = Extensions(), []
    extensions = Extensions()
    for order in (60, 10):
        extensions.add(Recorder(run, calls, order))
    for hook in extensions.step_begins:
        hook(None)
    with pytest.raises(RuntimeError), extensions.phase("reduce"):
        raise RuntimeError
    both = [("begins", "reduce", None)] * 2 + [("ends", "reduce")] * 2
    assert calls == [("step begins", 10), ("step begins", 60), *both]


def test_a_hook_that_no_extension_overrides_is_empty():
    extensions = Extensions()
    extensions.add(Extension(extensions))
    others = ("order", "run", "serves", "attach")
    names = [name for name in vars(Extension) if not name.startswith("_") and name not in others]
    assert names and [getattr(extensions, name) for name in names] == [()] * len(names)
    assert extensions.phase("backward") is extensions.phase("gather")


def test_copies_have_no_extensions(trained):
    accelerator, model, optimizer, loader, calls = trained
    copies = pickle.loads(pickle.dumps((accelerator, optimizer, loader)))
    assert copies[0].extensions.attached == []
    assert (
        accelerator.extensions.attached
        and not copies[1]._extensions.step_ends
        and not copies[2]._extensions.between_batches
    )


def test_a_run_has_the_extensions_that_it_asks_for(monkeypatch):
    module = ModuleType("of_another_package")
    module.Recorder = type("Recorder", (Extension,), {"attach": classmethod(lambda cls, run: cls(run))})
    module.doubled = lambda accelerator, number: (accelerator, 2 * number)
    module.size = lambda accelerator: accelerator.num_processes
    spec = Spec(
        "another",
        extension="of_another_package:Recorder",
        attaches=lambda run: run.mixed_precision == "bf16",
        methods={"doubled": "of_another_package:doubled"},
        attributes={"size": "of_another_package:size"},
    )
    monkeypatch.setitem(sys.modules, "of_another_package", module)
    monkeypatch.setattr(extension, "_attachable", lambda: (spec,))
    owner = type("Owner", (Accelerator,), {})
    spec.install(owner)
    accelerator = owner(cpu=True, mixed_precision="bf16")
    assert len(accelerator.extensions.of_kind(module.Recorder)) == 1
    assert accelerator.doubled(3) == (accelerator, 6) and accelerator.size == 1
    assert {"doubled", "size"} <= set(dir(accelerator))
    with pytest.raises(AttributeError, match="read-only"):
        accelerator.size = 2
    with pytest.raises(ValueError, match="'another' has the method 'doubled'"):
        spec.install(owner)


def test_a_spec_that_cannot_be_imported_is_named(monkeypatch):
    point = SimpleNamespace(name="broken", value="broken:SPEC", load=lambda: 1 / 0)
    points = SimpleNamespace(select=lambda group: [point])
    monkeypatch.setattr(extension, "_entry_points", lambda: points)
    with pytest.raises(ImportError, match=r"'broken' of another package.*ZeroDivisionError"):
        extension.third_parties.__wrapped__()


@pytest.mark.parametrize("fields", [{"strategies": (1,)}, {"options": "m"}])
def test_what_another_package_cannot_add_is_refused(monkeypatch, fields):
    point = SimpleNamespace(name="other", value="other:SPEC", load=lambda: Spec("other", **fields))
    monkeypatch.setattr(extension, "_entry_points", lambda: SimpleNamespace(select=lambda group: [point]))
    with pytest.raises(ValueError, match=f"'other' of another package has {next(iter(fields))}"):
        extension.third_parties.__wrapped__()


def test_handlers_and_schedulers_of_other_packages_are_read(monkeypatch):
    module = ModuleType("of_another_package")
    module.Settings = type("Settings", (KwargsHandler,), {})
    spec = Spec(
        "another", handlers={"settings": "of_another_package:Settings"}, schedulers={"JOB": "of_another_package"}
    )
    monkeypatch.setitem(sys.modules, "of_another_package", module)
    monkeypatch.setattr(extension, "third_parties", lambda: (spec,))
    handler = module.Settings()
    assert sort_handlers([handler])["settings"] is handler
    assert schedulers({"JOB": "1"}) == [module]


def test_an_optimizer_that_no_accelerator_prepared_is_refused_where_steps_are_traced(trained):
    _, _, optimizer, *_ = trained
    for other in (AcceleratedOptimizer(optimizer.optimizer), pickle.loads(pickle.dumps(optimizer))):
        other.step()
        other.accelerator_state = SimpleNamespace(distributed_type="XLA")
        with pytest.raises(RuntimeError, match="no Accelerator of this process has prepared"):
            other.step()


def test_each_folder_has_a_row_a_spec_and_a_readme():
    folder = Path(extension.__file__).parent / "extensions"
    rows = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert rows == {spec.name for spec in extension.specs()}
    assert [name for name in sorted(rows) if not (folder / name / "README.md").exists()] == []


def test_declarations_and_table_are_up_to_date():
    tool = Path(__file__).parents[2] / "tools" / "extensions.py"
    checked = subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
