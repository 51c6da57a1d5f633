"""Finds test files of a checkout by name, wherever below a folder `tests` they are."""

import re
from pathlib import Path

from proofs.planting import PlantingError


class TestFiles:
    __test__ = False  # no test of pytest's

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files = [
            path.relative_to(root)
            for folder in sorted(root.glob("**/tests/"))
            for path in sorted(folder.rglob("test_*.py"))
            if "tests" not in folder.relative_to(root).parts[:-1]
        ]

    def arguments(self, words: tuple[str, ...]) -> list[str]:
        """Arguments of pytest with the paths of the files that they name.

        Each word of several parts (`after_the_grace`) that -k selects by is somewhere in these files.
        """
        arguments = [self._path(word) if ".py" in word else word for word in words]
        if "-k" in words:
            files = [self._root / word.partition("::")[0] for word in arguments if ".py" in word]
            texts = " ".join(file.read_text("utf-8") for file in files)
            selected_by = re.findall(r"[a-z0-9]+_\w+", words[words.index("-k") + 1])
            if missing := [word for word in selected_by if word not in texts]:
                raise PlantingError(f"-k {missing[0]} selects no test of {', '.join(file.name for file in files)}")
        return arguments

    def _path(self, word: str) -> str:
        name, _, test = word.partition("::")
        parts = Path(name).parts
        paths = [path for path in self._files if path.parts[-len(parts) :] == parts]
        if len(paths) != 1:
            rest = f": {', '.join(map(str, paths))}. Put the name of its folder before it" if paths else ""
            raise PlantingError(f"{len(paths)} test files are named {name}{rest}")
        function = test.partition("[")[0]
        if function and not re.search(rf"^def {function}\(", (self._root / paths[0]).read_text("utf-8"), re.MULTILINE):
            raise PlantingError(f"{paths[0]} has no {function}")
        return f"{paths[0]}::{test}" if test else str(paths[0])
