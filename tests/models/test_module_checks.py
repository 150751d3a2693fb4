"""Modules that cannot be used are refused with the reason and the fix."""

import pytest
import torch
from torch import Tensor, nn

from coterie import models
from coterie._core.errors import SettingError

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(3)


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return super().forward(x)


class Centring(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.2)), r"Dropout at '1'.*probability to 0"),
        (
            nn.Sequential(nn.InstanceNorm1d(4, track_running_stats=True), nn.Linear(4, 3)),
            "track_running_stats=False",
        ),
        (nn.LSTM(4, 3, 2, dropout=0.5), "LSTM draws random numbers"),
        (nn.TransformerEncoderLayer(4, 2, 8), "dropout probability to 0"),
        (nn.Sequential(nn.LazyLinear(3)), "has no sizes yet"),
        (nn.Linear(4, 3).requires_grad_(False), "nothing can be trained"),
        (nn.Linear(5, 3), r"cannot run on 2 rows of shape \(4,\)"),
        (Noisy(4, 3), "draws random numbers"),
        (Counting(), "changes its buffer 'seen'"),
        (Centring(4, 3), "depends on the other rows"),
        (Pair(4, 3), r"returns tuple for 2 rows"),
        (nn.Sequential(nn.Linear(4, 3), nn.Unflatten(1, (3, 1))), r"returns \(2, 3, 1\)"),
        (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3)), "overwrites its input.*inplace=False"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_refused(module: nn.Module, message: str) -> None:
    state, x = torch.get_rng_state(), X.clone()
    with pytest.raises(SettingError, match=message):
        models.network(module).fit_to(x, Y)
    assert torch.equal(state, torch.get_rng_state()) and torch.equal(x, X)


def test_dropout_of_zero_is_accepted() -> None:
    model = models.network(nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 3))).fit_to(X, Y)
    assert model.d == 15


def test_replace_batchnorm_gives_a_usable_copy() -> None:
    module = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    nn.init.constant_(module[1].weight, 2.0)
    changed = models.replace_batchnorm(module)
    assert isinstance(module[1], nn.BatchNorm2d) and isinstance(changed[1], nn.GroupNorm)
    assert torch.equal(changed[1].weight, module[1].weight) and changed[1].num_channels == 8
    assert torch.equal(changed[0].weight, module[0].weight)
    fitted = models.network(changed).fit_to(X.view(6, 1, 2, 2).repeat(1, 1, 2, 2), Y)
    assert fitted.d == sum(p.numel() for p in module.parameters())
    assert isinstance(models.replace_batchnorm(nn.BatchNorm1d(6, affine=False)), nn.GroupNorm)
