"""Pictures of ARCHITECTURE.md: modules in layers, from the tables of tests/test_imports_point_down.py."""

from tests.test_imports_point_down import LIBRARY_LAYERS, TRAINER_LAYERS

WIDTH, ROW, TOP, GAP, LABEL = 1080, 54, 44, 12, 110
PURPOSE = {
    "cli": "the nsa command",
    "check": "prove, GPU check",
    "run_model": "settings to model",
    "infer": "generation, evaluation",
    "convert": "export, import, dense models",
    "train": "training on OLMo-core",
    "bench": "benchmarks",
    "hf": "the model in Transformers",
    "vllm": "the model in vLLM",
    "planning": "estimate and preflight",
    "model": "blocks and language model",
    "record": "run folder, heartbeat, events",
    "watch": "health, exporter, monitor, report",
    "checkpoint": "atomic, verified checkpoints",
    "core": "the attention and its cache",
    "data": "documents to rows of tokens",
    "config": "settings of a run",
    "kernels": "reference, portable, C++ and Triton kernels",
    "storage": "folder or object store",
    "files": "atomic writes, locks",
    "gpus": "GPU table",
    "child_process": "runs a child",
    "geometry": "block sizes",
    "option_fields": "options that describe themselves",
    "names": "file names of a run",
    "terminal_text": "escaping",
    "token_counts": "4k",
    "kernel_variables": "NSA_KERNEL",
    "listen_address": "free ports",
    "shipped": "configs, a corpus",
    "errors": "exceptions, exit codes",
    "options": "enumerated settings",
}
STYLE = (
    "<style>.box{fill:#3b6ea8;fill-opacity:.12;stroke:#3b6ea8;stroke-opacity:.55}"
    ".name{font:600 14px sans-serif;fill:#888}.what{font:11px sans-serif;fill:#888}"
    ".note{font:12px sans-serif;fill:#888}"
    ".arrow{stroke:#888;stroke-width:1.5;fill:none}</style>"
)


def library() -> str:
    return _picture("nsa-attention", LIBRARY_LAYERS)


def trainer() -> str:
    return _picture("nsa-train", TRAINER_LAYERS)


def _picture(name: str, layers: tuple[tuple[str, ...], ...]) -> str:
    rows = [[package for package in row if package != "__init__"] for row in layers]
    parts = [
        f'<text x="{LABEL}" y="22" class="note">{name}: a package imports only from rows below its own.</text>',
        f'<path class="arrow" d="M{LABEL - 30} {TOP} V{TOP + len(rows) * ROW - 16} m-5 -9 l5 9 l5 -9"/>',
        f'<text x="{LABEL - 44}" y="{TOP + len(rows) * ROW / 2}" class="note" text-anchor="end">imports</text>',
    ]
    for number, row in enumerate(rows):
        y, width = TOP + number * ROW, (WIDTH - LABEL - GAP * (len(row) - 1) - 8) / len(row)
        for place, package in enumerate(row):
            x = LABEL + place * (width + GAP)
            label = f'x="{x + width / 2:.1f}" text-anchor="middle"'
            parts += [
                f'<rect class="box" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 12}" rx="5"/>',
                f'<text class="name" {label} y="{y + 18}">{package}</text>',
                f'<text class="what" {label} y="{y + 34}">{PURPOSE[package]}</text>',
            ]
    height = TOP + len(rows) * ROW + 4
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">{STYLE}'
        f"<title>Packages of {name} in layers</title>{''.join(parts)}</svg>\n"
    )
