"""The model for Transformers 5. Importing this package registers it with the Auto classes.

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
]
