"""Writes the tables of docs/models.md from those of the code and the tests: `python docs/models.py`."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from realhf.models.families import FAMILIES  # noqa: E402
from realhf.models.model_config import HEADS, ROPE_KEYS, ModelConfig  # noqa: E402
from realhf.models.param_spec import model_spec  # noqa: E402
from realhf.user_input.shipped import shipped_dir  # noqa: E402
from tests.families import CASES, LAYOUTS, MOE_CASES, MOE_LAYOUTS  # noqa: E402

PAGE = ROOT / "docs" / "models.md"


def families() -> list[str]:
    rows = ["| model | classes in transformers | layouts tested |", "|---|---|---|"]
    for cases, layouts in ((CASES, LAYOUTS), (MOE_CASES, (*LAYOUTS, *MOE_LAYOUTS))):
        for case in cases.values():
            family = FAMILIES[case.family]
            classes = ", ".join(filter(None, map(family.architecture, HEADS)))
            rows.append(f"| {case.about} | {classes} | {' '.join(layouts)} |")
    without = " and ".join(family.prefix for family in FAMILIES.values() if family.score_class is None)
    rows += ["", f"transformers has no class with one label for {without}. So no critics and reward",
             "models of these are trained: nothing could open them.", "",
             f"Rotary embeddings: {', '.join(ROPE_KEYS)}."]
    return rows


def shipped() -> list[str]:
    rows = ["| name | family | parameters | layers | hidden size |", "|---|---|---|---|---|"]
    for path in sorted(shipped_dir("models").iterdir()):
        config = ModelConfig.load(path.name.removesuffix(".json"))
        size = f"{model_spec(config).numel:,}"
        name = path.name.removesuffix(".json")
        rows.append(f"| `{name}` | {config.family} | {size} | {config.num_layers} | {config.hidden_size} |")
    return rows


def page() -> str:
    """Return the page with the tables of the code and the tests between its marks."""
    text = PAGE.read_text()
    for name, lines in {"families": families(), "shipped": shipped()}.items():
        begin, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert mark and end, f"{PAGE}: no marks for {name}"
        text = begin + mark + "\n".join([*lines, end]) + after
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
