"""What can be wrong with a browser's request.

WebError
├── LoginRequired     a page of an account, and nobody is signed in (to the log-in page)
├── FormForged        sent by another site, or with a token that is not this browser's (403)
├── FormUnreadable    not a form as browsers send it (400)
├── FormTooLarge      (413)
└── HandoverFailed    a new key could not be carried to its page, so none was made (503)
"""

from common.errors import PlatformError


class WebError(PlatformError):
    code = "web_error"


class LoginRequired(WebError):
    code = "login_required"


class FormForged(WebError):
    code = "form_forged"


class FormUnreadable(WebError):
    code = "form_unreadable"


class FormTooLarge(WebError):
    code = "form_too_large"


class HandoverFailed(WebError):
    code = "handover_failed"
