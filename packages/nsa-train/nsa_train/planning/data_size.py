"""How large a model an amount of text supports: 20 tokens per parameter, and up to four passes over the same text.

The ratio is that of Hoffmann et al. 2022 ("Chinchilla"), measured with subword tokens; four passes are the number up to
which Muennighoff et al. 2023 found repeated text nearly as good as new text. Both are rules of thumb for training from
scratch: a larger model trains too, and learns a small text by heart.
"""

import math
from dataclasses import dataclass

TOKENS_PER_PARAMETER = 20
USEFUL_PASSES = 4
BYTES_PER_SUBWORD = 4
"""English text: a byte tokenizer counts about four times the tokens of a subword tokenizer."""

_SHIPPED_MODELS = {
    "configs/cpu_quickstart.yaml": 496_536,
    "configs/cpu_half_hour.yaml": 1_982_728,
    "configs/base_125m_8k.yaml": 123_827_376,
    "configs/base_1b_32k.yaml": 1_078_697_024,
    "configs/base_7b_128k.yaml": 7_240_170_752,
}
"""Parameters of the shipped configs, with the vocabulary that their header names."""


@dataclass(frozen=True)
class DataSizeAdvice:
    """Model size for an amount of text. `tokens` are subword tokens; those of a byte tokenizer were divided by four."""

    tokens: int
    parameters: int
    """Model size for one pass over the text."""
    parameters_at_most: int
    """Model size for `USEFUL_PASSES` passes."""
    nearest_config: str
    nearest_parameters: int

    @property
    def too_little(self) -> bool:
        """Whether even the nearest config is several times larger than the text supports."""
        return self.nearest_parameters > 2 * self.parameters_at_most


def advise(tokens: int, vocab_size: int) -> DataSizeAdvice:
    """Advice for training from scratch on so many tokens of a tokenizer with `vocab_size` ids."""
    is_byte = vocab_size <= 256 + 1
    subwords = tokens // BYTES_PER_SUBWORD if is_byte else tokens
    parameters = subwords // TOKENS_PER_PARAMETER
    at_most = subwords * USEFUL_PASSES // TOKENS_PER_PARAMETER
    middle = math.sqrt(max(1, parameters) * max(1, at_most))
    nearest = min(_SHIPPED_MODELS, key=lambda name: abs(math.log(_SHIPPED_MODELS[name] / middle)))
    return DataSizeAdvice(subwords, parameters, at_most, nearest, _SHIPPED_MODELS[nearest])
