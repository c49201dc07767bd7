"""The operations, a room each: op.py (what users call), operator.py (what PyTorch sees), check.py (contract and path),
launch.py (host side of the kernel), kernel.py (device code), reference.py (float32 truth)."""
