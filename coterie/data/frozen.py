"""Features of rows by a frozen network, so that methods for linear models train on images and texts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from coterie._core.errors import DataError
from coterie.data.clients import Clients


def frozen_features(clients: Clients, body: nn.Module, batch: int = 256, device: str = "cpu") -> Clients:
    """Return the clients with what a frozen network gives for their rows in place of the rows.

    The network is not trained and never sent: every client that has it computes its own features. Linear, logistic and
    softmax models on them are the last layer of the network, for all methods and for `auto`.

    Parameters
    ----------
    clients
        Rows of clients, such as images or rows of token ids.
    body
        A network, such as a pretrained one without its last layer; [rows, ...] in, [rows, ...] out. It is used in
        evaluation mode and left as it was.
    batch
        Rows at a time.
    device
        Where the network computes; features are on the CPU.

    Returns
    -------
    Clients
        The same clients and targets, with features [rows, columns].

    Raises
    ------
    DataError
        If the network does not give one row of finite numbers for each row.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from coterie import Federation, models
    >>> from coterie.data import Clients, frozen_features
    >>> xs, ys = [torch.rand(6, 8, 8), torch.rand(4, 8, 8)], [torch.arange(6) % 2, torch.arange(4) % 2]
    >>> images = Clients(xs, ys, ["a", "b"])
    >>> body = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU())
    >>> found = frozen_features(images, body)
    >>> found.xs[0].shape
    torch.Size([6, 5])
    >>> Federation.from_clients(found, models.logistic(l2=0.1)).d
    5
    """
    training = body.training
    before = next((one.device for one in body.parameters()), torch.device("cpu"))
    body.eval().to(device)
    try:
        xs = [
            _applied(body, name, x, batch, device) for name, x in zip(clients.names, clients.xs, strict=True)
        ]
    finally:
        body.train(training).to(before)
    return replace(clients, xs=xs, truth=None)


def _applied(body: nn.Module, name: str, x: Tensor, batch: int, device: str) -> Tensor:
    """Return the features of a client's rows, [rows, columns]."""
    with torch.no_grad():
        found = torch.cat([body(part.to(device)).cpu() for part in x.split(batch)])
    if len(found) != len(x) or not found.is_floating_point() or not found.isfinite().all():
        raise DataError(
            f"client {name!r}: for {len(x)} rows the network gives {tuple(found.shape)}, or not finite ones. "
            "It must give one row of finite numbers for each."
        )
    return found.flatten(1)
