"""Models: a loss over one flat parameter vector, its gradient, and what the engine asks besides."""

from coterie.models.base import Model, dot, norm
from coterie.models.description import from_description
from coterie.models.glm import logistic, softmax
from coterie.models.linear import linear

__all__ = ["Model", "dot", "from_description", "linear", "logistic", "norm", "softmax"]
