"""Compute a bill again from its export, with nothing but the published formula.

    curl -s "$BASE/v1/usage/requests?format=csv&limit=10000" -H "Authorization: Bearer $KEY" \
        | python3 docs/recompute_bill.py

or, of a file that the usage page exported, `python3 docs/recompute_bill.py FILE`.

A billable request costs the sum of its three token counts times their prices per million tokens,
rounded up once to a nano-dollar ($0.000000001). Every other request costs nothing.
"""

import csv
import fileinput
import sys
from decimal import ROUND_CEILING, Decimal

NANO = Decimal("0.000000001")
COUNTED = {
    "uncached_input_tokens": "input_price_per_million",
    "cached_input_tokens": "cached_input_price_per_million",
    "output_tokens": "output_price_per_million",
}

total = Decimal(0)
differences = 0
with fileinput.input(encoding="utf-8") as export:
    for row in csv.DictReader(export):
        exact = sum(int(row[count]) * Decimal(row[price]) for count, price in COUNTED.items())
        cost = (exact / 1_000_000).quantize(NANO, ROUND_CEILING) if int(row["is_billable"]) else 0
        if cost != Decimal(row["cost"]):
            differences += 1
            sys.stderr.write(f"{row['id']}: {row['cost']} was charged, {cost} is right\n")
        total += cost
sys.stdout.write(f"{total:.9f}\n")
sys.exit(1 if differences else 0)
