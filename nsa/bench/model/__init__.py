"""What the Triton kernels would take on a GPU that is not here: modelled from their loops, beside dense."""

from nsa.bench.model.choices import SelectionOverlap, measure_choices
from nsa.bench.model.prediction import MODELLED, KernelPrediction, LayerPrediction, predict

__all__ = ["MODELLED", "KernelPrediction", "LayerPrediction", "SelectionOverlap", "measure_choices", "predict"]
