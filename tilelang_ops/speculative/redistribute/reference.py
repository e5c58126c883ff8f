import torch
from torch import Tensor

EDGE = 1e-3  # confidences are corrected inside of (0, 1)


def corrected_survivals(confidences: Tensor, odds: Tensor) -> Tensor:
    """Probability that drafts up to each position stand: products of confidences with corrected odds.

    Args:
        confidences: [P, k] float32; 0 marks drafts that are not worth a row.
        odds: [k] float32.
    """
    inside = confidences.clamp(EDGE, 1 - EDGE)
    raised = odds * inside
    corrected = torch.where(confidences > 0, raised / (1 - inside + raised), 0.0)
    survivals = corrected.clone()
    for place in range(1, corrected.shape[1]):  # cumprod rounds differently from device to device
        survivals[:, place] *= survivals[:, place - 1]
    return survivals


def run(
    num_rows: int, sources: Tensor, survivals: Tensor, limits: Tensor | None, confidence_odds: Tensor | None
) -> Tensor:
    if confidence_odds is not None:
        survivals = corrected_survivals(survivals, confidence_odds)
    num_seqs, width = sources.shape[0], survivals.shape[1]
    has_source = (sources >= 0)[:, None]
    value = torch.where(has_source, survivals[sources.clamp(min=0).long()], 0.0)
    if limits is not None:
        value = torch.where(has_source, value, 2.0)  # above any survival
        place = torch.arange(1, width + 1, device=sources.device)
        value = torch.where(place < limits[:, None], value, -1.0)
    order = torch.sort(value.flatten(), descending=True, stable=True).indices[: num_rows - num_seqs]
    extra = torch.zeros(num_seqs * width, dtype=torch.int32, device=sources.device)
    extra[order] = 1
    return 1 + extra.view(num_seqs, width).sum(1, dtype=torch.int32)
