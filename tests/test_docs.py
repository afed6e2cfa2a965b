"""Pages that are made from data are up to date."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_of_models_is_what_the_tables_say():
    page = runpy.run_path(str(DOCS / "models.py"))["page"]()
    assert (DOCS / "models.md").read_text() == page, "run python docs/models.py"
