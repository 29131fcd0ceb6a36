"""What can go wrong between a request and its tokens.

EngineError
├── ModelUnavailable      no worker serves this model (our fault: 503)
├── ModelNotFound         no such hosted model (404)
├── PromptTooLong         prompt does not fit the context (400)
├── TemplateRejected      the model's chat template refused these messages (400)
├── RequestLost           the worker died or the stream has a gap (our fault)
├── RankLost              a process that shares a model is gone; the worker starts all anew
├── ModelRefused          a checkpoint that cannot be hosted; the message says why
├── ModelHasAdapters      it is the base of others that are live
├── AdditionRefused       the model is hosted, or on its way, already
├── AdditionNotFound      nobody has asked for this model to be added
└── SimulationRefused     what a simulation was asked for makes no sense
    ├── TraceRejected     a load that cannot be read; the message names the line
    └── MachineUnknown    neither a known machine nor a file that describes one
"""

from common.errors import PlatformError


class EngineError(PlatformError):
    code = "engine_error"


class ModelUnavailable(EngineError):
    code = "model_unavailable"


class ModelNotFound(EngineError):
    code = "model_not_found"


class PromptTooLong(EngineError):
    code = "context_length_exceeded"


class TemplateRejected(EngineError):
    code = "template_rejected"


class RequestLost(EngineError):
    code = "request_lost"


class RankLost(EngineError):
    code = "rank_lost"


class ModelRefused(EngineError):
    code = "model_refused"


class ModelHasAdapters(EngineError):
    code = "model_has_adapters"


class AdditionRefused(EngineError):
    code = "model_addition_refused"


class AdditionNotFound(EngineError):
    code = "model_addition_not_found"


class SimulationRefused(EngineError):
    code = "simulation_refused"


class TraceRejected(SimulationRefused):
    code = "trace_rejected"


class MachineUnknown(SimulationRefused):
    code = "machine_unknown"
