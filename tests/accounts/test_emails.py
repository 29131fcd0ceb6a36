"""One inbox, one spelling; two inboxes, two."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounts import emails
from accounts.errors import DisposableEmail, InvalidEmail


@pytest.mark.parametrize(
    ("email", "canonical"),
    [
        (" Ada@Example.COM ", "ada@example.com"),
        ("a.d.a+news@gmail.com", "ada@gmail.com"),
        ("a.da@GoogleMail.com", "ada@gmail.com"),
        ("a.da+x+y@example.com", "a.da@example.com"),
        ("ada@bücher.example.com", "ada@xn--bcher-kva.example.com"),
    ],
)
def test_spellings_of_an_inbox(email: str, canonical: str) -> None:
    assert emails.canonical(email) == canonical


@given(st.lists(st.sampled_from("ab."), min_size=1, max_size=8).map("".join), st.booleans())
def test_canonical_is_stable(local: str, is_gmail: bool) -> None:
    address = f"{local}@{'gmail.com' if is_gmail else 'example.com'}"
    try:
        once = emails.canonical(address)
    except InvalidEmail:
        return
    assert emails.canonical(once) == once
    assert emails.canonical(address.replace("@", "+tag@")) == once
    assert emails.canonical_hash(address) == emails.canonical_hash(once)


@pytest.mark.parametrize(
    "email",
    ["", "ada", "@example.com", "ada@", "a b@example.com", "ada@localhost", "a" * 300 + "@x.com",
     "ada@example.com\nBcc: eve@example.com", "ada@exa\x00mple.com", "<script>@example.com"],
)  # fmt: skip
def test_what_is_no_address_is_refused(email: str) -> None:
    with pytest.raises(InvalidEmail):
        emails.canonical(email)


@pytest.mark.parametrize("email", ["x@mailinator.com", "x@sub.mailinator.com"])
def test_throw_away_inboxes_are_known_by_their_domain_and_its_parents(email: str) -> None:
    with pytest.raises(DisposableEmail):
        emails.refuse_disposable(email)
    emails.refuse_disposable("x@example.com")
