"""`docs/support.md` is what the record says, and the record has the cells that are tested."""

import pytest


@pytest.fixture(autouse=True)
def compared(tables):
    if tables.recording:
        pytest.skip("the record is being written")


def test_no_cell_is_missing_or_stale(tables):
    for table, known in tables.known.items():
        recorded = tables.record[table]
        rows = [(row, list(cells)) for row, cells in recorded["rows"].items()]
        assert rows == list(known["rows"].items())
        assert recorded["legend"] == known["legend"]


def test_page_is_rendered_from_the_record(page):
    rendered, written = page
    assert rendered == written
