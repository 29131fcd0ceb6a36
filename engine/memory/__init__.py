"""Who owns which memory: KV blocks and prefixes in a model, models on a device."""
