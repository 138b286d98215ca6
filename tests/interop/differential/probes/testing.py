"""Comparisons of `accelerate.test_utils`: which tests run, and what the helpers give."""

import os
import sys
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import accelerate
from accelerate import Accelerator, test_utils
from accelerate.test_utils import examples, testing, training
from interop.differential.core import call, probe
from interop.differential.probes.launching import listed

REQUIRES = listed(
    "aim bnb clearml comet_ml cpu cuda cuda_or_hpu cuda_or_xpu datasets deepspeed dvclive fp16 fp8 fsdp2 huggingface_suite import_timer matplotlib "
    "mlflow mlu mps multi_device multi_gpu multi_gpu_or_xpu multi_xpu musa neuron non_cpu non_hpu non_torch_xla non_xpu npu pandas peft pippy "
    "schedulefree sdaa single_device single_gpu single_xpu swanlab tensorboard timm torchao torchdata_stateful_dataloader torchvision tp tpu "
    "trackers trackio transformer_engine transformer_engine_mxfp8 transformers triton wandb xpu"
)
DECORATORS = [*(f"require_{name}" for name in REQUIRES), "run_first", "skip", "slow"]


def outcome(case: type[unittest.TestCase]) -> list[Any]:
    """Run a test case; return how many tests ran, were skipped and failed."""
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    return [result.testsRun, len(result.skipped), len(result.failures), len(result.errors)]


def decorated(decorator: Any) -> Any:
    """Put a decorator on a method, a class and a function."""

    class Case(unittest.TestCase):
        def test_it(self) -> None:
            pass

        test_it = decorator(test_it)

        def test_plain(self) -> None:
            pass

    yield "method", outcome(Case)

    @decorator
    class Whole(unittest.TestCase):
        def test_it(self) -> None:
            pass

    yield "class", outcome(Whole)

    def function(value: int = 1) -> int:
        """Say it."""
        return value

    changed = decorator(function)
    yield "name", [changed.__name__, changed.__doc__]
    yield "order", getattr(changed, "order", None) or sorted(m.name for m in getattr(changed, "pytestmark", []))
    yield "call", changed(2)


@probe(*(f"test_utils.testing:{name}" for name in DECORATORS), name=DECORATORS, variables=[{}, {"RUN_SLOW": "1"}])  # fmt: skip
def requirements(name: str, variables: dict[str, str]) -> Any:
    os.environ.update(variables)
    yield from decorated(getattr(testing, name))


@probe(
    "test_utils.testing:require_torch_min_version", version=["1.0", "2.0", "2.13", "99", "2.13.0", "", None, "x", 2]
)
def torch_version(version: Any) -> Any:
    yield from decorated(testing.require_torch_min_version(version=version))


def truth(value: Any) -> Any:
    """Let 1 be the same as True."""
    return bool(value) if value in (0, 1) else value


@probe(
    "test_utils.testing:parse_flag_from_env",
    value=["1", "0", "true", "FALSE", "yes", "No", "on", "off", "y", "N", "t", "f", "", "what", "2", " true", None],
    default=[True, False, None, "x", 3],
)  # fmt: skip
def flags(value: str | None, default: Any) -> Any:
    if value is not None:
        os.environ["SOME_FLAG"] = value
    return truth(testing.parse_flag_from_env("SOME_FLAG", default))


@probe("test_utils.testing:get_backend", "test_utils.testing:get_backend.<locals>.<lambda>")
def backend() -> Any:
    device, count, memory = testing.get_backend()
    yield "device", [device, count, memory()]
    yield "names", [testing.torch_device, testing.device_count, test_utils.torch_device, test_utils.device_count]


@probe("test_utils.testing:get_launch_command")
def default_command() -> Any:
    return [testing.DEFAULT_LAUNCH_COMMAND, test_utils.DEFAULT_LAUNCH_COMMAND]


@probe(
    "test_utils.testing:path_in_accelerate_package",
    parts=[
        (), ("test_utils",), ("test_utils", "scripts", "test_script.py"), ("",), ("..",), ("no", "such"), (1,),
        (None,), ("a/b",),
    ],
)  # fmt: skip
def package_path(parts: tuple[Any, ...]) -> Any:
    path = testing.path_in_accelerate_package(*parts)
    root = Path(accelerate.__file__).resolve().parent
    return [type(path).__name__, os.path.relpath(os.path.realpath(path), root), path.exists()]


@probe(
    "test_utils.testing:run_command",
    command=[
        [sys.executable, "-c", "print('ü')"], [sys.executable, "-c", "import os; print(os.environ.get('A'))"],
        [sys.executable, "-c", "raise SystemExit(3)"], ["no-such-program"], [Path(sys.executable), "-c", "print(1)"],
        [],
    ],
    out=[False, True], env=[None, {"A": "1"}],
)  # fmt: skip
def commands(command: list[Any], out: bool, env: dict[str, str] | None) -> Any:
    return testing.run_command(command, return_stdout=out, env={**os.environ, **env} if env else None)


@probe("test_utils.testing:SubprocessCallException")
def command_error() -> Any:
    error = testing.SubprocessCallException("text")
    return [error, str(error), isinstance(error, Exception)]


@probe(
    "test_utils.testing:execute_subprocess_async",
    code=[
        "print('a'); print('b')", "import sys; print('x', file=sys.stderr)",
        "import sys; print('e', file=sys.stderr); sys.exit(2)", "print('only out'); raise SystemExit(1)", "pass",
    ],
    more=[{}, {"quiet": True, "echo": False}, {"timeout": 60}],
)  # fmt: skip
def subprocesses(code: str, more: dict[str, Any]) -> Any:
    result = testing.execute_subprocess_async([sys.executable, "-c", code], env=dict(os.environ), **more)
    return [result.returncode, result.stdout, result.stderr]


@probe(
    "test_utils.testing:pytest_xdist_worker_id",
    "test_utils.testing:get_torch_dist_unique_port",
    worker=[None, "gw0", "gw3", "gw12", "master", "", "3"],
)
def workers(worker: str | None) -> Any:
    os.environ.pop("PYTEST_XDIST_WORKER", None)
    if worker is not None:
        os.environ["PYTEST_XDIST_WORKER"] = worker
    yield "number", testing.pytest_xdist_worker_id()
    yield "port", testing.get_torch_dist_unique_port()


@probe(
    "test_utils.testing:assert_exception", expected=[ValueError, Exception, KeyError],
    msg=[None, "text", "other", ""], raised=[None, ValueError("text"), KeyError("text"), RuntimeError("x")],
)  # fmt: skip
def expected_errors(expected: type[BaseException], msg: str | None, raised: Exception | None) -> Any:
    with testing.assert_exception(expected, msg):
        if raised is not None:
            raised.with_traceback(None)
            raise raised
    return "passed"


@probe(
    "test_utils.testing:capture_call_output", text=["a", "a\nb\n", "", "ü"], arguments=[(), (1, 2)],
    more=[{}, {"sep": "-"}],
)  # fmt: skip
def captured(text: str, arguments: tuple[Any, ...], more: dict[str, Any]) -> Any:
    return testing.capture_call_output(print, text, *arguments, **more)


@probe(
    "test_utils.testing:are_the_same_tensors", processes=(1, 2), values=["same", "rank"],
    shape=[(), (3,), (2, 2), (0,)], dtype=[torch.float32, torch.int64, torch.bool, torch.bfloat16],
)  # fmt: skip
def same_tensors(values: str, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    rank = Accelerator(cpu=True).process_index
    return testing.are_the_same_tensors(torch.full(shape, rank if values == "rank" else 1).to(dtype))


@probe("test_utils.testing:AccelerateTestCase")
def accelerate_case() -> Any:
    """Say what is left of the states after a test."""

    class Case(testing.AccelerateTestCase):
        def test_it(self) -> None:
            Accelerator(cpu=True)

    yield "outcome", outcome(Case)
    yield (
        "states",
        [
            accelerate.state.is_initialized(),
            bool(accelerate.state.PartialState._shared_state),
            accelerate.state.GradientState().sync_gradients,
        ],
    )


@probe("test_utils.testing:TempDirTestCase", clear=[None, True, False])
def temporary_case(clear: bool | None) -> Any:
    """Leave files in a test's folder and look for them in the next test."""
    seen: list[Any] = []

    class Case(testing.TempDirTestCase):
        if clear is not None:
            clear_on_setup = clear

        def leave(self) -> None:
            seen.append(sorted(p.name for p in Path(self.tmpdir).iterdir()))
            (Path(self.tmpdir) / f"file{len(seen)}").write_text("")
            (Path(self.tmpdir) / "folder" / "deep").mkdir(parents=True, exist_ok=True)

        test_a = test_b = test_c = leave

    yield "outcome", outcome(Case)
    yield "seen", seen
    yield "kind", [type(Case.tmpdir).__mro__[-2].__name__, os.path.exists(Case.tmpdir)]


@probe("test_utils.testing:MockingTestCase", several=["one", "list", "tuple"])
def mocking_case(several: str) -> Any:
    """Patch in a test; look inside and afterwards."""
    seen: list[Any] = []

    class Case(testing.MockingTestCase):
        def setUp(self) -> None:
            super().setUp()
            patches = [mock.patch.dict(os.environ, {"A_B_C": "1"}), mock.patch("os.getlogin", lambda: "me")]
            self.add_mocks(patches[0] if several == "one" else patches if several == "list" else tuple(patches))

        def test_it(self) -> None:
            seen.append([os.environ.get("A_B_C"), len(self.mocks)])

    yield "outcome", outcome(Case)
    yield "seen", [seen, os.environ.get("A_B_C")]


# ---- examples


BASE = """# a comment
import torch

EPOCHS = 3


def training_function(config, args):
    # build
    accelerator = Accelerator()
    model = build()

    for epoch in range(3):
        train(model)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr")
    args = parser.parse_args()
    training_function({}, args)


if __name__ == "__main__":
    main()
"""
FEATURE = BASE.replace(
    "    model = build()\n", "    model = build()\n    # New: save\n    accelerator.save(model)\n"
).replace('"--lr")\n', '"--lr")\n    parser.add_argument("--new")\n')
COMPLETE = FEATURE.replace("        train(model)\n", "        train(model)\n        log(model)\n")
TEXTS = {
    "base": BASE, "feature": FEATURE, "complete": COMPLETE, "empty": "", "none": "x = 1\n",
    "tabs": BASE.replace("    ", "\t"),
}  # fmt: skip


@probe(
    "test_utils.examples:get_function_contents_by_name",
    text=list(TEXTS),
    name=["main", "training_function", "build", "", None, "Main"],
)
def function_lines(text: str, name: str) -> Any:
    return examples.get_function_contents_by_name(TEXTS[text].splitlines(keepends=True), name)


call(
    "test_utils.examples:clean_lines", "cleaned",
    lines=[
        [], ["a\n"], ["# a\n", "  # b\n", "c # d\n", "\n", "   \n", ""], ["x", " y ", "\t#z"],
        ['"""text"""\n', "#!shebang\n"],
    ],
)  # fmt: skip


@probe(
    "test_utils.examples:compare_against_test", base=["base", "none"], feature=["feature", "base", "complete"],
    parser=[True, False], second=[None, "complete", "feature", "base"],
)  # fmt: skip
def compared(base: str, feature: str, parser: bool, second: str | None) -> Any:
    os.makedirs("examples")
    Path("examples/nlp_example.py").write_text(BASE)
    for name, text in TEXTS.items():
        Path(f"{name}.py").write_text(text)
    return examples.compare_against_test(f"{base}.py", f"{feature}.py", parser, f"{second}.py" if second else None)


# ---- training


@probe("test_utils.training:RegressionDataset", a=[2, 0, -1.5], b=[3, 0], length=[64, 0, 1, 5], seed=[None, 0, 42])
def dataset(a: float, b: float, length: int, seed: int | None) -> Any:
    np.random.seed(7)
    data = training.RegressionDataset(a, b, length, seed)
    yield "length", [len(data), data.length]
    yield "x", data.x if seed is not None else [data.x.shape, str(data.x.dtype)]
    yield "y", data.y if seed is not None else [data.y.shape, str(data.y.dtype)]
    if length:
        yield "item", {k: type(v).__name__ for k, v in data[0].items()}
        yield "noise", bool(np.abs(data.y - a * data.x - b).max() < 1)
    yield "outside", data[length]


@probe(
    "test_utils.training:RegressionModel", a=[0, 2, -1.5], b=[0, 3], double=[False, True],
    x=[None, torch.ones(2), torch.zeros(0), torch.ones(2, dtype=torch.float64)],
)  # fmt: skip
def model(a: float, b: float, double: bool, x: Any) -> Any:
    module = training.RegressionModel(a, b, double)
    yield "state", module.state_dict()
    yield "parameters", [(n, p.requires_grad, list(p.shape)) for n, p in module.named_parameters()]
    yield "attributes", {k: v for k, v in sorted(vars(module).items()) if not k.startswith("_") and k != "training"}
    yield "output", module(x)


@probe(
    "test_utils.training:mocked_dataloaders", "test_utils.training:mocked_dataloaders_for_autoregressive_models",
    which=["", "_for_autoregressive_models"], batch_size=[16, 2],
)  # fmt: skip
def mocked_loaders(which: str, batch_size: int) -> Any:
    """Ask for loaders where the Hub and the repository's data are out of reach."""
    return getattr(training, f"mocked_dataloaders{which}")(Accelerator(cpu=True), batch_size)
