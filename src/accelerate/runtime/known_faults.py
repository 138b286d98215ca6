"""Releases of other packages that compute something wrong and say nothing, and the runs that they concern."""

import contextlib
import importlib.metadata
from collections.abc import Collection
from dataclasses import dataclass

from accelerate._warn import warn_user
from accelerate.utils.versions import installed_version


@dataclass(frozen=True)
class Fault:
    """What releases of a package do wrong.

    Attributes:
        package: the distribution.
        releases: a specifier of versions, PEP 440.
        runs: which runs it concerns: a word that `warn` is called with.
        what: goes wrong.
        instead: what to use.
        source: a public report.
    """

    package: str
    releases: str
    runs: str
    what: str
    instead: str
    source: str

    def __str__(self) -> str:
        return f"{self.package} {installed_version(self.package)}: {self.what}. Use {self.instead}. See {self.source}"


ZERO_2, ZERO_2_BF16, OPTIMIZER_8BIT, MODEL_8BIT = "zero 2", "zero 2 in bf16", "8-bit optimizer", "8-bit model"
FAULTS = (
    Fault(
        *("deepspeed", ">=0.17.6,<0.18.3", ZERO_2, "with ZeRO stage 2 gradients are too small"),
        *("0.18.3 or newer, or stage 3", "https://github.com/deepspeedai/DeepSpeed/issues/7718"),
    ),
    Fault(
        *("deepspeed", ">=0.18.3,<=0.19.3", ZERO_2_BF16),
        "with ZeRO stage 2 in bf16 on several ranks a part of the gradient is lost where a module is called more than once in a step",
        *("another release or stage for such a model", "https://github.com/deepspeedai/DeepSpeed/issues/8224"),
    ),
    Fault(
        *("bitsandbytes", ">=0.36,<0.41.1", OPTIMIZER_8BIT),
        "8-bit optimizers round wrongly, and the loss may become NaN",
        *("0.41.1 or newer", "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/152"),
    ),
    Fault(
        *("bitsandbytes", "==0.48.0", MODEL_8BIT, "models that were saved in 8 bits compute nonsense"),
        *("0.48.1 or newer", "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1775"),
    ),
)
_said: set[Fault] = set()


def installed() -> list[Fault]:
    """Return the faults of the releases that are installed here."""
    from packaging.specifiers import SpecifierSet

    found = []
    for fault in FAULTS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            if SpecifierSet(fault.releases).contains(installed_version(fault.package).base_version):
                found.append(fault)
    return found


def warn(runs: Collection[str]) -> None:
    """Warn, once in a process, of the faults of installed releases that concern such runs."""
    for fault in installed() if runs else ():
        if fault.runs in runs and fault not in _said:
            _said.add(fault)
            warn_user(str(fault))
