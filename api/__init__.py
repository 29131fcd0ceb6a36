"""HTTP for programs: OpenAI-compatible inference, and accounts, billing and administration in JSON.

One file per thing: `body` and `schemas/` say what may be sent, `authentication` who may send it,
`prompts` turns it into tokens, `generation` is the life of one request, `streaming` and `formats`
put it on the wire, `errors` is the one seam where a failure becomes an HTTP answer.
"""
