"""What the worker's end of the broker raises; the gateway's end speaks of `ModelUnavailable`.

EngineError
└── BrokerUnreachable     Redis does not answer; keep running what runs and try again
"""

from engine.errors import EngineError


class BrokerUnreachable(EngineError):
    code = "broker_unreachable"
