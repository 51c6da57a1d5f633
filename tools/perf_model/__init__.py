"""What the Triton kernels would take on a GPU that is not here: modelled from their loops, beside dense."""

from tools.perf_model.prediction import MODELLED, KernelPrediction, LayerPrediction, predict
from tools.perf_model.selection_overlap import SelectionOverlap, measure_overlap

__all__ = ["MODELLED", "KernelPrediction", "LayerPrediction", "SelectionOverlap", "measure_overlap", "predict"]
