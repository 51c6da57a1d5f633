"""The reference pages in docs/ are what the code says."""

from pathlib import Path

import pytest

from nsa_train.config import docs, env
from nsa_train.config.schema import RETIRED_KEYS, settings

FOLDER = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", docs.pages())
def test_page_is_fresh(name):
    page = FOLDER / name
    assert page.is_file(), f"docs/{name} is missing: run `{docs._REFRESH}` and commit the result"
    fresh = page.read_text(encoding="utf-8") == docs.pages()[name]
    assert fresh, f"docs/{name} is stale: run `{docs._REFRESH}` and commit the result"


def test_every_setting_and_every_name_is_on_its_page():
    pages = docs.pages()
    for key in (*settings(), *RETIRED_KEYS):
        assert f"| `{key}` |" in pages["CONFIG.md"]
    for name in (*env.VARIABLES, *env.RETIRED, env.CONFIG_FILE):
        assert f"| `{name}` |" in pages["ENV.md"]


def test_rows_have_as_many_cells_as_their_table():
    for page in docs.pages().values():
        columns = 0
        for line in page.splitlines():
            if line.startswith("|---"):
                columns = line.count("|")
            elif line.startswith("| `"):
                assert line.count("|") == columns, line
