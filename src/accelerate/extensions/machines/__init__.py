"""Runs on several machines under torch's elastic launcher."""

from accelerate.extension import Spec

SPEC = Spec("machines", runners={"machines": "accelerate.extensions.machines.runner"})
