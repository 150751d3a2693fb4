"""Any nn.Module on arrays of your own: images of digits, four groups that disagree on the labels."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import coterie
from coterie.data import partition
from coterie.data.clients import Pool

x, y = load_digits(return_X_y=True)
pool = Pool(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
clients = partition.permuted_labels(pool, cluster_sizes=[2, 2, 2, 2], seed=0)

module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
fed = coterie.Federation.from_arrays(
    clients.xs,
    clients.ys,
    coterie.models.network(module),
    clusters=clients.clusters,
    names=clients.names,
    split=(0.2, 0.2, 0.6),
)
for algorithm in (
    coterie.algorithms.Local(lr=0.3),
    coterie.algorithms.FedAvg(lr=0.3),
    coterie.algorithms.Oracle(lr=0.3),
):
    run = coterie.fit(fed, algorithm, rounds=60, select="best")
    print(f"{algorithm.name:8} {float(run.score('test', 'accuracy').mean()):.3f}")
