"""The addresses, one file per thing they speak of."""
