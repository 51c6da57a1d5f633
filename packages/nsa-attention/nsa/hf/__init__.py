"""The model for Transformers 5, and sparse attention for other models. Importing this package registers both.

Transformers has no plugins: import this before `AutoModelForCausalLM.from_pretrained` loads an exported model.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from nsa.hf.configuration import NSAConfig
from nsa.hf.modeling import NSAForCausalLM, NSAForSequenceClassification, NSAForTokenClassification, NSAModel
from nsa.hf.sparse_attention import use_sparse_attention

AutoConfig.register("nsa", NSAConfig, exist_ok=True)
AutoModel.register(NSAConfig, NSAModel, exist_ok=True)
AutoModelForCausalLM.register(NSAConfig, NSAForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(NSAConfig, NSAForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(NSAConfig, NSAForTokenClassification, exist_ok=True)

__all__ = [
    "NSAConfig",
    "NSAForCausalLM",
    "NSAForSequenceClassification",
    "NSAForTokenClassification",
    "NSAModel",
    "use_sparse_attention",
]
