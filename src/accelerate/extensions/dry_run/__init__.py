"""What a launch would start, as text: each process, and the source of each setting."""

from accelerate.extension import Spec

_HERE = "accelerate.extensions.dry_run"

SPEC = Spec("dry_run", options=f"{_HERE}.options", runners={"dry_run": f"{_HERE}.text"})
