"""The public interface: every recorded fact holds."""

import json
import pathlib
import subprocess
import sys

CHECKER = pathlib.Path(__file__).with_name("check_api.py")
FACTS = 3068


def test_every_recorded_fact_holds():
    # a separate process: importing every recorded module must not change the modules that other tests have loaded.
    done = subprocess.run([sys.executable, str(CHECKER), "--json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    scopes = json.loads(done.stdout.splitlines()[-1])
    gaps = [gap for scope in scopes.values() for gap in scope["gaps"]]
    assert not gaps, "\n" + "\n".join(gaps)
    assert sum(scope["facts"] for scope in scopes.values()) >= FACTS, "facts have left the record"
