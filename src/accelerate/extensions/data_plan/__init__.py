"""The data plan of a prepared loader: who reads what, in numbers."""

from accelerate.extension import Spec

SPEC = Spec("data_plan", methods={"data_plan": "accelerate.extensions.data_plan.method:data_plan"})
