"""The float32 truth of a layer of experts, computed in one place."""

import torch


def expert(x: torch.Tensor, w: torch.Tensor, w_gate: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    """What an expert makes of rows, in float32."""
    up = x.float() @ w.float()
    if w_gate is not None:
        return torch.nn.functional.silu(x.float() @ w_gate.float()) * up
    return torch.nn.functional.silu(up) if activation == "silu" else up


def reference(x, topk_index, topk_weight, w, w_gate=None, activation=None, down=None) -> list[torch.Tensor]:
    """For each rank [T, I] float32: the weighted sum, over a token's choices, of what its experts make of it.

    x, topk_index, topk_weight: one per rank; a weight of None is 1. w, w_gate, down: of all experts, [E, H, I], and
    [E, I, D] for a second matmul, after which the result is [T, D].
    """
    outs = []
    for tokens, index, weight in zip(x, topk_index, topk_weight, strict=True):
        out = torch.zeros(tokens.shape[0], (w if down is None else down).shape[2], device=w.device)
        for t, j in (index >= 0).nonzero().tolist():
            e = int(index[t, j])
            y = expert(tokens[t], w[e], None if w_gate is None else w_gate[e], activation)
            y = y if down is None else y @ down[e].float()
            out[t] = out[t] + y * (1.0 if weight is None else weight[t, j].float())
        outs.append(out)
    return outs
