"""Device code that kernels share: rings between roles, the matmul template, tile orders. Imports `lang` only."""
