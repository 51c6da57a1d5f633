"""README.md: every number in its prose is read from its source. Its blocks run in test_user_pages.py."""

import re
from pathlib import Path

import pytest

import nsa
from nsa.geometry import Geometry
from tests.docs.blocks import blocks, nsa_commands
from tests.shapes import HEADS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LENGTHS = ("2k", "8k", "16k", "32k", "64k")
FEWEST_ROUNDS = 5
CONFIGS = {"125M at 8k": "base_125m_8k", "1B at 32k": "base_1b_32k", "7B at 128k": "base_7b_128k"}


def speed_ups(op: str, file: str) -> dict[str, str]:
    """Length → median ratio to dense SDPA of the compiled CPU kernels in fp32, where several rounds were taken."""
    rows = (line.split(" | ") for line in (ROOT / "bench/results" / file).read_text().splitlines())
    return {
        row[2]: row[7].split()[0]
        for row in rows
        if len(row) > 7
        and (row[0].removeprefix("| "), row[1], row[3]) == (op, "fp32", "cpu")
        and int(row[6]) >= FEWEST_ROUNDS
    }


TABLE = {
    "forward": speed_ups("attention", "attention_base.md"),
    "forward and backward": speed_ups("attention fwd+bwd", "attention_base.md"),
    "decode": speed_ups("decode", "decode_base.md"),
}


def prose() -> str:
    """README without code, link targets and names that contain digits (SHA-256, d_k, FSDP2, …)."""
    text = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`", "", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"arXiv [\d.]+|SHA-256|FSDP2|\bS3\b|USR[12]|Apache-2\.0|\[docs/[^\]]*\]", "", text)


def test_the_keys_that_a_token_reads():
    assert f"position 64,000 reads {Geometry().reads(64_000):,} keys instead of 64,000" in " ".join(README.split())


def test_the_tested_heads_per_group():
    tested = sorted({heads // groups for heads, groups in HEADS})
    assert f"tested with {', '.join(map(str, tested[:-1]))} and {tested[-1]}" in README


@pytest.mark.parametrize("row", TABLE)
def test_the_speed_ups_are_those_of_the_recorded_benchmark(row):
    figures = " | ".join(TABLE[row].get(length, "–") for length in LENGTHS)
    assert f"| {row} | {figures} |" in README


def test_the_long_context_configs():
    from nsa_train.config import load

    for text, name in CONFIGS.items():
        assert f"[{text}](configs/{name}.yaml)" in README
        length = load(ROOT / "configs" / f"{name}.yaml").train.seq_len
        assert text.endswith(f" {length // 1024}k")


def test_the_torch_version_is_one_that_the_package_accepts():
    pinned = re.search(r"pip install torch==(\d+)\.(\d+)\.", README)
    trainer = (ROOT / "packages/nsa-train/pyproject.toml").read_text()
    assert f'"torch>={pinned[1]}.{pinned[2]},<{pinned[1]}.{int(pinned[2]) + 1}"' in trainer


COMMANDS = [
    words for block in blocks(ROOT / "README.md") for line in block.code.splitlines() for words in nsa_commands(line)
]


def test_it_is_one_page_with_three_commands():
    assert len(README.splitlines()) <= 100
    assert [words[0] for words in COMMANDS] == ["generate", "demo", "monitor"]


def test_the_first_screen_says_that_no_gpu_has_run_it():
    assert "not yet run on a GPU" in " ".join(README.splitlines()[:12])


def test_a_length_at_which_dense_is_faster_is_in_the_table():
    assert any(float(ratio) < 1 for ratio in TABLE["forward and backward"].values())


def test_badges_are_of_workflows_that_exist():
    badges = re.findall(r"\.\./\.\./actions/workflows/([\w.]+)(?:/badge\.svg)?\)", README)
    assert len(badges) == 6
    assert all((ROOT / ".github/workflows" / name).is_file() for name in badges)


def test_the_citation_is_of_this_version():
    (version,) = re.findall(r"version = \{(.*?)\}", README)
    assert version == nsa.__version__


def test_the_animation_is_small_and_moves():
    picture = ROOT / "docs/pictures/monitor_replay.svg"
    assert f"]({picture.relative_to(ROOT)})" in README
    assert picture.stat().st_size < 200_000
    assert "@keyframes" in picture.read_text(encoding="utf-8")


def test_no_other_number_is_in_the_prose():
    known = {"64,000", f"{Geometry().reads(64_000):,}", *(str(heads // groups) for heads, groups in HEADS)}
    known |= {length.removesuffix("k") for length in LENGTHS}
    known |= {ratio for row in TABLE.values() for ratio in row.values()}
    known |= set(re.findall(r"\d+", " ".join(CONFIGS)))
    known |= {"3.11", "1.6"}  # Python, and GB of an installation, in the line before the installation
    numbers = {number.rstrip(".,") for number in re.findall(r"\d[\d,.]*", prose())}
    assert numbers <= known, sorted(numbers - known)


EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_attention_in_your_own_block_takes_a_dozen_lines():
    (usage,) = [example for example in EXAMPLES if "nsa_attention" in example]
    assert len([line for line in usage.splitlines() if line.strip()]) <= 12
