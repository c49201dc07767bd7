"""The operations, a room each: op.py (contract and dispatch), kernel.py (device code), reference.py (float32 truth)."""
