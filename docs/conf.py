"""Sphinx configuration of the documentation: `sphinx-build -W docs build/docs`.

DOCS_REPOSITORY_URL    web address of the repository's files, for links out of docs/, e.g. …/blob/main; without it the
                       linked files are copied into the site
DOCS_INTERSPHINX=1     link names of PyTorch and Python to their documentation; needs a network
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import nsa  # noqa: E402

project = "nsa-train"
author = "the nsa-train authors"
copyright = "the nsa-train authors, Apache-2.0"
version = release = nsa.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "tools.docs.argument_lists", "tools.docs.repository_links"]
exclude_patterns = ["_build"]
repository_url = os.environ.get("DOCS_REPOSITORY_URL", "")

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88
add_module_names = False
default_role = "code"  # docstrings write `name`, as Markdown does

if os.environ.get("DOCS_INTERSPHINX") == "1":
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }

html_theme = "furo"
html_title = f"nsa-train {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_search_scorer = str(ROOT / "docs" / "_static" / "search_scorer.js")
html_show_sphinx = False
