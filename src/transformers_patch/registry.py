"""The patched symbols of packages, the releases they are for, and the reasons.

Every patch has one entry here. Before anything is changed, the release is compared with the entry's range, and the code
with the shape that the patch needs. So an unknown release is refused instead of half patched.
"""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from packaging.specifiers import SpecifierSet

from transformers_patch.errors import UnsupportedVersion


@dataclass(frozen=True)
class Finding:
    """The result of comparing the installed code.

    Attributes:
        problems: differences from the shape that the patch needs; empty if the shape is known.
        needed: whether the fault exists, so that the patch is needed.
    """

    problems: tuple[str, ...]
    needed: bool


@dataclass(frozen=True)
class Entry:
    """One patched symbol.

    Attributes:
        name: short name, as `status` shows it.
        target: dotted path of the patched symbol.
        package: the distribution it belongs to.
        versions: the releases whose shape the patch was written for, as a version specifier.
        tested: the releases that the tests run against.
        reason: the fault that it fixes.
        module: the module of this package with `examine(module) -> Finding` and `install(module, strategy, undo)`, or with
            `PATCHES`, a dictionary of objects with both methods.
        part: its part: "state", which `apply` always patches, "checkpoints" or "losses".
    """

    name: str
    target: str
    package: str
    versions: str
    tested: tuple[str, ...]
    reason: str
    module: str
    part: Literal["state", "checkpoints", "losses"] = "state"

    def patch(self) -> Any:
        """Import what examines and patches the target."""
        module = importlib.import_module(self.module)
        return module if self.part == "state" else module.PATCHES[self.name]

    def import_target(self) -> ModuleType:
        """Import the module that holds the target.

        Raises:
            ImportError: the package is not installed.
            UnsupportedVersion: the installed release has no such module.
        """
        try:
            return importlib.import_module(self.target.partition(":")[0])
        except ModuleNotFoundError as error:
            if (error.name or "").startswith(f"{self.package}."):
                raise UnsupportedVersion(
                    f"{self.package} {self.version()} has no module {error.name}, and the patch of {self.target} was written "
                    f"for {self.versions}. Nothing was changed."
                ) from error
            if error.name != self.package:
                raise
            raise ImportError(
                f"{self.package} is not installed, so there is nothing to patch. Run `pip install {self.package}`."
            ) from error

    def version(self) -> str:
        """Return the release that is installed, as the package itself tells it."""
        return str(importlib.import_module(self.package).__version__)

    def check(self) -> Finding:
        """Compare the installed release and the shape of its code with those of the patch.

        Returns:
            A finding without problems, which says whether the patch is needed.

        Raises:
            ImportError: the package is not installed.
            UnsupportedVersion: the release is outside the range, or the code has another shape.
        """
        target, version = self.import_target(), self.version()
        if not SpecifierSet(self.versions).contains(version, prereleases=True):
            raise UnsupportedVersion(
                f"{self.package} {version} is installed; the patch of {self.target} was written for {self.versions}. "
                f"Nothing was changed. Install a release of that range, or a newer transformers_patch."
            )
        finding: Finding = self.patch().examine(target)
        if finding.problems:
            raise UnsupportedVersion(
                f"{self.package} {version}: {self.target} has not the shape that the patch relies on. Found: "
                f"{'; '.join(finding.problems)}. Nothing was changed. Install one of the tested releases "
                f"({', '.join(self.tested)}), or a newer transformers_patch."
            )
        return finding


_RELEASES = {
    "state": (">=4.46,<6", ("4.46.3", "4.57.6", "5.0.0", "5.23.0", "5.24.0"), "transformers_patch.training_args"),
    "checkpoints": (
        ">=4.46,<6",
        ("4.46.3", "4.57.6", "5.0.0", "5.23.0", "5.24.0"),
        "transformers_patch.checkpoints.patches",
    ),
    "losses": (">=5.23,<6", ("5.23.0", "5.24.0"), "transformers_patch.losses"),
}


def _entry(part: Any, name: str, target: str, reason: str) -> Entry:
    versions, tested, module = _RELEASES[part]
    return Entry(name, f"transformers.{target}", "transformers", versions, tested, reason, module, part)


# One row for each patched symbol.
ENTRIES = (
    _entry("state", "training_args", "training_args:TrainingArguments._setup_devices",
           "every TrainingArguments resets the accelerator state that all Accelerators share (transformers#40376)"),
    _entry("checkpoints", "save_checkpoint", "trainer:Trainer._save_checkpoint",
           "the Trainer writes into the final folder, so that a run killed meanwhile leaves a part of a checkpoint"),
    _entry("checkpoints", "build", "trainer:Trainer.__init__",
           "it refuses to save the optimizer of a model that arrives sharded"),
    _entry("checkpoints", "train", "trainer:Trainer.train",
           "resume_from_checkpoint=True takes the highest number, complete or not, on each rank separately"),
    _entry("checkpoints", "last_checkpoint", "trainer_utils:get_last_checkpoint",
           "it returns the highest number, whole or not"),
    _entry("losses", "loss", "trainer:Trainer.compute_loss",
           "the auxiliary loss of experts is added once for each replica and micro-batch, of parts of sequences; smoothed labels are not "
           "shifted under FSDP2"),
    _entry("losses", "loss_items", "trainer:Trainer._get_num_items_in_batch",
           "tokens of one rank are divided by tp_size with average_tokens_across_devices=False"),
    _entry("losses", "loss_context", "trainer:Trainer._prepare_context_parallel_inputs",
           "sequences are not shared with sp_size and this fork's backend, and the loss counts each of them sp_size times"),
    _entry("losses", "loss_length", "trainer:Trainer.set_initial_training_values",
           "an epoch is taken for sp_size times as long as it is with this fork's backend"),
    _entry("losses", "loss_replicas", "distributed.tensor_parallel:ReplicatedWithGradAllReduce.install_forward",
           "gradients of norms of heads are added up over tp_size ranks again in each further micro-batch"),
)  # fmt: skip
