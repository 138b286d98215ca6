"""Local SGD: ranks train on their own for some steps and then average their weights."""

from accelerate.extension import Spec

SPEC = Spec("local_sgd")
