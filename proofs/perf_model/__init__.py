"""GPU performance model: roofline estimates of the Triton kernels, and of dense attention, on GPUs not present here."""

from proofs.perf_model.prediction import MODELLED, KernelPrediction, LayerPrediction, predict
from proofs.perf_model.selection_overlap import SelectionOverlap, measure_overlap

__all__ = ["MODELLED", "KernelPrediction", "LayerPrediction", "SelectionOverlap", "measure_overlap", "predict"]
