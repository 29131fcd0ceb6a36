"""The gateway beside LiteLLM's proxy and Portkey's, each in front of an engine that computes nothing.

`null_engine` speaks our broker and `null_server` OpenAI's API; both say the time as their tokens, so
that `client` knows how long every frame was on its way. `servers` starts what is compared, `cells`
measures, `figures` says what was promised.
"""
