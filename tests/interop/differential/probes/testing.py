"""Comparisons of `accelerate.test_utils`: which tests run, and what the helpers give."""

import os
import sys
import unittest
from pathlib import Path
from typing import Any

from accelerate.test_utils import examples, testing
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
