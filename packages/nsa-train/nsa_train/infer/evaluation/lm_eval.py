"""lm-evaluation-harness with our models: the model type `nsa` of the harness, and its command line around a model.

`python -m nsa_train.infer.evaluation.lm_eval run --model nsa --model_args pretrained=RUN …` is the harness's own
command in a process that knows our models: `pretrained` is a run folder, a checkpoint or an exported folder. For
exported folders `--model hf` works there too.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

import nsa.hf  # noqa: F401 (registers our model with Transformers' Auto classes)
from nsa.errors import CheckpointError, ConfigError
from nsa_train.infer.load_model import LoadedModel, load_model
from nsa_train.record.evaluations import LM_EVAL

_MODEL_TYPE = "nsa"
_OURS = ("--model", "-M", "--tasks", "-t", "--config", "-C")
"""Options that `nsa eval` sets itself."""
_ENDLESS = ("ruler_vt", "ruler", "longcxt")
"""Tasks, groups and tags with RULER's variable tracking."""
_SAMPLE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NOT_RUN = -1
"""RULER's value for the lengths that were not asked for."""

_loaded: dict[str, LoadedModel] = {}
"""Models that this process has loaded already, by the path they are known by here."""


@register_model(_MODEL_TYPE)
class NSAHarnessModel(HFLM):
    """The harness's Transformers adapter over a model that is verified as `nsa generate` does it."""

    def __init__(self, pretrained: str, device: str | None = None, dtype: str | None = None, **options: Any) -> None:
        options.pop("tokenizer", None)  # for the tasks; the model has its own
        loaded = _loaded.get(pretrained) or load_model(pretrained, device=device, dtype=dtype)
        super().__init__(pretrained=loaded.model, tokenizer=loaded.tokenizer, backend="causal", **options)
        self._loaded = loaded

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a chat within limits, without system messages if the template refuses them, as the harness does."""
        settings = dict(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self.chat_template_args,
        )
        try:
            return self._loaded.chat_template.render(chat_history, **settings)
        except CheckpointError:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            return self._loaded.chat_template.render(others, **settings)


def evaluate_with_harness(loaded: LoadedModel, tasks: str, words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Run tasks of the harness on a loaded model; `words` are further options of `lm_eval run`.

    Results by `lm_eval/TASK`: all numeric metrics, and the settings that the harness reports.
    """
    for word in words:
        if word.partition("=")[0] in _OURS:
            raise ConfigError(f"{word} is set by `nsa eval`. Use `python -m {__name__} run …` to set it yourself.")
    _require_finite(tasks.split(","), loaded)
    path = str(loaded.source.path)
    with tempfile.TemporaryDirectory(prefix="nsa-lm-eval-") as folder:
        # RULER loads the tokenizer of its documents by name, and would trust code in a folder that is not ours.
        loaded.tokenizer.save_pretrained(f"{folder}/tokenizer")
        arguments = json.dumps({"pretrained": path, "tokenizer": f"{folder}/tokenizer"})
        options = ["--output_path", f"{folder}/results", *words]
        _loaded[path] = loaded
        try:
            with redirect_stdout(sys.stderr):
                _run_command(["run", "--model", _MODEL_TYPE, "--model_args", arguments, "--tasks", tasks, *options])
        finally:
            del _loaded[path]
        out = Path(options[len(options) - 1 - options[::-1].index("--output_path") + 1])
        return _read_results(out)


def _require_finite(tasks: Sequence[str], loaded: LoadedModel) -> None:
    """Raise for RULER's variable tracking with a tokenizer of about one token per character: it would never end."""
    n_tokens = len(loaded.encode([_SAMPLE])[0])
    if n_tokens > 0.8 * len(_SAMPLE) and (endless := sorted({*tasks} & {*_ENDLESS})):
        raise ConfigError(
            f"{endless[0]} does not end with a byte tokenizer: RULER's variable tracking retries until its worked "
            f"example has at most 500 tokens, and as bytes it never has. Leave it out (the tasks that need no download "
            f"are niah_single_1, niah_multikey_2, niah_multikey_3, ruler_cwe, ruler_fwe), or use `nsa eval --tasks "
            f"variable_tracking`."
        )


def _run_command(words: Sequence[str]) -> None:
    """`lm_eval WORDS`; the harness reads them from sys.argv."""
    from lm_eval.__main__ import cli_evaluate

    before, sys.argv = sys.argv, ["lm_eval", *words]
    try:
        cli_evaluate()
    except ValueError as error:
        if not str(error).startswith("Tasks not found"):
            raise
        raise ConfigError(f"--lm-eval: {error}. `lm_eval ls tasks` prints the tasks of the harness.") from error
    finally:
        sys.argv = before


def _read_results(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(folder.rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ConfigError(f"the harness wrote no results to {folder}. See its messages above.")
    content = json.loads(files[-1].read_text(encoding="utf-8"))
    shots, samples = content.get("n-shot", {}), content.get("n-samples", {})
    results = {}
    for task, values in content["results"].items():
        metrics = {name: v for name, v in values.items() if type(v) in (int, float) and name != "sample_len"}
        metrics = {name: v for name, v in metrics.items() if not (name[:1].isdigit() and v == _NOT_RUN)}
        settings = {"lm_eval": content.get("lm_eval_version"), "num_fewshot": shots.get(task),
                    "samples": (samples.get(task) or {}).get("effective")}  # fmt: skip
        results[f"{LM_EVAL}{task}"] = {"settings": settings, "metrics": metrics}
    return results


def main() -> None:
    """The harness's own command line, with the model type `nsa`."""
    _run_command(sys.argv[1:])


if __name__ == "__main__":
    main()
