"""Read data, deal it out to clients, and generate data whose true parameters are known.

Heavy libraries are imported where they are used, so that `import coterie.data` is quick.
"""

from coterie.data import bundled, generate, partition
from coterie.data.clients import Clients, Pool
from coterie.data.frozen import frozen_features
from coterie.data.images import cifar, idx
from coterie.data.leaf_files import leaf
from coterie.data.readers import arrays, columns, libsvm

__all__ = [
    "Clients",
    "Pool",
    "arrays",
    "bundled",
    "cifar",
    "columns",
    "frozen_features",
    "generate",
    "idx",
    "leaf",
    "libsvm",
    "partition",
]
