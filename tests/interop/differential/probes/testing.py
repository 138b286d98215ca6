"""Comparisons of `accelerate.test_utils`: which tests run, and what the helpers give."""

import os
import unittest
from typing import Any

from accelerate.test_utils import testing
from interop.differential.core import probe
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
