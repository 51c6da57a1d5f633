"""Prepare a release (docs/RELEASING.md). Writes files; commits, tags and uploads nothing.

python -m tools.release prepare 0.3.0                    version and date in every file that names them
python -m tools.release stage OUT --repository URL       both packages as published: README for the index, project URLs
"""

import argparse
import datetime
import posixpath
import re
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("nsa-attention", "nsa-train")
VERSION_LINES = {
    "packages/nsa-attention/nsa/__init__.py": r'(?m)(?<=^__version__ = ")[^"]+',
    "packages/nsa-train/nsa_train/__init__.py": r'(?m)(?<=^__version__ = ")[^"]+',
    "packages/nsa-train/pyproject.toml": r'(?<="nsa-attention==)[^"]+',
    "CITATION.cff": r"(?m)(?<=^version: ).+$",
    "README.md": r"(?<=version = \{)[^}]+",
}
"""File → pattern of the one place in it that names the version."""
UNRELEASED = "## [Unreleased]\n"
_LINK = re.compile(r"(!?)(\[(?:[^\[\]]|\[[^\]]*\]\([^)]*\))*\])\(([^)\s]+)\)")


def prepare(root: Path, version: str, date: datetime.date) -> list[str]:
    """Write the version into every file that names it, and a dated heading into the changelog; return their names."""
    if not re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version):
        raise SystemExit(f"{version!r} is not a version: it has three numbers, e.g. 0.3.0 or 0.3.0rc1.")
    changelog = root / "CHANGELOG.md"
    changes = changelog.read_text(encoding="utf-8")
    if f"## [{version}] - 2" in changes:
        raise SystemExit(f"CHANGELOG.md has a dated heading for {version}: it is released. Take the next version.")
    pages = {name: (root / name).read_text(encoding="utf-8") for name in VERSION_LINES}
    for name, pattern in VERSION_LINES.items():
        pages[name], places = re.subn(pattern, version, pages[name])
        if places != 1:
            raise SystemExit(f"{name} names its version in {places} places, not one: mend VERSION_LINES or the file.")
    citation = re.sub(r"(?m)^date-released: .*\n", "", pages["CITATION.cff"])
    pages["CITATION.cff"] = citation.replace(f"version: {version}\n", f"version: {version}\ndate-released: {date}\n")
    heading = f"## [{version}] - {date}\n"
    pages["CHANGELOG.md"] = changes.replace(UNRELEASED, f"{UNRELEASED}\n{heading}", 1)
    for name, text in pages.items():
        (root / name).write_text(text, encoding="utf-8")
    return list(pages)


def stage(out: Path, repository: str) -> list[Path]:
    """Copy both packages, with the README that the index shows and the URLs of the project; return their folders."""
    repository = repository.rstrip("/")
    tag = f"v{_version()}"
    folders = []
    for name in PACKAGES:
        folder = out / name
        shutil.copytree(ROOT / "packages" / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
        page = ROOT / "README.md" if name == "nsa-train" else folder / "README.md"
        source = "" if name == "nsa-train" else f"packages/{name}"
        text = absolute_links(page.read_text(encoding="utf-8"), source, repository, tag)
        (folder / "README.md").write_text(text, encoding="utf-8")
        project = folder / "pyproject.toml"
        project.write_text(_with_urls(project.read_text(encoding="utf-8"), repository, tag), encoding="utf-8")
        folders.append(folder)
    return folders


def absolute_links(text: str, folder: str, repository: str, tag: str) -> str:
    """Give links and pictures of a page in a folder of the repository their addresses on the web, at a tag."""

    def replace(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        label = _LINK.sub(replace, label[1:-1]) if "](" in label else label[1:-1]
        return f"{picture}[{label}]({address(target, bool(picture))})"

    def address(target: str, picture: bool) -> str:
        if "://" in target or target.startswith("#"):
            return target
        if target.startswith("../../actions/"):
            return f"{repository}/{target.removeprefix('../../')}"
        path = posixpath.normpath(posixpath.join(folder, target))
        return f"{repository}/{'raw' if picture else 'blob'}/{tag}/{path}"

    code = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
    parts = code.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(replace, part) for part in parts)


def _with_urls(project: str, repository: str, tag: str) -> str:
    urls = {
        "Homepage": repository,
        "Documentation": f"{repository}/blob/{tag}/docs/index.md",
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
    }
    heading = "[project.urls]\n"
    if heading not in project:
        raise SystemExit(f"pyproject.toml has no {heading.strip()}: the addresses of the repository are added to it.")
    return project.replace(heading, heading + "".join(f'{name} = "{url}"\n' for name, url in urls.items()))


def _version() -> str:
    text = (ROOT / "packages/nsa-attention/nsa/__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(VERSION_LINES["packages/nsa-attention/nsa/__init__.py"], text)
    return str(version)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare")
    one.add_argument("version")
    one.add_argument("--date", type=datetime.date.fromisoformat, default=datetime.datetime.now(datetime.UTC).date())
    two = commands.add_parser("stage")
    two.add_argument("out", type=Path)
    two.add_argument("--repository", required=True, metavar="URL", help="web address of the repository")
    args = parser.parse_args()
    if args.command == "prepare":
        print("wrote", *prepare(ROOT, args.version, args.date), sep="\n  ")
        print(f"next: read the changes, merge them, then git tag -s v{args.version} && git push origin v{args.version}")
        return
    for folder in stage(args.out, args.repository):
        name = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
        print(f"staged {name} in {folder}")


if __name__ == "__main__":
    main()
