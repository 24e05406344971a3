"""The documentation site: what is generated for it, and every page in a browser."""

import functools
import http.server
import json
import os
import re
import select
import shutil
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

# The models are tiny: on two threads of a busy machine they take far longer.
pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture
def generate(monkeypatch):
    """The modules that make pages, as mkdocs imports them."""
    import importlib

    monkeypatch.syspath_prepend(str(DOCS / "generate"))
    return importlib.import_module


def built_in():
    from kvcompress.plugins import registry

    found = registry().policies.items()
    return [name for name, entry in found if entry.distribution == "kvcompress"]


def test_every_built_in_policy_has_a_page_with_advice_and_a_picture(generate):
    pages = generate("policy_pages")
    for name in built_in():
        path = DOCS / "policies" / f"{name}.md"
        assert path.is_file(), f"write docs/policies/{name}.md, as the others are"
        pages.check(name, path.read_text())
        assert (DOCS / "pictures" / f"{name}.png").is_file(), f"make pictures ONLY={name}"
    pages.table((DOCS / "policies" / "index.md").read_text())
    strange = {path.stem for path in (DOCS / "policies").glob("*.md")} - {"index", *built_in()}
    assert not strange


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda text: text.replace("## When not to", "## When"), r"headings must be"),
        (lambda text: re.sub(r"(## What it costs\n).*", r"\1\nLittle.\n", text, flags=re.S),
         r"says next to nothing: 'Little\.'"),
        (lambda text: text.replace("pictures/tova.png", "pictures/h2o.png"), r"picture is missing"),
        (lambda text: text.replace("# tova", "# TOVA"), r"must begin with the title '# tova'"),
    ],
)  # fmt: skip
def test_a_page_without_advice_is_refused(generate, change, match):
    pages = generate("policy_pages")
    text = (DOCS / "policies" / "tova.md").read_text()
    with pytest.raises(ValueError, match=match):
        pages.page("tova", change(text))


def test_a_policy_page_has_the_docstring_and_all_fields(generate):
    from kvcompress import H2OPolicy

    pages = generate("policy_pages")
    page = pages.page("h2o", (DOCS / "policies" / "h2o.md").read_text())
    for field, info in H2OPolicy.model_fields.items():
        assert f"| `{field}` |" in page and info.description in page
    assert "| `recent_ratio` | `0.5` | ≥ 0, < 1 |" in page
    assert "| `normalize` | `none` | `none`, `observers` |" in page
    assert "| `capacity` | `2048` | ≥ 1 or a list, one a layer |" in page
    assert "| `protect` |  | ranges of tokens |" in page
    assert "| `fair` |  | ranges of tokens |" in page
    assert "**Source.** Zhang et al. 2023, [arXiv:2306.14048](https://arxiv.org/abs/2306" in page
    assert "**Differs.** sums are per KV head" in page


def test_the_interface_page_has_every_public_name(generate):
    import kvcompress
    import kvcompress.testing

    page = generate("api_page").page()
    named = re.findall(r"^::: \S*?(\w+)$", page, re.M)
    assert set(kvcompress.__all__) | set(kvcompress.testing.__all__) <= set(named)
    assert len(named) == len(set(named))


def test_a_public_name_that_is_in_no_subject_is_found(generate, monkeypatch):
    import kvcompress

    monkeypatch.setattr(kvcompress, "__all__", [*kvcompress.__all__, "__version__"])
    with pytest.raises(ValueError, match=r"__version__: public, but in no subject"):
        generate("api_page").page()


def test_the_page_of_commands_has_every_option(generate, call):
    from typer.main import get_command

    from kvcompress.cli import app

    page = generate("command_page").page()
    commands = get_command(app).commands
    assert {"generate", "policies", "show", "compare", "plan"} <= set(commands)
    sections = dict(
        zip(*[iter(re.split(r"^## `kvcompress (\S+)`\n", page, flags=re.M)[1:])] * 2, strict=True)
    )
    assert list(sections) == sorted(commands)
    for name, command in commands.items():
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name != "help":
                assert max(parameter.opts, key=len) in sections[name]


def test_links_that_leave_the_documents_lead_to_pages(generate):
    pytest.importorskip("mkdocs")
    hooks = generate("hooks")
    text = (
        "[a](../README.md#b) [c](policies.md) [d](../examples/kvcompress-random)\n"
        "```\n[e](../LICENSE)\n```\n"
    )
    assert hooks._with_site_links(text, "docs/x.md") == (
        "[a](repository/overview.md#b) [c](policies.md) "
        "[d](repository/examples/kvcompress-random.md)\n```\n[e](../LICENSE)\n```\n"
    )
    inner = hooks._with_site_links("![p](docs/results/demo.png) [q](docs/policies.md)", "README.md")
    assert inner == "![p](../results/demo.png) [q](../policies.md)"
    assert hooks._outside_links(text, "docs/x.md") == [
        "README.md", "examples/kvcompress-random/README.md",
    ]  # fmt: skip


def numbers_of(path):
    """The digest that a picture carries."""
    found = re.search(rb"Description\0numbers ([0-9a-f]{64})", path.read_bytes())
    return found and found[1].decode()


def test_pictures_show_the_numbers_that_were_measured(generate):
    import numpy

    pictures = generate("pictures")
    numbers = dict(numpy.load(pictures.NUMBERS))
    subjects = [*pictures.MEASURES, *built_in()]
    assert {name.split(".")[0] for name in numbers} == set(subjects)
    for subject in subjects:
        assert numbers_of(pictures.FOLDER / f"{subject}.png") == pictures.digest(numbers, subject)
    assert {path.stem for path in pictures.FOLDER.glob("*.png")} == set(subjects)


def compare(found, stored):
    import numpy

    assert found
    for name, values in found.items():
        difference = numpy.abs(values.astype(float) - stored[name].astype(float))
        # Another processor may round a tie in another way.
        assert difference.mean() <= 0.01 * max(1.0, float(numpy.abs(stored[name]).max())), name


@pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")
@pytest.mark.parametrize("subject", ["course", "attention", "positions", "padding"])
def test_small_runs_give_the_stored_numbers(generate, subject):
    import numpy

    pictures = generate("pictures")
    compare(pictures.MEASURES[subject](), dict(numpy.load(pictures.NUMBERS)))


@pytest.mark.model
@pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")
def test_votes_of_real_weights_give_the_stored_numbers(generate):
    import numpy

    pictures = generate("pictures")
    compare(pictures.measure_votes(), dict(numpy.load(pictures.NUMBERS)))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")
def test_policies_on_real_weights_give_the_stored_numbers(generate):
    import numpy

    pictures = generate("pictures")
    stored = dict(numpy.load(pictures.NUMBERS))
    for name in built_in():
        compare(pictures.measure_policy(name), stored)


PATIENCE = 300
"""Seconds for an answer of Chromium: a page takes one, and a hundred on a machine that is busy."""

# Chromium reads file 3 and writes file 4; by way of high numbers, so that neither is in the way.
AS_3_AND_4 = """
import fcntl, os, sys
high = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 20) for each in sys.argv[1:3]]
for number, each in zip((3, 4), high):
    os.dup2(each, number)
os.execvp(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """Headless Chromium, spoken to through its debugging pipe."""

    def __init__(self, program, profile):
        # Every other host fails to resolve; an attempt to reach one is an event all the same.
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        options += ["--disable-background-networking", "--remote-debugging-pipe"]
        options += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        options += [f"--user-data-dir={profile}", "about:blank"]
        their_in, self.out = os.pipe()
        self.into, their_out = os.pipe()
        command = [sys.executable, "-c", AS_3_AND_4, str(their_in), str(their_out), program]
        self.process = subprocess.Popen(
            [*command, *options],
            pass_fds=(their_in, their_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        self.rest, self.count, self.session, self.events = b"", 0, None, []
        [page] = [
            each for each in self.ask("Target.getTargets")["targetInfos"] if each["type"] == "page"
        ]
        attached = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def message(self, until):
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.into], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium says nothing.")
            got = os.read(self.into, 1 << 20)
            if not got:
                raise ConnectionError("Chromium ended.")
            self.rest += got
        text, self.rest = self.rest.split(b"\0", 1)
        return json.loads(text)

    def ask(self, method, **parameters):
        self.count += 1
        call = {"id": self.count, "method": method, "params": parameters}
        if self.session:
            call["sessionId"] = self.session
        os.write(self.out, json.dumps(call).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while True:
            found = self.message(until)
            if found.get("id") == self.count:
                assert "error" not in found, (method, found)
                return found["result"]
            self.events.append(found)

    def open(self, url):
        """Load a page and everything in it; gives the events that came with it."""
        self.events = []
        self.ask("Page.navigate", url=url)
        until = time.monotonic() + PATIENCE
        while not any(each.get("method") == "Page.loadEventFired" for each in self.events):
            self.events.append(self.message(until))
        return self.events

    def value(self, expression):
        found = self.ask(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def close(self):
        self.process.terminate()
        self.process.wait(timeout=60)
        os.close(self.out)
        os.close(self.into)


needs_mkdocs = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
    reason="mkdocs is not installed: pip install 'kvcompress[docs]'",
)
needs_browser = pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="no Chromium")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site):
    """Where the site is served."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    handler = functools.partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = next(filter(None, map(shutil.which, BROWSERS)))
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


# What a reader would notice: pictures that are not there, and where links lead.
LOOK = """(async () => {
  for (const image of document.images) image.loading = "eager";
  await Promise.all([...document.images].map((image) => image.decode().catch(() => 0)));
  return {
    broken: [...document.images].filter((i) => !i.naturalWidth).map((i) => i.src),
    links: [...document.links].map((link) => link.href),
    anchors: [...document.querySelectorAll("[id]")].map((each) => each.id),
    wide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
    title: document.querySelector("h1").textContent,
  };
})()"""


def complaints(events, address):
    """Requests that leave the site or fail, and what the console says."""
    found = []
    for event in events:
        method, facts = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            url = facts["request"]["url"]
            if not url.startswith((f"{address}/", "file:", "data:", "blob:", "about:")):
                found.append(f"asks for {url}")
        elif method == "Network.responseReceived" and facts["response"]["status"] >= 400:
            found.append(f"{facts['response']['status']} {facts['response']['url']}")
        elif method == "Network.loadingFailed" and not facts.get("canceled"):
            found.append(f"failed: {facts['errorText']}")
        elif method == "Runtime.exceptionThrown":
            found.append(f"exception: {facts['exceptionDetails'].get('text')}")
        elif method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "assert"):
            found.append(f"console: {facts['args']}")
        elif method == "Log.entryAdded" and facts["entry"]["level"] == "error":
            found.append(f"log: {facts['entry']['text']}")
    return found


@needs_mkdocs
@needs_browser
@pytest.mark.slow
def test_every_page_in_a_browser(site, address, browser):
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    assert len(pages) > 20
    seen, wrong = {}, []
    for page in pages:
        events = list(browser.open(f"{address}/{page}"))
        seen[page] = browser.value(LOOK)
        wrong += [f"{page}: {each}" for each in complaints([*events, *browser.events], address)]
        wrong += [f"{page}: no picture {each}" for each in seen[page]["broken"]]
        if seen[page]["wide"]:
            wrong.append(f"{page}: wider than the window")
    for page, found in seen.items():
        for link in found["links"]:
            if not link.startswith(address):
                continue
            parts = urlsplit(link)
            path = unquote(parts.path).lstrip("/") or "index.html"
            if path in seen:
                anchor = unquote(parts.fragment)
                if anchor and anchor not in seen[path]["anchors"]:
                    wrong.append(f"{page}: no anchor {path}#{anchor}")
            elif not (site / path).is_file():
                wrong.append(f"{page}: no page {path}")
    assert not wrong, "\n".join(wrong)


@needs_mkdocs
@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("served", [True, False], ids=["served", "from the file system"])
def test_search_finds_without_network(site, address, browser, served):
    start = f"{address}/index.html" if served else (site / "index.html").as_uri()
    events = list(browser.open(f"{start}?q=protect"))
    found = browser.value(
        """(async () => {
          for (let tries = 0; tries < 2000; tries++) {
            const links = [...document.querySelectorAll(".md-search-result__link")];
            if (links.length) return links.map((link) => link.href);
            await new Promise((done) => setTimeout(done, 100));
          }
          return [];
        })()"""
    )
    assert any("policies.html" in link for link in found)
    requests = [
        event["params"]["request"]["url"]
        for event in [*events, *browser.events]
        if event.get("method") == "Network.requestWillBeSent"
    ]
    assert all(url.startswith((address, "file:", "data:", "blob:")) for url in requests)
