"""Requests to workers and tokens back, through Redis: the tenant-fair queue and the frames.

`gateway.GatewayBroker` is the API node's end (asyncio), `worker.WorkerBroker` the worker's (its I/O
thread). Every change of state is one of the Lua scripts beside this file, so that it happens whole or
not at all; `twin.BrokerTwin` is the same state machine in memory, for the simulator and the tests.
"""
