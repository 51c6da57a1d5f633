"""What the Triton kernels would take on a GPU that is not here: modelled from their loops, beside dense."""

from nsa.bench.model.prediction import MODELLED, Kernel, Prediction, predict
from nsa.bench.model.unions import Unions, measure_unions

__all__ = ["MODELLED", "Kernel", "Prediction", "Unions", "measure_unions", "predict"]
