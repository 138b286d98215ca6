"""Parts of a model that some ranks skip in a step."""

from accelerate.extension import Spec

SPEC = Spec("conditional", methods={"conditional": "accelerate.extensions.conditional.conditional:conditional"})
