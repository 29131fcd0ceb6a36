"""Names of the Redis keys of one model, all under one hash tag so that a cluster can shard by model.

`tenants`        zset: tenants that have something to take → virtual seconds
`idle`           zset: tenants that have nothing to take, but debts → virtual seconds
`last`           the tenant that was the last to have nothing left to take
`q:<tenant>`     zset: requests of one tenant that may be taken → static key
`r:<id>`         hash: one request and its state
`lease`          zset: requests that a worker holds → deadline, ms
`wake`           list: one token wakes one waiting worker
`newcomers`      list: one token wakes one worker that has room only for tenants with nothing in it
`control:<w>`    list: control messages to worker `w`
`workers`        zset: worker → time of its last heartbeat, ms; `worker:<w>` is the heartbeat itself
`nodes`          zset: API node → deadline, ms; `node:<n>` is the set of its requests
`frames:<n>`     stream: what workers say to API node `n`
`taken`          counter: requests taken since Redis was last wiped
`born`           time at which Redis was last found empty, ms: a change tells of a wipe
"""

MODELS = "nc:models"
"""zset: model → time of its last heartbeat, ms. The only key that is not of one model."""


class Keys:
    """Names of the keys of one model."""

    __slots__ = ("born", "model", "newcomers", "prefix", "wake", "workers")

    def __init__(self, model: str) -> None:
        self.model = model
        # Braces delimit the hash tag, so a name that holds some is escaped.
        tag = model.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
        self.prefix = f"nc:{{{tag}}}:"
        """What every script takes as its only KEY: it sends the script to the model's shard."""
        self.wake = self.prefix + "wake"
        self.newcomers = self.prefix + "newcomers"
        self.workers = self.prefix + "workers"
        self.born = self.prefix + "born"

    def frames(self, node: str) -> str:
        """The stream of messages to one API node."""
        return f"{self.prefix}frames:{node}"

    def control(self, worker: str) -> str:
        """The list of control messages to one worker."""
        return f"{self.prefix}control:{worker}"

    def request(self, request_id: str) -> str:
        """The hash of one request."""
        return f"{self.prefix}r:{request_id}"

    def queue(self, tenant: str) -> str:
        """The requests of one tenant that may be taken."""
        return f"{self.prefix}q:{tenant}"
