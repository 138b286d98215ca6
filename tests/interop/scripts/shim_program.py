"""A script that knows nothing of the patch: it tells how it was started, and whether its arguments share the state."""

import os
import sys
from datetime import timedelta

from shim_tools import build, finish, messages, shared, start, works
from transformers import TrainingArguments

from accelerate.utils import InitProcessGroupKwargs


def main():
    folder, code, *_ = sys.argv[1:]
    # The timeout is chosen where the group is made, and again in the arguments: no disagreement.
    accelerator = start(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=77))])
    with messages() as texts:
        arguments = build(TrainingArguments, folder, ddp_timeout=77)
    if one := shared(accelerator, arguments):
        works(accelerator)
    finish(
        argv=sys.argv, name=__name__, file=__file__, path=sys.path[0],
        main=sys.modules["__main__"].__dict__ is globals(), spec=getattr(__spec__, "name", None), package=__package__,
        folder=os.getcwd(), shared=one, warnings=texts,
    )  # fmt: skip
    sys.exit(int(code))


if __name__ == "__main__":
    main()
