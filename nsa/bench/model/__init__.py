"""What the Triton kernels would take on a GPU that is not here: modelled from their loops, beside dense."""

from nsa.bench.model.choices import Choices, measure_choices
from nsa.bench.model.prediction import MODELLED, Kernel, Prediction, predict

__all__ = ["MODELLED", "Choices", "Kernel", "Prediction", "measure_choices", "predict"]
