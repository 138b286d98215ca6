"""Comparisons of `accelerate.test_utils`: which tests run, and what the helpers give."""

import os
import unittest

from accelerate.test_utils import testing
from interop.differential.core import probe, recorded

DECORATORS = recorded("test_utils.testing", r"require_(?!torch_min_version)\w+|run_first|skip|slow")


def outcome(case):
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    return [result.testsRun, len(result.skipped), len(result.failures), len(result.errors)]


def decorated(decorator):
    class Case(unittest.TestCase):
        def test_it(self):
            pass

        test_it = decorator(test_it)

        def test_plain(self):
            pass

    yield "method", outcome(Case)

    @decorator
    class Whole(unittest.TestCase):
        def test_it(self):
            pass

    yield "class", outcome(Whole)

    def function(value=1):
        """Say it."""
        return value

    changed = decorator(function)
    yield "name", [changed.__name__, changed.__doc__]
    yield "order", getattr(changed, "order", None) or sorted(m.name for m in getattr(changed, "pytestmark", []))
    yield "call", changed(2)


@probe(*(f"test_utils.testing:{name}" for name in DECORATORS), name=DECORATORS, variables=[{}, {"RUN_SLOW": "1"}])  # fmt: skip
def requirements(name, variables):
    os.environ.update(variables)
    yield from decorated(getattr(testing, name))
