"""From a batch to the tensors a model reads: the only place of the data package that needs torch."""

import numpy as np
import torch

from nsa.data.rows.batch import Batch


def to_tensors(batch: Batch, device: torch.device) -> dict[str, torch.Tensor]:
    """What the model reads, on `device`. For a GPU the copy starts from pinned memory and does not block."""
    tensors = {
        "input_ids": torch.from_numpy(batch.tokens.astype(np.int64)),
        "cu_doc_lens": torch.from_numpy(batch.flat_cu_doc_lens()),
    }
    if batch.loss_mask is not None:
        tensors["label_mask"] = torch.from_numpy(batch.loss_mask)
    if device.type == "cuda":
        return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()}
    return {name: tensor.to(device) for name, tensor in tensors.items()}
