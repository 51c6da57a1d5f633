"""Generation and evaluation of a trained model, over Transformers.

`model = nsa_train.infer.load_model("artifacts/run")`, then `model.generate("Once upon a time")`.
"""

from nsa_train.infer.generate import BatchResult, Completion, SamplingSettings
from nsa_train.infer.load_model import LoadedModel, ModelSource, load_model

__all__ = ["BatchResult", "Completion", "LoadedModel", "ModelSource", "SamplingSettings", "load_model"]
