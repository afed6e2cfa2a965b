"""The site of the documentation, and the page of symptoms: what it quotes from runs exists."""

import ast
import dataclasses
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import realhf
from realhf.cli.main import COMMANDS, make_parser
from realhf.cli.overrides import _options
from realhf.execution_plan import CallPlan
from realhf.runtime.doubts import rules
from tests.cli_tools import REPO

SYMPTOMS = (REPO / "docs/troubleshooting.md").read_text()
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_mkdocs = pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs realhf[docs]")


# Symptoms


@cache
def texts(folder: str = "") -> tuple[str, ...]:
    """Return the texts in the code of the package, or of a folder of it; what is filled in is a NUL."""
    found = []
    for path in (REPO / "realhf" / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def is_said(message: str) -> bool:
    """Return whether the package has a sentence with these words, between which `...` stands for others."""
    return re.search("[^\1]*".join(map(re.escape, message.split("..."))), all_texts()) is not None


@cache
def all_texts() -> str:
    return "\1".join(texts())


@cache
def metrics() -> re.Pattern[str]:
    """Return a pattern of the names that the package gives to metrics."""
    names = {text for text in texts() if re.fullmatch(r"[\w\0@]+(/[\w\0@]+)+", text) and text.strip("\0/")}
    patterns = [re.escape(name).replace("\0", r"[\w<>]+") for name in names if name[0] != "\0"]
    suffixes = {text for folder in ("engine", "algorithms") for text in texts(folder) if text.isidentifier()}
    patterns += [f"(?:actor|critic)/(?:{'|'.join(map(re.escape, suffixes))})"]
    return re.compile(rf"(?:eval/)?(?:{'|'.join(patterns)}|pass@k)")


@cache
def options() -> dict[str, set[str]]:
    """Return the options of each command; those of experiments are options of three of them."""
    (commands,) = (action for action in make_parser()._actions if action.choices)
    named = {name: {option for action in parser._actions for option in action.option_strings}
             for name, parser in commands.choices.items()}
    fields = {option for kind in ("GRPO", "DAPO", "PPO", "SFT", "DPO")
              for option in _options(getattr(realhf, kind)())}
    for name in ("run", "check", "plan"):
        named[name] |= fields
    return named


@cache
def settings() -> set[str]:
    """Return the fields of the public classes and of plans, and the dotted ones of experiments."""
    kinds = [kind for name in realhf.__all__ if dataclasses.is_dataclass(kind := getattr(realhf, name))]
    names = {field.name for kind in (*kinds, CallPlan) for field in dataclasses.fields(kind)}
    dotted = {option.removeprefix("--").replace("-", "_") for option in options()["run"] if "." in option}
    ends = {name.split(".", i)[-1] for name in dotted for i in range(name.count("."))}
    for name, kind in {"reward_limits": realhf.RewardLimits, "environment": realhf.Environment}.items():
        names |= {f"{name}.{field.name}" for field in dataclasses.fields(kind)}
    return names | ends


def exists_as_command(span: str) -> bool:
    """Return whether a command, and each of its options, exists."""
    _, command, *words = shlex.split(span)
    known = options().get(command)
    return known is not None and all(word.replace("--no-", "--", 1) in known or word in known
                                     for word in words if word.startswith("--"))


def exists_as_option(span: str) -> bool:
    words = [word for word in shlex.split(span) if word.startswith("--")]
    every = set.union(*options().values()) | {"--node-rank", "--master-port"}  # The last are torchrun's.
    return all(word in every or word.replace("--no-", "--", 1) in every for word in words)


def exists_as_object(span: str) -> bool:
    """Return whether a public name, or a call of one with keywords, exists."""
    node = ast.parse(span, mode="eval").body
    if isinstance(node, ast.Name):
        return node.id in realhf.__all__
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    if node.func.id not in realhf.__all__:
        return False
    fields = {field.name for field in dataclasses.fields(getattr(realhf, node.func.id))}
    return {keyword.arg for keyword in node.keywords} <= fields


CALLS = {"actor_generate", "actor_train", "critic_train", "ref_forward", "critic_forward", "reward_forward"}
FILES = {"metrics.jsonl", "tensorboard/", "reward.png", "timeline.png", "timeline.jsonl", "failures/",
         "summary.json", "generation_config.json"}
WORDS = {
    "code", "...", "KL to ref", "reward", "spread", "cut off", "check", "run", "plan", "transformers",
    "megatron", "native", "sequence", "80 GB", '"2m"', "$'\\n'", "org/name@commit", "async", "async def",
    "nan", "step", "input", "output", "stop", "map", "os._exit", "start", "finish(stop)",
    "random.Random(seed)", *"tcdp"}
"""What is neither a message nor a name of something that could be missing."""


@cache
def variables() -> set[str]:
    """Return the environment variables that the package or its pages about data and GPUs name."""
    pages = "".join((REPO / f"docs/{name}.md").read_text() for name in ("gpu", "data"))
    return set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", pages + all_texts()))


def kind_of(span: str) -> str:
    """Return what a piece of code on the page is; empty if nothing in the package is called so."""
    checks: dict[str, Any] = {
        "word": lambda: span in WORDS | CALLS | FILES,
        "command": lambda: span.startswith("realhf ") and exists_as_command(span),
        "option": lambda: span.startswith("--") and exists_as_option(span),
        "metric": lambda: metrics().fullmatch(span),
        "setting": lambda: span.partition(":")[0].partition(" ")[0] in settings() and span.count(" ") <= 1,
        "object": lambda: re.fullmatch(r"[A-Z]\w+(\(.*\))?", span) and exists_as_object(span),
        "name": lambda: span in realhf.__all__,
        "variable": lambda: re.fullmatch(r"[A-Z_]+(=\w+)?", span)
        and span.partition("=")[0] in variables(),
        "message": lambda: " " in span and is_said(span)}
    return next((kind for kind, holds in checks.items() if holds()), "")


def spans() -> list[str]:
    return list(dict.fromkeys(re.findall(r"`([^`]+)`", SYMPTOMS)))


def test_what_the_page_of_symptoms_quotes_exists():
    kinds = {span: kind_of(span) for span in spans()}
    assert [span for span, kind in kinds.items() if not kind] == []
    counts = {kind: list(kinds.values()).count(kind) for kind in set(kinds.values())}
    assert counts["message"] > 80 and counts["metric"] > 30 and counts["setting"] > 50


@pytest.mark.parametrize("made_up", (
    "the model hardly moves", "actor/grad_norms", "loss.kl_coefficient", "--kv-cache-gb 8", "MathAnswers",
    "realhf run FILE.py --restart 3", "realhf rollout RUN", "Reward(f, concurrent=64)", "Rewards(f)",
    "NCCL_SOCKET"))
def test_what_does_not_exist_is_found(made_up):
    assert not kind_of(made_up)


def test_each_symptom_is_listed_above_and_says_what_to_do():
    head, *parts = re.split(r"^## ", SYMPTOMS, flags=re.M)
    listed = re.findall(r"\]\(#([\w-]+)\)", head)
    titles = [part.partition("\n")[0] for part in parts]
    assert sorted(listed) == sorted(re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles)
    for title, part in zip(titles, parts, strict=True):
        rows = [row.count("|") for row in part.splitlines() if row.startswith("|")]
        assert title == "A command is refused" or len(rows) >= 5 and len(set(rows)) == 1, title


def test_the_page_of_symptoms_names_doubts_of_most_kinds():
    """Each module of doubts has a warning on the page, so that a new module is thought of."""
    modules = {rule.__module__.rpartition(".")[2] for name, found in vars(rules).items()
               if name.startswith("ABOUT_") for rule in found}
    messages = [span for span in spans() if kind_of(span) == "message"]
    sentences = {module: Path(rules.__file__).with_name(f"{module}.py").read_text() for module in modules}
    squeezed = {module: re.sub(r'"\s+f?"', "", text) for module, text in sentences.items()}
    for module, text in squeezed.items():
        assert any(all(piece in text for piece in message.split("...")) for message in messages), module


# The site


@pytest.fixture
def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("site_pages", REPO / "docs/site_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_mkdocs
def test_every_public_name_is_on_one_page_of_the_api(hooks):
    pages = hooks.api_names()
    assert sorted(name for names in pages.values() for name in names) == realhf.__all__
    assert all(pages.values())


@needs_mkdocs
def test_every_command_is_on_the_page_of_the_command_line(hooks):
    page = hooks._command_line()
    assert re.findall(r"^## realhf (\w+)$", page, re.M) == list(COMMANDS)
    assert "--kv-cache-gib" not in page and "--restarts N" in page


@needs_mkdocs
@pytest.mark.parametrize(("written", "on_the_site", "origin"), (
    ("../README.md", "index.md", "docs/README.md"),
    ("docs/README.md", "pages.md", "README.md"),
    ("docs/data.md", "data.md", "README.md"),
    ("data.md", "data.md", "docs/rewards.md"),
    ("../realhf/calls.py", "source/realhf/calls.py.md", "docs/algorithms.md"),
    ("LICENSE", "source/LICENSE.md", "README.md")))
def test_links_lead_to_pages_of_the_site(hooks, written, on_the_site, origin):
    assert hooks._on_site(written, origin) == on_the_site


@needs_mkdocs
def test_list_items_keep_their_parts(hooks):
    import markdown

    text = "1. one\n\n   ```sh\n   a  # b\n     c\n   ```\n\n2. two\n\nText\n\n- x\n  y\n\n  | a |\n  |---|\n"
    text += "  | b |\n\n  More\n- z\n\n```\n  d\n```\n"
    html = markdown.markdown(hooks._indented(text), extensions=["tables", "pymdownx.superfences"])
    first, rest = html.split("</ol>")
    assert "a  # b" in re.sub(r"<[^>]+>", "", first) and "two" in first
    items = rest.split("</ul>")[0].split("<li>")
    assert len(items) == 3 and "<table>" in items[1] and "More" in items[1] and "z" in items[2]
    assert "  d" in re.sub(r"<[^>]+>", "", rest.split("</ul>")[1])


@needs_mkdocs
@pytest.mark.parametrize(("source", "comment"), (
    ("steps: int = 100  # Training steps.", "Training steps."),
    ("stop: str = '  # no'", None),
    ("stop: str = '  # no'  # Yes.", "Yes."),
    ("a: int = field(\n    default=1)  # Behind.", "Behind."),
    ("import x  # noqa: F401", None)))
def test_fields_have_the_comments_behind_them(hooks, source, comment):
    assert hooks.comment_of(source) == comment


class Loads(HTMLParser):
    """Collects what a page loads, and its ids."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.classes: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.classes |= set((given.get("class") or "").split())
        names = ("src", "srcset", "data", "poster") + (("href",) if tag == "link" else ())
        self.loaded += [value for name in names if (value := given.get(name)) is not None]


def is_external(address: str) -> bool:
    return re.match(r"(https?:)?//", address) is not None


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=REPO, env=quiet, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    yield directory


@needs_mkdocs
@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        found = Loads(page)
        assert [address for address in found.loaded if is_external(address)] == [], page
        assert "mermaid" not in found.classes  # The theme would load it from a CDN.
        for address in found.loaded:
            if not address.startswith("data:"):
                path = address.partition("?")[0].partition("#")[0]
                assert (page.parent / path).exists() or path.startswith("/"), f"{page}: {address}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import\s+)[\"']?(https?:)?//", sheet.read_text()), sheet


@needs_mkdocs
@pytest.mark.slow
def test_every_page_of_the_site_is_in_the_navigation_and_is_found(site):
    front = (site / "index.html").read_text()
    pages = {page.stem for page in (REPO / "docs").glob("*.md")} - {"README"}
    for page in (*pages, "pages", "command-line"):
        assert f'href="{page}.html"' in front, page
    index = json.loads((site / "search/search_index.json").read_text())
    found = {entry["location"].partition(".html")[0] for entry in index["docs"]}
    assert pages <= found and "api/algorithms" in found
    assert not any(location.startswith("source/") for location in found)
    (entry,) = (entry for entry in index["docs"] if entry["location"] == "api/algorithms.html#realhf.GRPO")
    assert "Group Relative" in entry["text"] or "GRPO" in entry["title"]


@needs_mkdocs
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize(("words", "page"), (
    ("clip_ratio", "troubleshooting"), ("ports of hosts", "cost-model"), ("CosineReward", "api/rewards")))
def test_a_browser_finds_pages_without_a_network(site, tmp_path, words, page):
    """The site is opened as files."""
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
               "--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND",
               "--virtual-time-budget=20000", "--dump-dom",
               f"{(site / 'index.html').as_uri()}?q={quote(words)}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = done.stdout.split("md-search-result__list", 1)[1].split("</ol>", 1)[0]
    assert f"{page}.html" in found
    assert "CONSOLE" not in done.stderr
