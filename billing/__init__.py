"""May you spend, and what did you spend? Prices, ledger, holds, usage."""
