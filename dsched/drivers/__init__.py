"""The driver contract, the wire messages, and one folder per engine."""
