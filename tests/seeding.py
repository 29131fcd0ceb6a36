"""One hosted model with a price and one customer, in a database that no platform runs on yet."""

from pathlib import Path

from pydantic import SecretStr

from accounts.api_keys import KeyRing
from accounts.passwords import PasswordHasher
from accounts.settings import AccountsSettings
from billing import pricing, signup
from billing.settings import BillingSettings
from common.db import create_engine, create_sessions
from engine import catalog


async def seed(
    database_url: str,
    *,
    pepper: str,
    model: str,
    directory: Path,
    context_length: int,
    prices: tuple[int, int, int],
) -> str:
    """Host `model` and sign a customer up; returns the key.

    `prices`: nano-dollars per million tokens of input, cached input and output.
    """
    settings = AccountsSettings(
        api_key_peppers={1: SecretStr(pepper)}, argon2_memory_kib=64, argon2_iterations=1
    )
    engine = create_engine(database_url)
    hasher = PasswordHasher(settings)
    async with create_sessions(engine).begin() as session:
        await catalog.add_model(
            session,
            name=model,
            path=str(directory),
            revision="seeded",
            architecture="LlamaForCausalLM",
            context_length=context_length,
            dtype="float32",
        )
        fresh, cached, output = prices
        await pricing.set_price(session, model, input=fresh, cached=cached, output=output)
        signed_up = await signup.sign_up(
            session,
            email="customer@example.com",
            password="correct horse battery staple",
            hasher=hasher,
            key_ring=KeyRing(settings.api_key_peppers),
            accounts_settings=settings,
            billing_settings=BillingSettings(),
        )
    hasher.close()
    await engine.dispose()
    return signed_up.issued_key.plaintext
