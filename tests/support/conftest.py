"""The support table: what every test of this folder says of its cell, and `docs/support.md`.

A test computes one cell; its parameters `row` and `column` name it, the marker names the table:

    @pytest.mark.support("families", legend={"greedy": "One prompt, greedy search."})
    @pytest.mark.parametrize("column", ["greedy", "padded"])
    @pytest.mark.parametrize("row", ["llama", "qwen3"])
    def test_family(cell, row, column):
        with cell:
            output = cell.generate(model, inputs, max_new_tokens=8)
            assert ...

The block gives "yes" if it passes, and the quoted error if one of kvcompress's own is raised before
`cell.generate` has produced a token; anything else fails the test. The outcome must be what
`docs/support.json` has. `make support` records outcomes instead and writes `docs/support.md`.
"""

import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
RECORD, PAGE = DOCS / "support.json", DOCS / "support.md"
TITLES = {"modes": "Ways to generate", "families": "Model families"}
INTRO = """# What is supported

Every cell is a test that is run on each change: ✓ means that what is generated equals the same
model on an uncompressed cache with exactly the evicted entries masked out, or, where no such mask
exists, the same tokens fed one by one under the same policy. A number means that kvcompress
refuses, before any token is generated; the errors are quoted at the end. A dash stands where there
is nothing to try: images for a model without any, sdpa where transformers has none for the model,
and all the rest of a family that is refused at once. Written by `make support`.
"""


def pytest_addoption(parser):
    parser.addoption(
        "--record-support",
        action="store_true",
        help="write docs/support.json and docs/support.md instead of comparing with them",
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "support(table, legend=None): the test computes a cell of docs/support.md"
    )
    # Not known to pytest when this folder is reached only by collecting a larger one.
    config.stash[TABLES] = Tables(config.getoption("record_support", default=False))


# First, so that cells which -k leaves out count as known.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        marker = item.get_closest_marker("support")
        if marker is not None:
            parameters = item.callspec.params
            config.stash[TABLES].expect(
                *marker.args, parameters["row"], parameters["column"], **marker.kwargs
            )


def pytest_sessionfinish(session):
    session.config.stash[TABLES].save()


@pytest.fixture(scope="session")
def tables(pytestconfig):
    return pytestconfig.stash[TABLES]


@pytest.fixture
def page(tables):
    """`docs/support.md` as it should be, and as it is."""
    return render(tables.record), PAGE.read_text()


@pytest.fixture
def cell(request, tables):
    """The cell that a test computes, as a context; see the top of this file."""
    (table,) = request.node.get_closest_marker("support").args
    parameters = request.node.callspec.params
    return Cell(tables, table, parameters["row"], parameters["column"])


class Cell:
    def __init__(self, tables, table, row, column):
        self._tables, self._name = tables, (table, row, column)
        self._puts = 0

    def generate(self, model, inputs, **options):
        """`model.generate`: greedy unless told otherwise, with logits, its tokens counted."""
        self._puts = 0
        options = {"max_new_tokens": 8, "do_sample": False, **options}
        if options.get("num_beams", 1) == 1:  # transformers streams no beams
            options.setdefault("streamer", self)
        output = model.generate(
            **inputs, **options, return_dict_in_generate=True, output_logits=True
        )
        self._puts = 0  # what is refused later is another call
        return output

    def put(self, value):
        """Called by `generate` with the prompt, and then with every token."""
        self._puts += 1

    def end(self):
        """Called by `generate` after the last token."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        from kvcompress import KVCompressError

        if error is None:
            outcome = "yes"
        elif isinstance(error, KVCompressError):
            assert self._puts <= 1, f"refused after {self._puts - 1} tokens: {error}"
            outcome = f"{kind.__name__}: {error}"
        else:
            return False
        self._tables.settle(*self._name, outcome)
        return True


def _is_oldest():
    """Whether this is the oldest transformers; the table is that of the newest."""
    import transformers

    from kvcompress.hosting import TRIED_TRANSFORMERS

    return transformers.__version__.startswith(f"{TRIED_TRANSFORMERS[0]}.")


class Tables:
    """The record, and which cells the collected tests know."""

    def __init__(self, recording):
        self.recording = recording
        self.record = load()
        self.known, self._settled = {}, {}

    def expect(self, table, row, column, legend=None):
        known = self.known.setdefault(table, {"legend": legend or {}, "rows": {}})
        known["rows"].setdefault(row, []).append(column)

    def settle(self, table, row, column, outcome):
        if self.recording:
            self._settled[table, row, column] = outcome
        else:
            recorded = self.record.get(table, {"rows": {}})["rows"].get(row, {}).get(column)
            if _is_oldest() and outcome != "yes":
                outcome = recorded if recorded != "yes" else outcome  # refused in other words
            assert outcome == recorded, "if it should be so, run `make support`"

    def save(self):
        if not self.recording:
            return
        record = load()  # another run may have written since this one began
        for table, known in self.known.items():
            old = record.get(table, {"rows": {}})["rows"]
            rows = {}
            for row, columns in known["rows"].items():
                cells = {
                    column: self._settled.get((table, row, column), old.get(row, {}).get(column))
                    for column in columns
                }
                rows[row] = {column: cell for column, cell in cells.items() if cell is not None}
            record[table] = {"legend": known["legend"], "rows": rows}
        record = {table: record[table] for table in TITLES if table in record}
        RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        PAGE.write_text(render(record))


def load():
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


TABLES = pytest.StashKey[Tables]()


def render(record):
    """`docs/support.md`, from the record."""
    notes, parts = [], [INTRO]

    def shown(outcome):
        if outcome == "yes":
            return "✓"
        if outcome not in notes:
            notes.append(outcome)
        return f"({notes.index(outcome) + 1})"

    for table, content in record.items():
        columns = list(dict.fromkeys(name for row in content["rows"].values() for name in row))
        lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for row, cells in content["rows"].items():
            marks = [shown(cells[name]) if name in cells else "-" for name in columns]
            lines.append(f"| {row} | " + " | ".join(marks) + " |")
        parts.append(f"## {TITLES[table]}\n")
        legend = [f"- {name}: {meaning}" for name, meaning in content["legend"].items()]
        parts += ["\n".join(legend) + "\n"] if legend else []
        parts.append("\n".join(lines) + "\n")
    if notes:
        parts.append("## What is refused\n")
        quoted = [note.split(": ", 1) for note in notes]
        lines = [f"{n}. `{name}`: {text}" for n, (name, text) in enumerate(quoted, 1)]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)
