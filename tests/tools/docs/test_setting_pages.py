"""docs/CONFIG.md and docs/ENV.md name every setting and every variable."""

from nsa_train.config import env
from nsa_train.config.schema import RETIRED_KEYS, settings
from tools.docs.setting_pages import PAGES


def test_every_setting_and_every_name_is_on_its_page():
    config, environment = PAGES["docs/CONFIG.md"](), PAGES["docs/ENV.md"]()
    for key in (*settings(), *RETIRED_KEYS):
        assert f"| `{key}` |" in config
    for name in (*env.VARIABLES, *env.RETIRED, env.CONFIG_FILE):
        assert f"| `{name}` |" in environment


def test_rows_have_as_many_cells_as_their_table():
    for page in PAGES.values():
        columns = 0
        for line in page().splitlines():
            if line.startswith("|---"):
                columns = line.count("|")
            elif line.startswith("| `"):
                assert line.count("|") == columns, line
