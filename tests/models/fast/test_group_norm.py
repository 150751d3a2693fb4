"""Norm, rectifier and pool as one operation, against torch's own in float64; without a GPU in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
import unittest.mock
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import coterie.models
from coterie import models
from coterie.models import fast, zoo
from coterie.models.fast import group_norm

# rows, channels, groups, height, width, pool
SHAPES = [
    (3, 64, 16, 8, 8, True),
    (2, 128, 32, 6, 10, True),
    (2, 64, 16, 5, 7, False),
    (3, 256, 32, 4, 4, False),
    (2, 512, 32, 4, 4, True),
    (4, 32, 1, 4, 6, True),
    (260, 64, 16, 12, 12, False),  # several tiles, and channels enough for wide programs
]


def reference(u: Tensor, bias: Tensor, weight: Tensor, shift: Tensor, groups: int, pool: bool) -> Tensor:
    values = functional.relu(functional.group_norm(u + bias[:, None, None], groups, weight, shift, 1e-5))
    return functional.max_pool2d(values, 2) if pool else values


def check(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for n, channels, groups, height, width, pool in SHAPES:
        u = (2 * torch.randn(n, channels, height, width, generator=generator) + 0.7).to(
            device, torch.bfloat16
        )
        own = torch.randn(3, channels, generator=generator).to(device)
        inputs = [u.contiguous(memory_format=torch.channels_last), 3 * own[0], own[1], own[2]]
        inputs = [part.clone().requires_grad_() for part in inputs]
        found = group_norm.normalised(*inputs, groups, 1e-5, pool)
        exact = [part.detach().double().requires_grad_() for part in inputs]
        wanted = reference(*exact, groups, pool)
        assert found.dtype == torch.bfloat16 and found.shape == wanted.shape
        near(found, wanted, 0.004)
        grad = torch.randn(found.shape, generator=generator).to(device, torch.bfloat16)
        grads = torch.autograd.grad(found, inputs, grad)
        expected = torch.autograd.grad(wanted, exact, grad.double())
        near(grads[0], expected[0], 0.004)  # rounded to bfloat16
        for mine, theirs in zip(grads[1:], expected[1:], strict=True):
            near(mine, theirs, 1e-5)  # sums are not
    assert group_norm._works(torch.device(device))
    broken = torch.full((2, 32, 4, 4), torch.nan, device=device, dtype=torch.bfloat16)
    ones = torch.ones(32, device=device)
    assert group_norm.normalised(broken, ones, ones, ones, 8, 1e-5, True).isnan().all()


def near(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert (found.double() - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_is_what_torch_computes_on_a_gpu() -> None:
    check("cuda")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_is_what_torch_computes() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize("kernel", ["_forward", "_backward"])
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.filterwarnings("ignore")
def test_compiles_for_a_gpu_that_is_not_there(
    kernel: str, pool: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from coterie.models.fast import group_norm_triton

    function = getattr(group_norm_triton, kernel)
    names = function.arg_names
    sizes = {"GROUP": 4, "ROWS": 64, "SQUARES": 32, "CHANNELS": 64, "POOL": pool}
    kinds = (
        dict.fromkeys(("u", "y", "grad", "du"), "*bf16") | dict.fromkeys(sizes, "constexpr") | {"eps": "fp32"}
    )
    kinds |= dict.fromkeys(("bias", "weight", "shift", "moments", "sums"), "*fp32")
    source = ASTSource(
        fn=function,
        signature={name: kinds.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in sizes.items() if name in names},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert made.asm["cubin"] and "ld.local" not in made.asm["ptx"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_a_network_has_the_gradients_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 3, 32, 32, generator=generator), torch.randint(0, 10, (16,), generator=generator)
    net = models.resnet9(precision="bf16", classes=10, stacked=False).fit_to(x, y)
    exact = models.resnet9(classes=10, stacked=False).fit_to(x, y)
    arguments = tuple(
        part.cuda() for part in (net.initial(0, torch.float32), x, y, torch.full((16,), 1 / 16))
    )
    fused, true = net.grad(*arguments), exact.grad(*arguments)
    monkeypatch.setattr(group_norm, "INSTALLED", False)
    usual = net.grad(*arguments)
    assert (fused - true).norm() <= 1.2 * (usual - true).norm()


def test_takes_what_its_kernels_can(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        is_cuda, device = True, torch.device("cuda")

        def __init__(self, *shape: int) -> None:
            self.shape = shape

    def takes(channels: int, groups: int, pool: bool, side: int = 8) -> bool:
        return group_norm.takes(OnGpu(4, 3, side, side), channels, groups, pool)  # type: ignore[arg-type]

    monkeypatch.setattr(group_norm, "INSTALLED", True)
    monkeypatch.setattr(group_norm, "_works", lambda device: True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    assert takes(64, 16, True) and takes(512, 32, False) and takes(96, 24, True)
    assert not takes(48, 12, True)  # channels that do not fill a program
    assert not takes(96, 8, True)  # groups of twelve
    assert not takes(64, 16, True, side=7) and takes(64, 16, False, side=7)
    assert not group_norm.takes(torch.zeros(4, 3, 8, 8), 64, 16, False)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.float16)
    assert not takes(64, 16, True)


def test_without_a_working_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = types.ModuleType("group_norm_triton")
    kernels.forward = unittest.mock.Mock(side_effect=RuntimeError("no C compiler\nlong story"))  # type: ignore[attr-defined]
    monkeypatch.setattr(coterie.models.fast, "group_norm_triton", kernels, raising=False)
    monkeypatch.setitem(sys.modules, "coterie.models.fast.group_norm_triton", kernels)
    group_norm._works.cache_clear()
    with pytest.warns(UserWarning, match="RuntimeError: no C compiler; without Triton"):
        assert not group_norm._works(torch.device("cpu"))
    assert not group_norm._works(torch.device("cpu"))  # asked once
    group_norm._works.cache_clear()


def test_a_block_is_its_layers() -> None:
    block, x = zoo.Block(3, 8, pool=True), torch.randn(2, 3, 8, 8)
    layers = nn.Sequential(*block)
    assert torch.equal(block(x), layers(x)) and torch.equal(block(x, unrolled=True), layers(x))


def test_unrolled_networks_go_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """vmap and second derivatives have no rule for the operation."""
    used = unittest.mock.Mock(side_effect=lambda images, *rest: images)
    path = fast.FastPath("group-norm", "group norm", lambda *sizes: True, used)
    monkeypatch.setattr(fast, "enabled", lambda operation: (path,))
    net, x = zoo.Blocks(zoo.Block(3, 8), zoo.Residual(8)), torch.randn(2, 3, 8, 8)
    net(x, unrolled=True)
    assert used.call_count == 0
    with torch.autocast("cpu", torch.bfloat16):
        net(x)
    assert used.call_count == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_maxima_are_found() -> None:
    """Compiled code keeps sums unrounded; among them no bfloat16 maximum is found, and 0 / 0 was the gradient."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), zoo.Residual(8), zoo.GlobalMax(), nn.Linear(8, 3))
    x, parameters = torch.randn(4, 3, 8, 8), list(net.parameters())

    def value() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net(x).float().square().sum()

    plain = torch.autograd.grad(value(), parameters)
    compiled = torch.autograd.grad(torch.compile(value)(), parameters)
    for mine, theirs in zip(compiled, plain, strict=True):
        assert (mine - theirs).norm() <= 0.3 * theirs.norm()  # NaN is not


if __name__ == "__main__":
    from coterie.models.fast import group_norm_triton

    group_norm_triton.PROGRAMS = 4  # the interpreter runs one after the other, so few make wide ones
    SHAPES[-1] = (6, *SHAPES[-1][1:])
    check("cpu")
