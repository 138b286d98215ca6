"""Run the scripts that are named on the command line, one after the other, in the processes of one launch."""

import pathlib
import runpy
import sys
import time

from accelerate.state import PartialState

HERE = pathlib.Path(__file__).parent

if __name__ == "__main__":
    names, sys.argv[1:] = sys.argv[1:], []
    for name in names:
        start = time.monotonic()
        runpy.run_path(str(HERE / name), run_name="__main__")
        if PartialState().is_main_process:
            print(f"done {name} in {time.monotonic() - start:.1f} s", flush=True)
