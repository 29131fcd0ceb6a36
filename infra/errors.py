"""What can keep the platform from starting on one machine.

InfraError
├── PortBusy                 somebody else listens there
├── DiskFull                 not enough room for what comes next
├── AlreadyRunning           another instance works on the same state directory
├── PublicBindRefused        a public address while e-mail verification is off
├── RedisMissing             no redis-server to be had
├── PartFailed               a process of ours ended before it was ready
├── SetUpFailed              a step of the set-up went wrong; its log says why
├── WrongSettings            settings that contradict each other
├── NotRunning               a command needs the running platform
└── ChecksFailed             reconcile or check-integrity found a difference

Each message is one line that says what to do; `infra/cli/main.py` prints it and exits with 1.
"""

from common.errors import PlatformError


class InfraError(PlatformError):
    code = "infra_error"


class PortBusy(InfraError):
    code = "port_busy"


class DiskFull(InfraError):
    code = "disk_full"


class AlreadyRunning(InfraError):
    code = "already_running"


class PublicBindRefused(InfraError):
    code = "public_bind_refused"


class RedisMissing(InfraError):
    code = "redis_missing"


class PartFailed(InfraError):
    code = "part_failed"


class SetUpFailed(InfraError):
    code = "set_up_failed"


class WrongSettings(InfraError):
    code = "wrong_settings"


class NotRunning(InfraError):
    code = "not_running"


class ChecksFailed(InfraError):
    code = "checks_failed"
