"""Fuzz targets: prompts as text and as bytes of a file or a pipe, and text that is decoded token by token.

Oracles: the prompt itself, decoded again from its tokens, and the text of all tokens decoded at once.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="generation is in the hf extra")

from nsa_train.cli.main import app
from nsa_train.convert.tokenizer_files import transformers_tokenizer
from nsa_train.data.tokenizer import ByteTokenizer, train_bpe
from nsa_train.infer import LoadedModel, load_model
from nsa_train.infer.generate import TextStream
from tests.fuzz.campaign import FuzzCampaign
from tests.fuzz.mutations import mutated_bytes
from tests.trained_runs import write_run

SAMPLE = "the quick brown fox jumps over the lazy dog, wörtlich: 12 € 漢字 😀. <|endoftext|>\r\n\t"
UNUSUAL = st.characters(categories=["Cs", "Cc", "Cf", "Co", "Cn", "Mn", "Zl", "Zp"])  # lone surrogates among them
ANY_TEXT = st.one_of(st.text(max_size=60), st.text(UNUSUAL, max_size=3))
PROMPTS = st.one_of(
    ANY_TEXT,
    st.text(st.sampled_from(SAMPLE), max_size=200),
    st.builds(lambda piece, n: piece * n, st.text(min_size=1, max_size=3), st.integers(1, 400)),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run with the byte tokenizer, and one with a BPE."""
    bpe = train_bpe([SAMPLE] * 4, 330, tmp_path_factory.mktemp("bpe") / "bpe.json")
    folders = [
        write_run(tmp_path_factory.mktemp("run"), dim=16, n_layers=1, tokenizer=t) for t in (ByteTokenizer(), bpe)
    ]
    return folders


def test_prompts(fuzz: FuzzCampaign, runs: list[Path]) -> None:
    """Every prompt that is text is continued, and its tokens are the prompt; others are refused."""
    models: list[LoadedModel] = [load_model(run, device="cpu") for run in runs]

    def check(case: list[Any]) -> None:
        which, prompts, generate = case
        loaded = models[which]
        encoded = loaded.encode(prompts)
        for prompt, ids in zip(prompts, encoded, strict=True):
            assert not any(0xD800 <= ord(character) <= 0xDFFF for character in prompt)
            assert all(0 <= token < loaded.model.config.vocab_size for token in ids)
            if prompt:
                assert loaded.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == prompt
            else:
                assert len(ids) == 1
        if generate:
            texts = loaded.generate(prompts, temperature=0, max_new_tokens=2)
            assert len(texts) == len(prompts)

    some = st.sampled_from((False, False, False, True))
    cases = st.tuples(st.integers(0, 1), st.lists(PROMPTS, max_size=3), some).map(list)
    fuzz.run(cases, check, examples=400, good=[[0, ["hello", ""], True]], read_seed=json.loads)


def test_generate_options(fuzz: FuzzCampaign, runs: list[Path]) -> None:
    """Options of `nsa generate` with any values: refused by the parser (exit code 2) or by us, or text is generated."""
    options = st.sampled_from(
        ("--device", "--dtype", "--tokenizer", "--key-file", "--stop", "--top-p", "--top-k", "--temperature", "--seed",
         "-n", "--batch-size", "--prefill-chunk", "--prompt-file", "-p")
    )  # fmt: skip
    values = st.one_of(
        st.sampled_from(("cpu", "cuda", "cuda:99", "cpu:7", "meta", "mps", "foo", "fp32", "bf16", "byte", "/", "0", "1",
                         "2", "-1", "nan", "inf", "1e-300", "0.5", "1e9", "")),
        ANY_TEXT,
    ).filter(lambda text: "\0" not in text)  # fmt: skip

    def check(case: list[list[str]]) -> None:
        words = [word for pair in case for word in pair]
        if not any(name in ("-p", "--prompt-file") for name, _ in case):
            words += ["-p", "a"]
        result = CliRunner().invoke(app, ["generate", str(runs[0]), "-n", "2", *words])
        if isinstance(result.exception, SystemExit):
            assert result.exit_code == 2
        elif result.exception is not None:
            raise result.exception

    cases = st.lists(st.tuples(options, values).map(list), min_size=1, max_size=3)
    fuzz.run(cases, check, examples=120, good=[[["--device", "cpu"]]], read_seed=json.loads)


def test_prompt_bytes(fuzz: FuzzCampaign, runs: list[Path], tmp_path: Path) -> None:
    """`nsa generate` with a prompt in a file and on standard input: the same continuation, or both refused."""
    file = tmp_path / "prompt.txt"

    def run(*words: str, stdin: bytes = b"") -> dict[str, Any]:
        arguments = ["generate", str(runs[0]), "--json", "--greedy", "-n", "2", *words]
        result = CliRunner().invoke(app, arguments, input=stdin)
        if result.exception is not None:
            raise result.exception
        output: dict[str, Any] = json.loads(result.stdout)
        return output

    def check(raw: bytes) -> None:
        file.write_bytes(raw)
        from_file = run("--prompt-file", str(file))
        assert from_file["prompt"].encode() == raw.removesuffix(b"\n").removesuffix(b"\r")
        assert run(stdin=raw)["tokens"] == from_file["tokens"]

    fuzz.run(st.one_of(mutated_bytes(SAMPLE.encode(), b"a\n"), st.binary(max_size=80)), check, examples=25)


def test_token_streams(fuzz: FuzzCampaign, tmp_path: Path) -> None:
    """The pieces of a stream together are the text of all tokens, up to the first stop string."""
    bpe = train_bpe([SAMPLE] * 4, 330, tmp_path / "bpe.json")
    tokenizers = [transformers_tokenizer(each, 64) for each in (ByteTokenizer(), bpe)]
    sizes = (ByteTokenizer.vocab_size, bpe.vocab_size)

    def check(case: list[Any]) -> None:
        which, tokens, stop = case
        stream = TextStream(tokenizers[which], stop)
        pieces = [stream.push(token) for token in tokens]
        text = "".join([*pieces, stream.finish()])
        whole = tokenizers[which].decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert text == stream.text
        assert not any(each in text for each in stop)
        if stream.stopped_by is None:
            assert text == whole
        else:
            assert whole.startswith(text + stream.stopped_by)

    def tokens_of(which: int) -> st.SearchStrategy[list[int]]:
        of_text = st.text(st.sampled_from(SAMPLE), max_size=120).map(lambda text: tokenizers[which](text)["input_ids"])
        of_any = st.lists(st.integers(0, sizes[which] - 1), max_size=150)
        return st.lists(st.one_of(of_text, of_any), max_size=3).map(lambda parts: [t for part in parts for t in part])

    stops = st.lists(st.text(st.sampled_from(SAMPLE), min_size=1, max_size=4), max_size=2)
    cases = st.integers(0, 1).flatmap(lambda which: st.tuples(st.just(which), tokens_of(which), stops)).map(list)
    fuzz.run(cases, check, examples=500, read_seed=json.loads)
