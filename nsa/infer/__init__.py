"""Generation and evaluation of a trained model, over Transformers.

`model = nsa.infer.load_model("artifacts/run")`, then `model.generate("Once upon a time")`.
"""

from nsa.infer.generate import BatchResult, Completion, SamplingSettings
from nsa.infer.load_model import LoadedModel, ModelSource, load_model

__all__ = ["BatchResult", "Completion", "LoadedModel", "ModelSource", "SamplingSettings", "load_model"]
