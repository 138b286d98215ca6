"""The same calls on this package and on the wheel of 1.15.0 give the same, or differ in a way that the documentation names."""

import inspect
import re

import pytest
import yaml

import accelerate
import accelerate.utils
from architecture import check_api
from interop.differential import compare, core
from interop.differential.meant import MEANT
from interop.differential.record import learnt
from interop.launching import need_peer

# The runs are kept in one process.
pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("differential")]
SUBJECTS = yaml.safe_load((compare.ROOT / "docs" / "differences.yaml").read_text("utf-8"))["subjects"]
TWENTY = re.findall(r"^\| (.+)", (compare.ROOT / "docs" / "differences.md").read_text("utf-8"), re.M)
ROWS = [row["here"] for subject in SUBJECTS for row in subject["rows"]]
LEAST = 10_000
# Public here and unknown to 1.15.0: their own tests hold them.
ONLY_HERE = {"aggregate_loss", "shift_labels"}


def unmeant(found):
    return "\n".join(str(verdict) for verdict in found if not verdict.equal and not verdict.meant)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_nothing_differs_that_is_not_meant(processes):
    need_peer()
    assert not unmeant(compare.compared(processes, whole=False))


@pytest.mark.slow
def test_whole():
    need_peer()
    found = [verdict for processes in (1, 2) for verdict in compare.compared(processes, whole=True)]
    equal = sum(verdict.equal for verdict in found)
    print(f"{equal} of {len(found)} equal, {sum(v.meant is not None for v in found)} meant to differ")
    assert not unmeant(found)
    assert len(found) >= LEAST
    kinds = [(v.case, compare.kind(v.ours), compare.kind(v.peers)) for v in found if not v.equal]
    unused = [meant for meant in MEANT if not any(meant.explains(*difference) for difference in kinds)]
    assert not unused, f"nothing differs any more in these: {unused}"


@pytest.mark.parametrize("row", sorted({meant.row for meant in MEANT}))
def test_meant_differences_have_their_row(row):
    assert any(text.startswith(row) for text in [*ROWS, *TWENTY]), f"no difference begins with {row!r}"


def test_every_public_name_has_a_probe():
    covered = {name for item in core.load() for name in item.covers}
    recorded = {name for name in check_api.load("accelerate-1.15.0.json")["definitions"] if "<" not in name}
    missing = recorded - covered
    assert not missing, f"write a probe in tests/interop/differential/probes/ for {sorted(missing)}"
    names = {name.partition(":")[2] for name in covered}
    new = {name for module in (accelerate, accelerate.utils) for name in own_names(module)} - names
    assert new == ONLY_HERE, f"write a probe for what 1.15.0 has, and list what it has not: {new ^ ONLY_HERE}"


def own_names(module):
    """Return the public functions and classes of this package that a module offers."""
    for name in dir(module):
        found = getattr(module, name, None)  # a name whose library is not installed is listed, too
        home = inspect.getmodule(found) if callable(found) else None
        if home is not None and home.__name__.startswith("accelerate") and not name.startswith("_"):
            yield name


def test_returned_types_and_accepted_words_are_the_recorded_ones():
    need_peer()
    record = check_api.load("values-1.15.0.json")
    cases = {verdict.case.partition(" [rank")[0]: verdict for verdict in compare.compared(1, whole=False)}
    peers = learnt({case: verdict.peers for case, verdict in cases.items()})
    ours = learnt({case: verdict.ours for case, verdict in cases.items() if verdict.equal})
    for found in (peers, ours):
        for name in found.keys() & record.keys():
            entry = found[name]
            assert set(entry["returns"]) <= set(record[name]["returns"]), f"{name}: write the record again (record.py)"
            for parameter, words in entry.get("words", {}).items():
                assert all(word in record[name]["words"][parameter] for word in words), f"{name}: {parameter}"
