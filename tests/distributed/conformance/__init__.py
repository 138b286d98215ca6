"""One suite that every strategy passes: the training of one process on the whole batch, however the work is shared.

A strategy joins by adding its name to `strategies.STRATEGIES`; `checks.CHECKS` is what it then has to pass. All strategies of a
number of processes run in one launch (`run.py`), which prints a line for each check; `tests/distributed/test_conformance.py`
launches, and requires these lines.
"""
