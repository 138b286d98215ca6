"""The printer of the reports."""

from accelerate.diagnostics.table import table


def test_columns():
    rows = [("xx", "y"), ("z", "wwww")]
    assert table(["A", "BB"], rows, right=["BB"]) == "A     BB\nxx     y\nz   wwww"
    assert table(["A", "BB"], rows, rule=True) == "A   BB\n--  ----\nxx  y\nz   wwww"
    assert table(["A", "BB"], []) == "A  BB"
