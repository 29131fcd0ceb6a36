"""A gateway that spends as fast as it can until it is killed. Says what its customers were told."""

import asyncio
import sys

from billing.gateways import GatewayLease
from billing.holds import AdmitHold, HoldWriter, SettleHold
from common.db import create_engine, create_sessions
from common.ids import new_id

LEASE_S = 1


async def main(database_url: str, organization_id: str, price_id: str, model: str) -> None:
    sessions = create_sessions(create_engine(database_url))
    gateway = new_id("gw")
    lease = GatewayLease(sessions, gateway, lease_s=LEASE_S)
    await lease.renew()
    writer = HoldWriter(sessions)
    await writer.start()

    async def renew() -> None:
        while True:
            await asyncio.sleep(LEASE_S / 4)
            await lease.renew()

    async def spend() -> None:
        while True:
            admit = AdmitHold(
                new_id("req"), organization_id, None, model, price_id, gateway, 100, 10
            )
            hold = await writer.admit(admit)
            await asyncio.sleep(0.005)
            settle = SettleHold(hold.request_id, hold.epoch, 90, 10, 5, "completed")
            settlement = await writer.settle(settle)
            sys.stdout.write(f"{hold.request_id} {settlement.charge_nano_usd}\n")
            sys.stdout.flush()

    await asyncio.gather(renew(), *(spend() for _ in range(16)))


asyncio.run(main(*sys.argv[1:]))
