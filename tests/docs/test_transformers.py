"""docs/TRANSFORMERS.md: its Python blocks run in order, with a model as `nsa export hf` writes it."""

import re
from pathlib import Path

import pytest

from tests.nsa.hf.tiny_model import byte_tokenizer, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "TRANSFORMERS.md"
BLOCKS = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.nightly
def test_the_page_runs(tmp_path, monkeypatch):
    model = tiny_model(vocab_size=257, eos_token_id=256, pad_token_id=256, max_position_embeddings=2048)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text = PAGE.read_text(encoding="utf-8")
    blocks = list(BLOCKS.finditer(text))
    assert len(blocks) == text.count("```python")
    names: dict[str, object] = {}
    for block in blocks:
        line = text.count("\n", 0, block.start()) + 1
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), names)  # errors name the page's line
    assert (tmp_path / "tuned" / "adapter" / "adapter_model.safetensors").is_file()
