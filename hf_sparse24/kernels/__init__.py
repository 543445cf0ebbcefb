"""Multiplying by a packed weight: `ops` defines the operators, `dispatch` decides which path runs, `reference` is the oracle."""
