"""Small hostile files in front of real commands: 60 s, 1 GiB, an exit code of ours, one line and no traceback.

Each case builds its input, runs a command in a process whose address space may grow by 1 GiB, and checks how it ends.
"""

import gzip
import hashlib
import io
import json
import os
import pickle
import struct
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsa.errors import ExitCode
from nsa_train import names
from nsa_train.data.tokenizer import ByteTokenizer
from tests import fork_server
from tests.covering_cases import each_value
from tests.fuzz.campaign import memory_limit
from tests.nsa_train.checkpoint.test_attacks import commit as commit_step
from tests.trained_runs import write_run

pytest.importorskip("transformers", reason="exported folders are in the hf extra")
pytest.importorskip("zstandard", reason="compressed files are in the data extra")

TIME_S = 60.0
MEMORY_BYTES = 1 << 30
MEGABYTE = 1 << 20
LIMITED = f"""
import os, resource, sys
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(os.environ["MEMORY_BYTES"]),) * 2)
resource.setrlimit(resource.RLIMIT_CPU, ({TIME_S:.0f}, {TIME_S:.0f}))
from nsa_train.cli.main import main
main()
"""


def run_limited(*words: object, cwd: Path, memory_bytes: int = MEMORY_BYTES) -> "subprocess.CompletedProcess[str]":
    """Run `nsa WORDS` within the limits. The clock is CPU time: other tests may use the machine."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    variables["MEMORY_BYTES"] = str(memory_bytes)
    return fork_server.run(["-c", LIMITED, *map(str, words)], cwd=cwd, env=variables, timeout=10 * TIME_S)


def refused(done: "subprocess.CompletedProcess[str]", code: ExitCode) -> None:
    assert done.returncode == code, (done.returncode, done.stdout[-500:], done.stderr[-3000:])
    assert "Traceback" not in done.stderr
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("tokenize ")]  # progress: the more, the busier the machine
    assert len(lines) == 1, lines
    assert all(len(line) < 2000 for line in lines), "a message shows the hostile value whole"


# Checkpoints.


def archive(data: bytes) -> bytes:
    """A file of torch.save with this pickle."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name, content in (("data.pkl", data), ("byteorder", b"little"), ("data/0", bytes(1 << 16))):
            file.writestr(f"archive/{name}", content)
    return stream.getvalue()


def text(value: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value


ENCODED = b"c_codecs\nencode\nq\0" + text(b"a" * MEGABYTE) + text(b"latin1") + b"\x86q\1"
"""Memo 0: the function; 1: its arguments, a megabyte of text and the name of the encoding."""


def encoded_strings() -> bytes:
    return b"\x80\x02" + ENCODED + b"](" + b"h\0h\1R" * 9000 + b"e."


def arrays() -> bytes:
    array = b"cnumpy._core.multiarray\n_reconstruct\nq\2cnumpy\nndarray\nK\0\x85" + text(b"b") + b"\x87q\3"
    kind = (
        b"cnumpy\ndtype\n"
        + text(b"u1")
        + b"\x89\x88\x87R(K\3"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    )
    state = b"K\1J" + struct.pack("<i", MEGABYTE) + b"\x85" + kind + b"\x89h\0h\1Rtq\4"
    return b"\x80\x02" + ENCODED + array + b"(" + state + b"](" + b"h\2h\3Rh\4b" * 5000 + b"e."


def dictionaries() -> bytes:
    pairs = b"](" + b"".join(text(b"%d" % number) + b"N\x86" for number in range(50_000)) + b"e\x85q\1"
    return b"\x80\x02ccollections\nOrderedDict\nq\0" + pairs + b"](" + b"h\0h\1R" * 9000 + b"e."


def memo_entries(number: int = 15 * MEGABYTE) -> bytes:
    return b"\x80\x04]" + b"\x94" * number + b"h\0a."  # a list of itself is refused


def fewer_memo_entries() -> bytes:
    return memo_entries(15 * MEGABYTE // FEWER)


def containers_in_containers() -> bytes:
    """Fifty levels, each of which names the one below ten times."""
    levels = b"".join(b"](" + (b"h" + bytes([n])) * 10 + b"eq" + bytes([n + 1]) for n in range(50))
    return b"\x80\x02](Neq\0" + levels + b"."


def keys() -> bytes:
    """One key of a hundred thousand parts, used a hundred thousand times."""
    return b"\x80\x02}(" + b"K\1" * 100_000 + b"tq\0" + b"0}" + b"h\0Ns" * 100_000 + b"."


FEWER = 4
PICKLES = (encoded_strings, arrays, dictionaries, fewer_memo_entries, containers_in_containers, keys)
CASES = [
    *each_value(["verify", "export"], list(PICKLES)),
    pytest.param("verify", memo_entries, marks=pytest.mark.nightly),  # as above with four times as many and as much
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("saved"), steps=(2,), dim=16, n_layers=1)


@pytest.fixture
def step(saved: Path, tmp_path: Path) -> Path:
    """A checkpoint that may be changed."""
    import shutil

    return Path(shutil.copytree(saved, tmp_path / "run", symlinks=True)) / names.CHECKPOINTS / "step2"


def change_index(step: Path, change: Callable[[Any, Path], None]) -> None:
    path = step / names.TENSORS / names.TENSOR_INDEX
    index = pickle.loads(path.read_bytes())
    change(index, path.parent)
    path.write_bytes(pickle.dumps(index))
    commit_step(step)


@pytest.mark.parametrize(("command", "build"), CASES)
def test_a_piece_that_names_its_values_again_and_again(build: Callable[[], bytes], command: str, step: Path) -> None:
    def replace_piece(index: Any, folder: Path) -> None:
        content = archive(build())
        place = next(iter(index.storage_data.values()))
        with (folder / place.relative_path).open("ab") as file:
            place.offset, place.length = file.tell(), len(content)
            file.write(content)

    change_index(step, replace_piece)
    more = ["--out", step.parent.parent / "out"] if command == "export" else []
    memory_bytes = MEMORY_BYTES // (FEWER if build is fewer_memo_entries else 1)
    refused(run_limited("checkpoint", command, step, *more, cwd=step, memory_bytes=memory_bytes), ExitCode.CHECKPOINT)


def test_an_index_that_lists_a_piece_a_million_times(step: Path) -> None:
    import torch
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    def repeat(index: Any, folder: Path) -> None:
        key, tensor = next(
            (key, value)
            for key, value in index.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata) and len(value.size) == 2
        )
        chunks = tensor.chunks[:1] * 1_000_000
        size = torch.Size((chunks[0].sizes[0] * len(chunks), *chunks[0].sizes[1:]))
        index.state_dict_metadata[key] = TensorStorageMetadata(tensor.properties, size, chunks)

    change_index(step, repeat)
    refused(run_limited("checkpoint", "export", step, "--out", step.parent / "out", cwd=step), ExitCode.CHECKPOINT)


def test_an_index_with_an_empty_planner_path(step: Path) -> None:
    change_index(step, lambda index, folder: index.planner_data.update(dict.fromkeys(index.planner_data, ())))
    refused(run_limited("checkpoint", "export", step, "--out", step.parent / "out", cwd=step), ExitCode.CHECKPOINT)


@pytest.mark.parametrize("ids", [10**12, -1, "257", 300])
def test_a_vocabulary_that_the_embedding_does_not_have(ids: object, step: Path) -> None:
    record = json.loads((step / names.STATE).read_text())
    record["more"]["vocab_size"] = ids
    (step / names.STATE).write_text(json.dumps(record))
    commit_step(step)
    refused(run_limited("export", "hf", step, step.parent / "out", cwd=step), ExitCode.CHECKPOINT)


def sealed(body: Any, **more: Any) -> bytes:
    def canonical(value: Any) -> bytes:
        return json.dumps(value, sort_keys=True, indent=1).encode() + b"\n"

    return canonical({"commit": body, "sha256": hashlib.sha256(canonical(body)).hexdigest(), **more})


def manifest_signed_in_greek(raw: bytes) -> bytes:
    return sealed(json.loads(raw)["commit"], hmac_sha256="α" * 64)


def manifest_of_brackets(raw: bytes) -> bytes:
    return b"[" + b"[]," * (20 * MEGABYTE) + b"[]]"


def manifest_that_is_long_when_indented(raw: bytes) -> bytes:
    return b'{"commit":' + b"[" * 300 + b"1," * (3 * MEGABYTE) + b"1" + b"]" * 300 + b',"sha256":""}'


def manifest_of_deep_names(raw: bytes) -> bytes:
    body = json.loads(raw)["commit"]
    return sealed(body | {"files": {**body["files"], "a/" * MEGABYTE + "b": {"bytes": 0, "sha256": []}}})


MANIFESTS = (
    manifest_signed_in_greek,
    manifest_of_brackets,
    manifest_that_is_long_when_indented,
    manifest_of_deep_names,
)


@pytest.mark.parametrize("build", MANIFESTS)
def test_a_manifest_of_a_checkpoint(build: Callable[[bytes], bytes], step: Path, tmp_path: Path) -> None:
    (step / names.COMMIT).write_bytes(build((step / names.COMMIT).read_bytes()))
    (tmp_path / "key").write_text("k" * 32)
    more = ["--key-file", tmp_path / "key"] if build is manifest_signed_in_greek else []
    done = run_limited("checkpoint", "export", step, "--out", tmp_path / "out", *more, cwd=tmp_path)
    refused(done, ExitCode.CHECKPOINT)


# Folders in Transformers' format.


@pytest.mark.parametrize(
    "change", [{"vocab_size": 10**12}, {"num_hidden_layers": 10**12}, {"hidden_size": 2**31}, {"num_hidden_layers": -1}]
)
@pytest.mark.parametrize("architecture", ["nsa", "LlamaForCausalLM"])
def test_a_model_of_impossible_sizes(change: dict[str, int], architecture: str, saved: Path, tmp_path: Path) -> None:
    from nsa_train.convert.export_folder import export_folder

    folder = tmp_path / "exported"
    export_folder(saved, folder)
    config = json.loads((folder / "config.json").read_text())
    command = ["import", "hf", folder, tmp_path / "out"]
    if architecture != "nsa":
        config = {"model_type": "llama", "architectures": [architecture], "hidden_size": 16, "num_attention_heads": 2}
        command = ["convert", folder, tmp_path / "out"]
    (folder / "config.json").write_text(json.dumps(config | change))
    refused(run_limited(*command, cwd=tmp_path), ExitCode.CHECKPOINT)


@pytest.mark.parametrize("length", [2**63, 2**31, 20 << 20])
def test_a_header_of_weights_that_is_larger_than_its_file(length: int, saved: Path, tmp_path: Path) -> None:
    from nsa_train.convert.export_folder import export_folder

    folder = tmp_path / "exported"
    export_folder(saved, folder)
    (folder / names.MODEL_SAFETENSORS).write_bytes(struct.pack("<Q", length) + b"{}" + b" " * 100)
    refused(run_limited("import", "hf", folder, tmp_path / "out", cwd=tmp_path), ExitCode.CHECKPOINT)


# Data.


def zstd_blocks() -> bytes:
    """8,000 blocks of four bytes, each 128 KiB of one character."""
    head, block = struct.pack("<IBB", 0xFD2FB528, 0, 0x40), (1 << 17) << 3 | 1 << 1
    return head + (struct.pack("<I", block)[:3] + b"a") * 8000 + struct.pack("<I", block | 1)[:3] + b"a"


def gzip_zeros() -> bytes:
    return gzip.compress(b"a" * MEGABYTE, 9) * 900


def gzip_short_lines() -> bytes:
    return gzip.compress(b'{"text":""}\n' * (4 * MEGABYTE), 9)


def parquet(texts: list[str], *, dictionary: bool) -> bytes:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    stream = io.BytesIO()
    table = pa.table({"id": [str(number) for number in range(len(texts))], "text": texts})
    pq.write_table(
        table,
        stream,
        compression="zstd",
        use_dictionary=dictionary,
        store_schema=False,
        dictionary_pagesize_limit=1 << 28,
    )
    return stream.getvalue()


def one_large_page() -> bytes:
    return parquet(["x" * (200 * MEGABYTE)], dictionary=False)


def one_text_in_all_rows() -> bytes:
    return parquet(["x" * MEGABYTE] * 300, dictionary=True)


def deep_line() -> bytes:
    return b"[" * MEGABYTE + b"\n"


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("blocks.jsonl.zst", zstd_blocks),
        ("zeros.jsonl.gz", gzip_zeros),
        ("lines.jsonl.gz", gzip_short_lines),
        ("deep.jsonl", deep_line),
        ("page.parquet", one_large_page),
        ("dictionary.parquet", one_text_in_all_rows),
    ],
)
def test_a_file_of_documents(name: str, build: Callable[[], bytes], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(build())
    done = run_limited("data", "prepare", tmp_path / name, tmp_path / "out", "--workers", 1, cwd=tmp_path)
    refused(done, ExitCode.DATA)


def empty_frames() -> bytes:
    import zstandard

    line = b'{"id": "a", "text": "hello"}\n'
    return zstandard.ZstdCompressor().compress(b"") * 200_000 + zstandard.ZstdCompressor().compress(line)


def long_line() -> bytes:
    return json.dumps({"id": "a", "text": "hello " * (16 * MEGABYTE)}).encode() + b"\n"


def page(piece: str) -> Callable[[], bytes]:
    return lambda: ("<p>hello</p>" + piece * (2 * MEGABYTE // len(piece)) + "<p>end</p>").encode()


ACCEPTED: dict[str, Callable[[], bytes]] = {
    "frames.jsonl.zst": empty_frames,
    "long.jsonl": long_line,
    "less.html": page("<"),
    "tags.html": page("<a "),
    "instructions.html": page("<?"),
    "ends.html": page("</"),
    "comments.html": page("<!--"),
    "sections.html": page("<![CDATA["),
    "unknown.html": page("<![x "),
    "quotes.html": page("<a b=\"'>"),
    "heads.html": page("<svg><b><head><i>"),
    "blanks.html": lambda: b"<pre>x" + b" " * (2 * MEGABYTE) + b"y</pre>",
    "digits.html": lambda: b"<p>hello &#" + b"9" * MEGABYTE + b";</p>",
    "markdown.md": page("<!--"),
}


def test_files_that_are_read_in_linear_time(tmp_path: Path) -> None:
    """Text that is strange and small is text: read by the same command, within the same limits."""
    (tmp_path / "src").mkdir()
    for name, build in ACCEPTED.items():
        (tmp_path / "src" / name).write_bytes(build())
    done = run_limited("data", "prepare", tmp_path / "src", tmp_path / "out", "--workers", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "out" / "manifest.json").exists()


def replacements(*pairs: tuple[str, str], kind: str = "String") -> dict[str, Any]:
    steps = [{"type": "Replace", "pattern": {kind: old}, "content": new} for old, new in pairs]
    return {"type": "Sequence", "normalizers": steps}


TOKENIZERS: dict[str, dict[str, Any]] = {
    "doubled": {"normalizer": replacements(*[("l", "ll")] * 40)},
    "in_turn": {"normalizer": replacements(*[("l", "o" * 8), ("o", "l" * 8)] * 6)},
    "empty_pattern": {"normalizer": replacements(("x*", "y" * 200), kind="Regex")},
    "without_type": {"normalizer": {"pattern": {"String": "l"}, "content": "l" * 10**7}},
    "prefix": {"normalizer": {"type": "Prepend", "prepend": "x" * 10**7}},
    "lower_case": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"String": "l"}, "content": "LLLL"}, {"type": "Lowercase"}]
            * 20,
        }
    },
    "decoder": {
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "Replace", "pattern": {"String": "l"}, "content": "llll"}] * 20,
        }
    },
    "far_id": {
        "added_tokens": [
            {"id": 256, "content": "<|endoftext|>", "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        ],
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 4_000_000_000}, "merges": []},
    },
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_multiplies_a_text(name: str, tmp_path: Path) -> None:
    described = json.loads(ByteTokenizer().to_json()) | TOKENIZERS[name]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    (tmp_path / "a.txt").write_text("hello hello")
    words = ["data", "prepare", tmp_path / "a.txt", tmp_path / "out", "--workers", 1, "--tokenizer"]
    refused(run_limited(*words, tmp_path / "tokenizer.json", cwd=tmp_path), ExitCode.CONFIG)


def test_a_config_with_a_list_of_aliases(tmp_path: Path) -> None:
    aliases = "*a ," * 30_000
    (tmp_path / "run.yaml").write_text(f"model:\n  ffn_dim: &a {'x' * 120_000}\n  attention: [{aliases} 1]\n")
    done = run_limited("config", "check", tmp_path / "run.yaml", cwd=tmp_path)
    assert done.returncode == ExitCode.CONFIG, done.stderr[-3000:]
    assert "Traceback" not in done.stderr


def test_ids_of_documents_that_overlap() -> None:
    """Runs in this process, with the limit of a fuzz case."""
    import numpy as np

    from nsa.errors import DataError
    from nsa_train.data.shards.writer import ShardInfo, decode_ids

    documents, length = 200_001, MEGABYTE
    ends = np.where(np.arange(documents) % 2 == 0, length, 0).astype("<u8")
    info = ShardInfo("train/0", documents, documents, 0, 0, 0, "", "", "")
    with memory_limit(MEMORY_BYTES), pytest.raises(DataError):
        decode_ids(ends.tobytes() + b"a" * length, info)
