"""Parts of a model that some ranks leave out of a step."""

from accelerate.extension import Spec

SPEC = Spec("conditional", methods={"conditional": "accelerate.extensions.conditional.conditional:conditional"})
