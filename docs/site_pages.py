"""Hooks of mkdocs for the site of `make docs`: its navigation, and the pages that docs/ does not have.

These are the front page (README.md), the index of all pages, the API by the docstrings of the public names,
the command line by its own help, and the files of the repository to which pages link.
"""

import ast
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import realhf
from realhf.cli.main import COMMANDS, make_parser

ROOT = Path(__file__).parent.parent
INDEX = ROOT / "docs" / "README.md"
FILE_SEARCH = ROOT / "docs" / "assets" / "file_search.js"
_SHIM = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
FRONT = "index.md"
ALL_PAGES = "pages.md"
CLI = "command-line.md"
MADE_FROM = {"README.md": FRONT, "docs/README.md": ALL_PAGES}
"""Files of the repository that the site has as pages of other names."""
API = {
    "running": ("Running, from Python", ("python", "errors")),
    "experiments": ("Experiments, roles and data", ("experiment", "data", "models", "user_input")),
    "algorithms": ("Algorithms and losses", ("algorithms",)),
    "rewards": ("Rewards", ("rewards",)),
    "environments": ("Environments and tools", ("environments",)),
    "steps": ("Steps, hooks and rollouts", ("steps",)),
    "graphs": ("Graphs and calls", ("graph", "calls")),
    "plans": ("Plans, layouts and clusters", ("execution_plan", "layout", "cluster"))}
"""Page of the API -> its title, and the modules and packages whose public names it has."""
_LINK = re.compile(r"(\]\()([^)\s#:]+)([^)\s]*\))")
_LISTED = re.compile(r"^- \[[^]]+\]\(([\w-]+\.md)\)", re.M)
_FENCE = re.compile(r"^ *```")
_ITEM = re.compile(r"([-*]|\d+\.) ")
_COLUMNS = "100"


# Navigation and pages


def groups() -> dict[str, list[str]]:
    """Return the pages of each group of docs/README.md, in its order."""
    _, *parts = re.split(r"^## (.+)$", INDEX.read_text(), flags=re.M)
    return {title: _LISTED.findall(text) for title, text in zip(parts[::2], parts[1::2], strict=True)}


def api_names() -> dict[str, list[str]]:
    """Return the public names on each page of the API, by the modules that define them."""
    names: dict[str, list[str]] = {page: [] for page in API}
    for module, defined in realhf._NAMES.items():
        part = module.split(".")[1]
        (page,) = (page for page, (_, parts) in API.items() if part in parts)
        names[page] += defined
    return names


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the navigation."""
    start, *others = groups().items()
    config.nav = [{start[0]: [{"Front page": FRONT}, *start[1], {"All pages": ALL_PAGES}]}]
    config.nav += [{title: pages} for title, pages in others]
    config.nav[-1][others[-1][0]] += [
        {"Command line": CLI}, {"API": [f"api/{page}.md" for page in API]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that docs/ does not have, in the place of docs/README.md."""
    made = {page: (ROOT / path).read_text() for path, page in MADE_FROM.items()}
    made[CLI] = _command_line()
    for page, names in api_names().items():
        made[f"api/{page}.md"] = _api_page(API[page][0], names)
    linked = {path for text in (*made.values(), *_pages(files)) for path in _repository_files(text)}
    made |= {_source_page(path): _source(path) for path in linked}
    files.remove(next(file for file in files if file.src_uri == INDEX.name))
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files of the repository to pages of the site, and indent lists as mkdocs reads them."""
    made = {page: path for path, page in MADE_FROM.items()}
    uri = page.file.src_uri
    if uri.startswith(("source/", "api/")):
        return markdown
    origin = made.get(uri, f"docs/{uri}")
    return _indented(_LINK.sub(lambda link: f"{link[1]}{_on_site(link[2], origin)}{link[3]}", markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links of the pages that docstrings name."""
    if not page.file.src_uri.startswith("api/"):
        return html
    return re.sub(r"(?<![\w/])docs/([\w-]+)\.md", r'<a href="../\1.html">\1</a>', html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Take our own script for searches of files, in the place of one that the theme loads from a CDN."""
    return _without_shim(output)


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """Do the same for pages that are no documents, such as 404.html."""
    return _without_shim(output_content)


def _without_shim(output: str) -> str:
    return output.replace(_SHIM, f"<script>{FILE_SEARCH.read_text()}</script>")


def _on_site(target: str, origin: str) -> str:
    """Return where a link in a file of the repository leads to on the site, in whose root that file is."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
    if path in MADE_FROM:
        return MADE_FROM[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else _source_page(path)


def _pages(files: Files) -> Iterator[str]:
    return (Path(file.abs_src_path).read_text() for file in files.documentation_pages())


def _repository_files(text: str) -> set[str]:
    """Return the files outside of docs/ to which a page links, of README.md and of the pages in docs/."""
    targets = {posixpath.normpath(link[2].removeprefix("../")) for link in _LINK.finditer(text)}
    return {path for path in targets if path not in MADE_FROM and not path.startswith("docs/")
            and ("/" in path or path == "LICENSE") and (ROOT / path).is_file()}


def _source_page(path: str) -> str:
    return f"source/{path}.md"


def _source(path: str) -> str:
    """Return the page that shows a file of the repository; the search does not look into it."""
    language = Path(path).suffix.removeprefix(".") or "text"
    text = (ROOT / path).read_text()
    return f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n````{language}\n{text}\n````\n"


def _api_page(title: str, names: list[str]) -> str:
    """Return the page with the docstrings of public names, which are imported from `realhf` itself."""
    head = f"# {title}\n\n`from realhf import {names[0]}`: every name here is one of the package itself."
    return "\n\n".join([head, *(f"::: realhf.{name}" for name in names)]) + "\n"


def _command_line() -> str:
    """Return the page with the help of every command."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _COLUMNS  # So wide are the lines of argparse.
    try:
        (commands,) = (action for action in make_parser()._actions if action.choices)
        texts = {name: commands.choices[name].format_help() for name in COMMANDS}
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    head = (
        "# Command line\n\nWhat `realhf COMMAND --help` prints. `realhf run FILE.py --help` also lists the "
        "fields of the experiment, each of which is an option ([experiments](experiments.md)).\n")
    return "\n".join([head, *(f"## realhf {name}\n\n```text\n{text}```\n" for name, text in texts.items())])


def _indented(markdown: str) -> str:
    """Return the page as Python-Markdown wants it, which reads lists in another way than GitHub does.

    Further parts of an item are behind four spaces instead of two or three, and an empty line follows them.
    """
    lines: list[str] = []
    shift = None
    """Spaces before the lines of the fenced block in which this one is; None: it is in none."""
    is_part = False
    """Whether the last line is in a part of an item that began behind an empty line."""
    for line in markdown.splitlines():
        is_fence = _FENCE.match(line) is not None
        if shift is not None:
            lines.append(" " * shift + line if line else line)
            shift = None if is_fence else shift
            continue
        indent = len(line) - len(line.lstrip())
        own = 4 - indent if indent in (2, 3) else 0
        if is_fence:
            shift = own
        if is_part and _ITEM.match(line):
            lines.append("")
        is_part = indent > 0 and (is_part or not lines or not lines[-1])
        lines.append(" " * own + line)
    return "\n".join(lines) + "\n"


# Docstrings


class FieldComments(griffe.Extension):
    """Reads what fields mean also from a comment behind them, and from `Doc` in the type that they name."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Give an attribute without a docstring its comment."""
        if attr.lineno is None or attr.endlineno is None or not isinstance(attr.filepath, Path):
            return
        lines = attr.lines_collection[attr.filepath]
        text = comment_of("\n".join(lines[attr.lineno - 1 : attr.endlineno]))
        if text is None:
            return
        said = attr.docstring.value if attr.docstring is not None else ""
        attr.docstring = griffe.Docstring("\n\n".join(filter(None, (text, said))), parent=attr)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Give fields of a type such as `MaxRows` what the type's `Doc` says, and drop functions that say
        nothing, which are those of a class above."""
        types = pkg["calls"].members
        for kind in _classes(pkg):
            for name, member in list(kind.members.items()):
                if member.is_alias or member.has_docstring:
                    continue
                if isinstance(member, griffe.Function):
                    kind.del_member(name)
                elif isinstance(member, griffe.Attribute):
                    named = types.get(str(member.annotation))
                    text = _doc_of(str(named.value)) if isinstance(named, griffe.Attribute) else None
                    member.docstring = griffe.Docstring(text, parent=member) if text is not None else None


def comment_of(source: str) -> str | None:
    """Return the comment at the end of an assignment; None if there is none."""
    last = source.splitlines()[-1]
    for at in (match.start() for match in re.finditer("  # ", last)):
        try:  # A # in a text is no comment.
            ast.parse("\n".join([*source.splitlines()[:-1], last[:at]]).strip())
        except SyntaxError:
            continue
        return None if "noqa" in last[at:] else last[at + 4 :].strip()
    return None


def _doc_of(value: str) -> str | None:
    """Return the text of `Doc` in the source of an annotated type."""
    for node in ast.walk(ast.parse(value)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Doc":
            return str(ast.literal_eval(node.args[0]))
    return None


def _classes(module: griffe.Module) -> Iterator[griffe.Class]:
    for member in module.members.values():
        if isinstance(member, griffe.Class):
            yield member
        elif isinstance(member, griffe.Module):
            yield from _classes(member)
