"""What can go wrong between a stranger and a principal.

AccountError
├── InvalidEmail            not an address, or one that cannot receive mail
├── DisposableEmail         a throw-away domain; refused at new accounts only
├── EmailTaken              the canonical address has an account
├── WeakPassword            too short, too long, or equal to the address
├── BadCredentials          unknown user or wrong password; never says which
├── InvalidKey              malformed, mistyped or unknown API key
├── KeyRevoked              the key was revoked
├── KeyExpired              the key's time is over
├── KeyNotFound             this organization has no such key
├── ProjectNotFound         this organization has no such project
├── ScopeNotAllowed         nobody grants more than they hold
├── OrganizationNotFound    no such organization
├── OrganizationFrozen      frozen or closed: may look, may not spend
├── InvalidToken            e-mail token unknown, used, expired or for another address
├── TooManyAttempts         login, sign-up or reset too often; `facts["retry_after_s"]`
└── ThrottleUnavailable     attempts cannot be counted now, so none is let through
"""

from common.errors import PlatformError


class AccountError(PlatformError):
    code = "account_error"


class InvalidEmail(AccountError):
    code = "invalid_email"


class DisposableEmail(AccountError):
    code = "disposable_email"


class EmailTaken(AccountError):
    code = "email_taken"


class WeakPassword(AccountError):
    code = "weak_password"


class BadCredentials(AccountError):
    code = "bad_credentials"


class InvalidKey(AccountError):
    code = "invalid_api_key"


class KeyRevoked(AccountError):
    code = "api_key_revoked"


class KeyExpired(AccountError):
    code = "api_key_expired"


class KeyNotFound(AccountError):
    code = "api_key_not_found"


class ProjectNotFound(AccountError):
    code = "project_not_found"


class ScopeNotAllowed(AccountError):
    code = "scope_not_allowed"


class OrganizationNotFound(AccountError):
    code = "organization_not_found"


class OrganizationFrozen(AccountError):
    code = "organization_frozen"


class InvalidToken(AccountError):
    code = "invalid_token"


class TooManyAttempts(AccountError):
    code = "too_many_attempts"


class ThrottleUnavailable(AccountError):
    code = "throttle_unavailable"
