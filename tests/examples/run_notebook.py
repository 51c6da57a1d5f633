"""Runs the code cells of a notebook in order in one namespace, without Jupyter: `run_notebook.py FILE`.

`!command` runs in a shell, with `{name}` replaced as IPython does; `%pip` does nothing, what it installs is there. The
value of a cell's last line is shown: as a picture if it is one.
"""

import ast
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_command(line: str, names: dict[str, Any]) -> None:
    command = line.format_map({name: value for name, value in names.items() if not name.startswith("_")})
    print(f"$ {command}", flush=True)
    subprocess.run(["bash", "-c", command], check=True)


def show(value: Any) -> None:
    picture = getattr(value, "_repr_svg_", None)
    if picture is not None:
        print(f"picture: {picture()}")
    elif value is not None:
        print(repr(value))


def as_python(cell: str) -> str:
    """The cell with its `!` and `%pip` lines as Python, so that errors name its lines."""
    lines = []
    for line in cell.splitlines():
        if line.startswith("!"):
            line = f"_run_command({line[1:]!r}, globals())"
        elif line.startswith("%pip install"):
            assert shlex.split(line)[2:], line
            line = "pass"
        lines.append(line)
    return "\n".join(lines)


def run_notebook(path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__", "_run_command": run_command}
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells):
        where = f"{path.name}, code cell {number}"
        body = ast.parse(as_python("".join(cell["source"])), where).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), where, "exec"), names)
        if last is not None:
            show(eval(compile(ast.Expression(last.value), where, "eval"), names))


if __name__ == "__main__":
    run_notebook(Path(sys.argv[1]))
