"""Writes docs/CONFIG.md and docs/ENV.md from the schema and the table of environment variables."""

import inspect
from collections.abc import Iterable, Iterator

from nsa_train.config import env
from nsa_train.config.schema import RETIRED_KEYS, RunConfig, sections, settings
from nsa_train.config.setting_types import kind, may_change_on_resume, plain, unit

_NOTE = (
    "<!-- Written by `python -m tools.docs.regenerate`. Edit core/attention_config.py, config/*_sections.py or env.py "
    "instead. -->"
)


_LIBRARIES: dict[str, str] = {
    "GOMP_SPINCOUNT": "Turns an OpenMP thread (GNU's runtime, torch's on Linux) waits for work before it sleeps; `nsa` "
    "sets 1000. On cores that nothing else uses, a higher count is faster for small models.",
    "OMP_WAIT_POLICY": "`active` or `passive`; if set, `nsa` leaves the spin count alone.",
    "OMP_NUM_THREADS": "Threads of one process; `nsa launch --nproc N` sets 1 if N > 1 and it is not set.",
    "TQDM_DISABLE": "`1`: libraries draw no bars; `nsa` sets it where stderr is no terminal.",
    "NO_COLOR": "Any value but the empty one: no colours in the output of commands; bold and dim text stays. Output "
    "into a file or a pipe has neither.",
}
"""Variables of libraries that matter here."""


def _config_page() -> Iterator[str]:
    yield from (
        "# Settings of a run",
        "",
        _NOTE,
        "",
        "A run is described by one YAML file of sections. A value comes from the last of these that gives it:",
        "",
        "1. the default below",
        "2. the hardware profile (`profile: a100` reads `configs/profiles/a100.yaml`)",
        "3. the file",
        "4. the environment ([ENV.md](ENV.md)); a branch's own variable wins over the one for all branches",
        "5. the command line, as `section.key=value`",
        "",
        "`nsa config show FILE` prints every value of a run and its origin; `nsa config check FILE` lists every",
        "problem. A value is parsed by the type of its setting: `2e-4` is a number for a numeric setting, `no` is text",
        "for a text setting. Unknown keys and duplicate keys are errors.",
        "",
        "A run that resumes (`--resume`, `--resume-from`) must have the values its checkpoint was saved with, except",
        "where the column *on resume* says *may change*; such changes are recorded in `events.jsonl`. Other settings",
        "are refused with exit code 20, all at once, before anything is written. Another number of ranks is fine. Data",
        "and tokenizer may move, but must be the same data and the same tokenizer. Changed kernels, precision, threads",
        "or ranks change the last bits of the numbers; a changed `train.steps` stretches the learning rate schedule.",
        "",
        "## Top level",
        "",
        *_settings_table(key for key in settings() if "." not in key),
    )
    for name, section in sections().items():
        yield from (f"## `{name}`", "", inspect.getdoc(section) or "", "")
        yield from _settings_table(key for key in settings() if key.startswith(f"{name}."))
    yield from (
        "## Retired keys",
        "",
        "They are accepted and ignored; each produces one notice.",
        "",
        *_table(("key", "instead"), ((f"`{key}`", f"{reason}.") for key, reason in RETIRED_KEYS.items())),
        "## Kinds of layers",
        "",
        "`model.attention` is one kind for all layers, or a list that repeats over them:",
        "",
        *_table(
            ("kind", "attends to", "key and value projections", "gates"),
            (
                ("`nsa`", "compressed, selected and sliding branch", "3, or 1 with `nsa.kv: shared`", "3"),
                ("`global`", "compressed and selected branch", "2, or 1 with `nsa.kv: shared`", "2"),
                (
                    "`merged`",
                    "window, and selected blocks of the tokens before it, in one softmax; compressed keys only choose",
                    "1",
                    "none",
                ),
                ("`window`", "the last `model.window` tokens, or `nsa.w`", "1", "none"),
                ("`dense`", "all tokens", "1", "none"),
            ),
        ),
        "All kinds have the same queries, RoPE, QK-norm, biases, groups and widths. With one `train.seed` the",
        "parameters that two kinds share start from the same values and the data comes in the same order, so that runs",
        "are comparable; their numbers of parameters differ: `nsa estimate` prints those of a layer of each kind.",
        "`merged` is dense attention for the first `nsa.n_sel · nsa.l_sel + nsa.w` tokens of a document; its φ is",
        "trained by `nsa.selector_loss` alone.",
        "`nsa.preset: paper` sets the compression and the gates of the paper, to compare with the defaults.",
        "",
        "## Toy configs",
        "",
        f"`profile: {RunConfig.TOY}` names no hardware: it marks a config for experiments, which preflight refuses for",
        "long runs.",
        "",
    )


def _env_page() -> Iterator[str]:
    yield from (
        "# Environment variables",
        "",
        _NOTE,
        "",
        "The environment overrides the config file; the command line overrides the environment. It is read once, at",
        f"start. A variable that is set but empty counts as unset. Any other name beginning with `{env.PREFIX}` is an",
        "error, so that a typo does not go unnoticed. Types, defaults and units are those of the setting: see",
        "[CONFIG.md](CONFIG.md).",
        "",
        "## In use",
        "",
        *_table(("name", "sets", "type", "unit", "default", "meaning"), _variables()),
        "## Of libraries",
        "",
        "Read by libraries, not settings of a run. `nsa` sets the spin count unless you set it or the wait policy.",
        "",
        *_table(("name", "meaning"), ((f"`{name}`", meaning) for name, meaning in _LIBRARIES.items())),
        "Training step of `configs/cpu_quickstart.yaml`, two OpenMP threads on two cores (Xeon, 2.5 GHz, 2026-11-17).",
        "*Alone*: with real-time priority on a machine that is never idle. *Busy*: sharing both cores, load 4 to 6.",
        "",
        *_table(
            ("waiting", "alone", "busy"),
            (
                ("OpenMP's default (300,000 turns)", "79–86 ms", "435, 3,578 and 3,796 ms"),
                ("`GOMP_SPINCOUNT=10000`", "94 ms", "385–502 ms"),
                ("`GOMP_SPINCOUNT=1000`, set by `nsa`", "90 ms", "368 ms"),
                ("`OMP_WAIT_POLICY=passive`", "100–101 ms", "302–394 ms"),
                ("one thread", "142 ms", "284–335 ms"),
            ),
        ),
        "## Retired",
        "",
        "They are ignored; each produces one notice.",
        "",
        *_table(("name", "instead"), ((f"`{name}`", f"{reason}.") for name, reason in env.RETIRED.items())),
    )


def _variables() -> Iterator[tuple[str, ...]]:
    yield (
        f"`{env.CONFIG_FILE}`",
        "the config file",
        "a path",
        "",
        "",
        "Used if no file is given on the command line.",
    )
    for name, variable in env.VARIABLES.items():
        field = settings()[variable.keys[0]]
        default = not field.default if variable.negated else field.default
        keys = ", ".join(f"`{key}`" for key in variable.keys)
        sets = f"not {keys}" if variable.negated else keys
        yield f"`{name}`", sets, kind(field), unit(field), f"`{plain(default)}`", variable.meaning


def _settings_table(keys: Iterable[str]) -> Iterator[str]:
    fields = ((key, settings()[key]) for key in keys)
    rows = (
        (
            f"`{key}`",
            kind(field),
            f"`{plain(field.default)}`",
            unit(field),
            "may change" if may_change_on_resume(field) else "fixed",
            str(field.description),
        )
        for key, field in fields
    )
    return _table(("key", "type", "default", "unit", "on resume", "meaning"), rows)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


PAGES = {"docs/CONFIG.md": lambda: "\n".join(_config_page()), "docs/ENV.md": lambda: "\n".join(_env_page())}
