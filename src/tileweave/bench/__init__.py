"""Measurements on a GPU: the fused ops beside their rivals, interleaved, checked before they are timed."""
