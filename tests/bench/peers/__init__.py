"""Side by side with other engines: the same traces, over HTTP, by the same load generator.

`traces` what is asked · `environment` the peers' virtual environments · `servers` what is compared ·
`client` one run of `vllm bench serve` · `cells` what has been measured · `matrix` what is measured
next · `search` the highest rate that keeps the promise · `figures` ratios and words · `curve` the
picture.
"""
