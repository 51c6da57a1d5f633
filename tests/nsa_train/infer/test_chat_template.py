"""Chat templates of strangers: whatever one does, `nsa chat` ends with one line and an exit code of ours, in time."""

import gc
import os
import signal
import threading
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="generation is in the hf extra")

from nsa.errors import CheckpointError, ExitCode
from nsa_train.convert.export_folder import export_folder
from nsa_train.infer import load_model
from nsa_train.infer.chat_template import ChatTemplate
from tests import fork_server
from tests.nsa_train.train.runs import ROOT, environment
from tests.trained_runs import write_run

GOOD = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}assistant:"
HOSTILE = {
    "endless loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "billion characters": "{{ 'a' * 10 ** 9 }}",
    "all memory": "{% set n = namespace(t='a' * 999999) %}{% for i in range(40) %}{% set n.t = n.t * 2 %}{% endfor %}",
    "no syntax": "{% for m in messages %}{{ m.content",
    "unknown name": "{{ nothing.at.all }}",
    "unknown filter": "{{ messages | launch }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "controls in its message": "{{ raise_exception('\x1b]52;c;eA==\x07\x1b[2J\u202e\nTraceback\n' ~ 'x' * 10 ** 7) }}",
    "huge range": "{{ range(10 ** 12) | list }}",
}
BY_DAY = ("endless loop", "all memory", "controls in its message")
"""Met by the command for every change: one for time, one for memory, one for what is printed."""
MORE_HOSTILE = {
    "endless number": "{{ 7 ** (7 ** (7 ** 7)) }}",
    "long text": "{% for i in range(99999) %}{{ 'a' * 100 }}{% endfor %}",
    "nested syntax": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "unknown function": "{{ open('/etc/passwd') }}",
    "controls in its error": "{{ {}['\x1b[2J\nTraceback'].x.y }}",
    "wrong type": "{{ messages + 1 }}",
    "division by zero": "{{ 1 // 0 }}",
    "python's objects": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "other files": "{% include '/etc/passwd' %}",
    "no text": "{# nothing #}",
    "half of a character": "{{ '\\ud800' }}",
    "no such message": "{{ messages[7].content.strip() }}",
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    export_folder(write_run(tmp_path_factory.mktemp("run")), folder)
    return folder


@pytest.fixture
def chat(exported):
    def ended(template: str):
        (exported / "chat_template.jinja").write_text(template, encoding="utf-8")
        words = ["-m", "nsa_train.cli", "chat", str(exported), "--temperature", "0", "-n", "4"]
        return fork_server.run(words, cwd=ROOT, env=environment(HF_HUB_OFFLINE="1"), input="hi\n", timeout=60)

    return ended


@pytest.mark.parametrize(
    "name", [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in HOSTILE]
)
def test_a_hostile_template_ends_chat_with_one_line(chat, name):
    done = chat(HOSTILE[name])
    assert done.returncode == ExitCode.CHECKPOINT, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert "chat template" in lines[0]
    assert lines[0].isprintable()
    assert len(lines[0]) < 1000
    assert not done.stdout


@pytest.mark.parametrize("name", MORE_HOSTILE)
def test_a_hostile_template_is_an_error_of_ours(exported, name):
    (exported / "chat_template.jinja").write_text(MORE_HOSTILE[name], encoding="utf-8")
    with pytest.raises(CheckpointError) as refused:
        load_model(exported, device="cpu").encode_chat([{"role": "user", "content": "hi"}])
    assert str(refused.value).isprintable()


def test_a_good_template_answers(chat):
    done = chat(GOOD)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_the_text_is_that_of_transformers(exported):
    (exported / "chat_template.jinja").write_text(
        "{%- for m in messages %}\n  {%- if m.name is defined %}{{ m.name }}{% endif %}\n[{{ m.content | trim }}]\n"
        "{%- endfor %}\n{{ tools | tojson }}{{ eos_token }}{{ style }}{% if add_generation_prompt %}>{% endif %}\n"
    )
    loaded = load_model(exported, device="cpu")
    messages = [{"role": "user", "content": " é\u202e<|endoftext|> "}, {"role": "user", "content": "hi", "name": "me"}]
    more = dict(tools=[{"type": "function", "function": {"name": "f"}}], style="brief")
    theirs = loaded.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more)
    assert loaded.chat_template.render(messages, **more) == theirs
    ids = loaded.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenizer_kwargs={"split_special_tokens": False}
    )
    assert loaded.encode_chat(messages) == ids["input_ids"]


def test_one_process_renders_a_session_and_a_new_one_follows_its_death():
    template = ChatTemplate(GOOD, special_tokens={"eos_token": "|"}, source="x")
    said = [{"role": "user", "content": "hi"}]
    assert template.render(said) == "user: hi|assistant:"
    first = template._child._process
    texts: list[str] = []
    threads = [threading.Thread(target=lambda t=template: texts.append(t.render(said))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["user: hi|assistant:"] * 8
    assert template._child._process is first
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    with pytest.raises(CheckpointError, match="SIGKILL"):
        template.render(said)
    assert template.render(said) == "user: hi|assistant:"
    second = template._child._process
    del template, threads
    gc.collect()  # the exception above refers to the template
    assert second.returncode is not None  # it ends with the object


def test_a_message_that_the_template_refuses_costs_no_process():
    text = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}{{ messages[0].content }}"
    template = ChatTemplate(text, special_tokens={}, source="x")
    with pytest.raises(CheckpointError, match="user first"):
        template.render([{"role": "system", "content": "a"}])
    first = template._child._process
    assert template.render([{"role": "user", "content": "b"}]) == "b"
    assert template._child._process is first
