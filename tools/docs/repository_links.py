"""Sphinx extension: links from a page to files of the repository outside docs/ work in the built site.

On GitHub `../packages/nsa-attention/nsa/core/rope.py` leads to the file. In the site the same link leads to the
repository's web address
(`repository_url`), or, without an address, to a copy of the file as text under `repository/`.
"""

import html
import posixpath
import shutil
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).parents[2]
FOLDER = "repository"
"""Folder of the built site with the copied files."""


def path_in_repository(node: nodes.Element, docname: str) -> str | None:
    """Path, relative to the repository, of a link out of docs/; None for every other reference."""
    target = str(node.get("reftarget", "")).split("#")[0]
    if not target:
        return None
    # MyST gives Markdown files outside docs/ as absolute paths without their suffix.
    name = f"{target}.md" if node.get("refdomain") == "doc" else target
    file = Path(posixpath.normpath(ROOT / "docs" / posixpath.dirname(docname) / name))
    inside = file.is_relative_to(ROOT / "docs") or not file.is_relative_to(ROOT)
    return None if inside or not file.exists() else str(file.relative_to(ROOT))


class RepositoryLinks(SphinxTransform):
    """Replaces references out of docs/ by plain links, before Sphinx looks for their targets."""

    default_priority = 400

    def apply(self, **kwargs: object) -> None:
        docname = self.env.docname
        for node in list(self.document.findall(addnodes.pending_xref)):
            self._replace(node, docname)
        for download in list(self.document.findall(addnodes.download_reference)):
            self._replace(download, docname)

    def _replace(self, node: nodes.Element, docname: str) -> None:
        if node.get("reftype") != "myst" or (path := path_in_repository(node, docname)) is None:
            return
        base = self.config.repository_url
        copy = "../" * docname.count("/") + copied_name(path)
        address = f"{base.rstrip('/')}/{path}" if base else copy
        node.replace_self(nodes.reference("", "", *node.children, refuri=address, internal=False))
        if not base:
            # Kept in the environment, which Sphinx saves: pages that are not read again still need their files.
            vars(self.env).setdefault("repository_files", {}).setdefault(docname, set()).add(path)


def copied_name(path: str) -> str:
    """Address below the site's root of a copied file or folder. Text files open in a browser as text."""
    if (ROOT / path).is_dir():
        return f"{FOLDER}/{path}/index.html"
    return f"{FOLDER}/{path}.txt"


def copy_files(app: Sphinx, exception: Exception | None) -> None:
    """Copy every linked file; a folder with its files and a page that lists them."""
    if exception is not None or app.builder.format != "html":
        return
    for paths in getattr(app.env, "repository_files", {}).values():
        for path in sorted(paths):
            source = ROOT / path
            files = [file for file in sorted(source.iterdir()) if file.is_file()] if source.is_dir() else [source]
            for file in files:
                name = str(file.relative_to(ROOT))
                copy = Path(app.outdir) / copied_name(name)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
            if source.is_dir():
                rows = "".join(f'<li><a href="{file.name}.txt">{html.escape(file.name)}</a></li>' for file in files)
                page = f"<!doctype html><meta charset=utf-8><title>{path}</title><h1>{path}</h1><ul>{rows}</ul>\n"
                (Path(app.outdir) / copied_name(path)).write_text(page, encoding="utf-8")


def forget_page(app: Sphinx, env: object, docname: str) -> None:
    """Drop what a page linked to before it is read again."""
    getattr(env, "repository_files", {}).pop(docname, None)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("repository_url", "", "env", types=[str])
    app.add_transform(RepositoryLinks)
    app.connect("env-purge-doc", forget_page)
    app.connect("build-finished", copy_files)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
