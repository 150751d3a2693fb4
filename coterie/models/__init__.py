"""Models: a loss over one flat parameter vector, its gradient, and what the engine asks besides."""

from coterie.models.assorted import assorted
from coterie.models.base import Model, dot, norm
from coterie.models.causal_lm import causal_lm
from coterie.models.checks import replace_batchnorm
from coterie.models.counts import negative_binomial, poisson, tweedie
from coterie.models.cumulative_logit import ordinal
from coterie.models.description import from_description
from coterie.models.glm import logistic, softmax
from coterie.models.linear import linear
from coterie.models.low_rank import low_rank
from coterie.models.neighbours import with_neighbours
from coterie.models.network import network
from coterie.models.survival import cox
from coterie.models.trees import trees
from coterie.models.valve import with_valve
from coterie.models.zoo import charlstm, cnn, mlp, resnet9

__all__ = [
    "Model",
    "assorted",
    "causal_lm",
    "charlstm",
    "cnn",
    "cox",
    "dot",
    "from_description",
    "linear",
    "logistic",
    "low_rank",
    "mlp",
    "negative_binomial",
    "network",
    "norm",
    "ordinal",
    "poisson",
    "replace_batchnorm",
    "resnet9",
    "softmax",
    "trees",
    "tweedie",
    "with_neighbours",
    "with_valve",
]
