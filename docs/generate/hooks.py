"""What mkdocs calls while it builds the site: generated pages, and links that leave docs/.

docs/ is read on GitHub too, so its pages link to files of the repository by relative paths. Here
those files become pages of the site. Pages that are nothing but code written out (the command line,
the Python interface, every policy's fields) are made when the site is built.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import api_page
import command_page
import policy_pages
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
OUTSIDE = "repository"
"""The site's folder for files of the repository that are not in docs/."""
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".sh": "sh"}

LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


def on_config(config: Any) -> Any:
    """Write out the navigation's `DIR/*` entries."""
    named = set(_leaves(config.nav))
    config.nav = _written_out(config.nav, named)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what is generated, and the files of the repository that pages link to."""
    files.append(File.generated(config, "commands.md", content=command_page.page()))
    files.append(File.generated(config, "api.md", content=api_page.page()))
    waiting = [
        (f"docs/{file.src_uri}", Path(str(file.abs_src_path)).read_text(encoding="utf-8"))
        for file in files.documentation_pages()
        if file.abs_src_path
    ]
    waiting += [(name, (ROOT / name).read_text(encoding="utf-8")) for name in _always()]
    done: set[str] = set()
    while waiting:
        source, text = waiting.pop()
        if not _in_site(source) and source not in done:
            done.add(source)
            uri = _site_path(source)
            content = text if source.endswith(".md") else _listing(source, text)
            files.append(File.generated(config, uri, content=_with_site_links(content, source)))
        for target in _outside_links(text, source) if source.endswith(".md") else ():
            if target not in done:
                waiting.append((target, (ROOT / target).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Complete the pages of policies, and lead links out of docs/ to pages of the site."""
    source = page.file.src_uri
    if source.startswith("policies/"):
        name = Path(source).stem
        try:
            markdown = (
                policy_pages.table(markdown)
                if name == "index"
                else policy_pages.page(name, markdown)
            )
        except ValueError as error:
            raise PluginError(f"docs/{source}: {error}") from None
    if page.file.abs_src_path and not page.file.generated_by:
        markdown = _with_site_links(markdown, f"docs/{source}")
    return markdown


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for each in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from _leaves(each)


def _written_out(nav: Any, named: set[str]) -> Any:
    if isinstance(nav, dict):
        return {title: _written_out(each, named) for title, each in nav.items()}
    if isinstance(nav, str):
        return _pages(nav, named) if nav.endswith("*") else nav
    found: list[Any] = []
    for each in nav:
        made = _written_out(each, named)
        found += made if isinstance(each, str) and isinstance(made, list) else [made]
    return found


def _pages(pattern: str, named: set[str]) -> list[str]:
    """The pages that a pattern stands for, in order of name."""
    if pattern == "examples/*":
        found = [_site_path(name) for name in _examples()]
    else:
        docs = ROOT / "docs"
        found = [path.relative_to(docs).as_posix() for path in docs.glob(f"{pattern}.md")]
    return sorted(set(found) - named)


def _examples() -> list[str]:
    """READMEs of examples in folders, and examples of one file."""
    folder = ROOT / "examples"
    found = [*folder.glob("*/README.md"), *folder.glob("*.md"), *folder.glob("*.py")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def _always() -> list[str]:
    """Files of the repository that are pages whether linked to or not."""
    return ["README.md", "benchmarks/README.md", "CHANGELOG.md", "CONTRIBUTING.md", *_examples()]


def _in_site(source: str) -> bool:
    """Whether a file of the repository is part of the site as it is."""
    return source.startswith("docs/") and not source.startswith("docs/generate/")


def _site_path(source: str) -> str:
    """Where a file of the repository is in the site."""
    if _in_site(source):
        return source.removeprefix("docs/")
    path = posixpath.join(OUTSIDE, source)
    if source == "README.md":
        return posixpath.join(OUTSIDE, "overview.md")
    if source.endswith("/README.md"):
        # Under its own name it would be the front page of its section.
        return posixpath.dirname(path) + ".md"
    return path if source.endswith(".md") else f"{path}.md"


def _listing(source: str, text: str) -> str:
    """A page that shows a file's text."""
    language = LANGUAGES.get(Path(source).suffix, "text")
    title = source.removeprefix("examples/")
    return f"# {title}\n\n````{language}\n{text.rstrip()}\n````\n"


def _resolved(target: str, source: str) -> str | None:
    """The file of the repository that a link of a file means; None for any other link."""
    path = target.partition("#")[0]
    if not path or re.match(r"[a-z]+:", path):
        return None
    found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if (ROOT / found).is_dir() and (ROOT / found / "README.md").is_file():
        found = posixpath.join(found, "README.md")
    return found


def _outside_links(text: str, source: str) -> list[str]:
    """Files of the repository out of docs/ that a page links to."""
    found = []
    for _, target, _ in LINK.findall(FENCE.sub("", text)):
        path = _resolved(target, source)
        if path is None or _in_site(path):
            continue
        if (ROOT / path).is_file() and _is_text(ROOT / path):
            found.append(path)
    return found


def _is_text(path: Path) -> bool:
    return b"\0" not in path.read_bytes()[:1000]


def _with_site_links(text: str, source: str) -> str:
    """A page's text with links to files of the repository led to the site's pages of them."""
    here = posixpath.dirname(_site_path(source))

    def lead(link: re.Match[str]) -> str:
        path = _resolved(link[2], source)
        if path is None or (_in_site(source) and _in_site(path)) or not (ROOT / path).is_file():
            return link[0]
        anchor = "".join(link[2].partition("#")[1:])
        return link[1] + posixpath.relpath(_site_path(path), here or ".") + anchor + link[3]

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(lead, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(lead, text[end:])])
