"""Tokens in, tokens out: the engine knows no user and no money.

The public face, which never imports torch: `messages`, `catalog`, `cost_model`, `pooling`, `errors`,
`broker/` (the queue in Redis), `tokenization/`, and `simulator/`, which runs the scheduler without a
model. Behind it: `worker/` (the process), `scheduling/` (what the next step computes), `costs/` (how
long it will take), `memory/` (who owns which block), `structures/` (grammars), `models/`, and
`engine.py`, which ties a step together.
"""
