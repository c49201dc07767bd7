"""Kernels that exercise the emulator. Mutants are made from their text, so a line here is an edit's target there."""
