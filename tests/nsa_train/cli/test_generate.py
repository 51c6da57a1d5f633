"""`nsa generate` and `nsa chat`: prompts from anywhere, text that cannot harm a terminal, JSON and nothing else, and
errors that say what to do."""

import json
import os
import pty
import re
import signal
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path

import pyarrow.parquet
import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="generation is in the hf extra")

from nsa.errors import CheckpointError, ConfigError
from nsa.kernels.cpu.build import set_cache_folder
from nsa_train.cli.inference import _without_last_spaces, write_text
from nsa_train.cli.main import app
from nsa_train.cli.outputs import ProgressLine
from nsa_train.infer import load_model
from nsa_train.shipped import STORIES
from tests import fork_server
from tests.nsa_train.train.runs import ROOT, environment
from tests.trained_runs import write_run
from tools.stories.judge import faults

SHORT = ("--greedy", "-n", "12")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def loaded(run):
    return load_model(run, device="cpu")


def invoke(*words: str | Path, typed: str | bytes | None = None):
    result = CliRunner().invoke(app, [str(word) for word in words], input=typed, env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def records(result) -> list[dict]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_json_is_one_object_per_prompt_and_nothing_else_on_stdout(run, loaded):
    result = invoke("generate", run, "-p", "The ", "-p", "A longer prompt", "--json", *SHORT)
    first, second = records(result)
    texts = loaded.generate(["The ", "A longer prompt"], temperature=0, max_new_tokens=12)
    assert [first["text"], second["text"]] == texts
    assert (first["prompt"], first["prompt_tokens"], first["new_tokens"], len(first["tokens"])) == ("The ", 4, 12, 12)
    assert (first["finish_reason"], first["seed"], first["step"]) == ("length", None, 10)
    assert first["model"].endswith("step10")
    assert first["batch_prefill_tokens_per_s"] > 0
    assert first["peak_memory_mib"] > 0
    assert "tokens/s" in result.stderr


def test_batches_keep_the_order_of_the_prompts(run):
    prompts = [letter * n for n, letter in enumerate("abcde", 1)]
    words = [word for prompt in prompts for word in ("-p", prompt)]
    several = records(invoke("generate", run, *words, "--json", "--batch-size", "2", *SHORT))
    assert [record["prompt"] for record in several] == prompts
    one = records(invoke("generate", run, *words, "--json", "--batch-size", "1", *SHORT))
    assert [record["tokens"] for record in several] == [record["tokens"] for record in one]


def test_a_prompt_comes_from_a_file_or_from_standard_input(run, tmp_path):
    (tmp_path / "prompt.txt").write_text("Grüße\n", encoding="utf-8")
    from_file = records(invoke("generate", run, "--prompt-file", tmp_path / "prompt.txt", "--json", *SHORT))[0]
    from_stdin = records(invoke("generate", run, "--json", *SHORT, typed="Grüße\n"))[0]
    from_option = records(invoke("generate", run, "-p", "Grüße", "--json", *SHORT))[0]
    assert from_file["prompt"] == from_stdin["prompt"] == "Grüße"
    assert from_file["tokens"] == from_stdin["tokens"] == from_option["tokens"]


def test_text_is_prompt_and_continuation_and_the_summary_goes_to_stderr(run, loaded):
    result = invoke("generate", run, "-p", "The ", *SHORT)
    text = loaded.generate("The ", temperature=0, max_new_tokens=12)
    shown = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    assert result.stdout == f"The {shown}\n"
    assert re.search(r"prompt 4 tokens, .* new 12 tokens, .* peak memory .* ended by length", result.stderr)


def test_several_prompts_are_printed_one_after_another(run):
    result = invoke("generate", run, "-p", "one", "-p", "two", *SHORT)
    assert re.findall(r"^=== .*$", result.stdout, re.MULTILINE) == ["=== 1 of 2", "=== 2 of 2"]
    assert result.stdout.index("\none") < result.stdout.index("\ntwo")


def test_a_drawn_seed_is_printed_and_repeats_the_text(run):
    first = invoke("generate", run, "-p", "The ", "-n", "12")
    seed = re.search(r"seed (\d+)", first.stderr)[1]
    assert invoke("generate", run, "-p", "The ", "-n", "12", "--seed", seed).stdout == first.stdout


def test_stop_strings_end_the_text(run):
    text = records(invoke("generate", run, "-p", "The ", "--json", *SHORT))[0]["text"]
    stopped = records(invoke("generate", run, "-p", "The ", "--json", "--stop", text[3:5], *SHORT))[0]
    assert (stopped["text"], stopped["finish_reason"]) == (text.partition(text[3:5])[0], "stop")


def test_positions_beyond_the_training_length_are_reported(run):
    assert "trained on rows of 64 tokens" in invoke("generate", run, "-p", "A", "--greedy", "-n", "64").stderr
    assert "trained on rows" not in invoke("generate", run, "-p", "A", "--greedy", "-n", "63").stderr


def test_control_characters_are_escaped_and_characters_are_whole(capfd):
    write_text("a\x1b[2J\x07b\u202ec\td\ne€😀\r\x9b")
    assert capfd.readouterr().out == "a\\x1b[2J\\x07b\\u202ec\td\ne€😀\\r\\x9b"


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (("nowhere", "-p", "x"), CheckpointError, "nowhere"),
        (("RUN", "--prompt-file", "nowhere.txt"), ConfigError, "nowhere.txt"),
        (("RUN", "--prompt-file", "BINARY"), ConfigError, "UTF-8"),
        (("RUN", "-p", "x", "--top-p", "2"), ConfigError, "top_p"),
        (("RUN", "-p", "x", "--dtype", "int3"), ConfigError, "fp32"),
        (("RUN", "-p", "x", "--stop", ""), ConfigError, "stop"),
    ],
)
def test_a_wrong_call_is_refused_with_what_to_do(run, tmp_path, words, error, says):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    named = {"RUN": run, "BINARY": tmp_path / "binary"}
    with pytest.raises(error, match=says):
        invoke("generate", *(named.get(word, word) for word in words))


def test_no_prompt_on_a_terminal_names_the_options(run):
    main, terminal = pty.openpty()
    command = ["-m", "nsa_train.cli", "generate", str(run)]
    pipe = subprocess.PIPE
    done = fork_server.start(command, cwd=ROOT, env=environment(), stdin=terminal, stderr=pipe)
    said = done.stderr.read()
    os.close(main)
    os.close(terminal)
    assert done.wait(timeout=100) == 20
    assert "--prompt" in said


def test_chat_without_a_template_names_generate(run):
    with pytest.raises(ConfigError, match="nsa generate"):
        invoke("chat", run, typed="hi\n")


def test_chat_keeps_the_conversation(run, tmp_path):
    from nsa_train.convert.export_folder import export_folder

    export_folder(run, tmp_path / "exported")
    (tmp_path / "exported" / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}:")
    result = invoke("chat", tmp_path / "exported", "--temperature", "0", "-n", "6", typed="hi\n\nmore\n")
    model = load_model(tmp_path / "exported", device="cpu")
    first = model.generate("[hi]:", temperature=0, max_new_tokens=6)
    second = model.generate(f"[hi][{first}][more]:", temperature=0, max_new_tokens=6)
    shown = [
        "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
        for text in (first, second)
    ]
    assert result.stdout == f"{shown[0]}\n{shown[1]}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_with_what_was_made(run, number):
    command = ["-m", "nsa_train.cli", "generate", str(run), "-p", "The ", "--seed", "1", "-n", "1000000"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = fork_server.start(command, cwd=ROOT, env=environment(HF_HUB_OFFLINE="1"), **pipes)
    began = process.stdout.read(40)
    process.send_signal(number)
    rest, errors = process.stdout.read(), process.stderr.read()
    assert process.wait(timeout=60) == 130, errors
    assert began.startswith("The ")
    assert rest.endswith("\n")
    assert "ended by interrupted" in errors
    assert "Traceback" not in errors


def test_progress_is_silent_at_first_and_then_says_what_is_done(capfd, monkeypatch):
    monkeypatch.setattr("nsa_train.cli.outputs._PROGRESS_DELAY_S", 60.0)
    monkeypatch.setattr("nsa_train.cli.outputs._PROGRESS_LOG_EVERY_S", 0.05)
    with ProgressLine("reading"):
        pass
    assert capfd.readouterr().err == ""
    monkeypatch.setattr("nsa_train.cli.outputs._PROGRESS_DELAY_S", 0.05)

    def next_line(start: str) -> None:
        deadline = time.monotonic() + 60
        while not any(line.startswith(start) for line in capfd.readouterr().err.splitlines()):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    with ProgressLine("reading") as line:
        next_line("reading … ")
        line.update("reading \x1b[2J: 5 of 9")
        next_line("reading \\x1b[2J: 5 of 9 … ")


@pytest.mark.parametrize(
    ("question", "word"),
    [
        ("What do cows eat?", "grass"),
        ("What is a rainbow?", "colours"),
        ("Can a dog fly?", "No"),
        ("What is a spaceship?", "I do not know"),
    ],
)
def test_the_pretrained_model_answers_what_it_has_read_and_declines_the_rest(question, word):
    assert word in invoke("chat", "--pretrained", "--temperature", "0", typed=f"{question}\n").stdout


def test_the_pretrained_model_tells_a_story_of_known_words():
    """Every word that it writes in five stories is one of the shipped text, and the stories stay with their people."""
    known = set(re.findall(r"[a-z]+", " ".join(pyarrow.parquet.read_table(STORIES)["text"].to_pylist()).lower()))
    words = ["generate", "--pretrained", *(["-p", "Once upon a time"] * 5), "--temperature", "0.5", "--seed", "1"]
    texts = [record["text"] for record in records(invoke(*words, "-n", "150", "--json"))]
    assert len(set(texts)) == 5
    written = [word for text in texts for word in re.findall(r"[a-z]+", text.lower().rsplit(" ", 1)[0])]
    assert len(written) > 300
    assert sum(word in known for word in written) >= 0.99 * len(written)
    wrong = [line for text in texts for line in faults(f"Once upon a time{text}")[0]]
    assert len(wrong) <= 2, wrong


def test_a_space_at_the_end_of_a_prompt_is_left_to_the_next_word(loaded):
    """Its own token hardly ever stands in a text. A byte tokenizer has a token per space, which stays."""
    stripped, spaced = (invoke("generate", "--pretrained", "-p", prompt, *SHORT) for prompt in ("The", "The  "))
    assert spaced.stdout == stripped.stdout
    assert stripped.stdout.startswith("The ")
    assert "note: continuing 'The'" in spaced.stderr
    assert "continuing" not in stripped.stderr
    assert _without_last_spaces(loaded, "The ") == "The "


def test_the_path_of_the_pretrained_model_is_not_printed(monkeypatch):
    shown = []
    monkeypatch.setattr("nsa_train.cli.model_options.ProgressLine", lambda text: shown.append(text) or nullcontext())
    invoke("generate", "--pretrained", "-p", "The", *SHORT)
    assert shown == ["loading pretrained"]


def test_a_model_is_named_once():
    with pytest.raises(ConfigError, match="both name a model"):
        invoke("generate", "some-run", "--pretrained", "-p", "x")
    with pytest.raises(ConfigError, match="or --pretrained"):
        invoke("generate", "-p", "x")


def test_the_pretrained_model_waits_for_no_compiler(tmp_path):
    set_cache_folder(tmp_path)  # nothing is compiled there
    try:
        result = invoke("generate", "--pretrained", "-p", "The ", *SHORT)
    finally:
        set_cache_folder(None)
    assert "portable kernels" in result.stderr
    assert list(tmp_path.iterdir()) == []
    assert "NSA_KERNEL" not in os.environ
