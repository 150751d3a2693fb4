"""Products of many rows with a few vectors, such as the scores of ten classes.

They are narrow for the library behind `torch.mm`. oneDNN, which torch carries for the layers of networks, takes two
thirds of its time; but it prepares itself for every new shape, which takes as long as three products.
"""

import torch
from torch import Tensor


def _suits(vectors: Tensor, rows: Tensor) -> bool:
    """Small products are not worth its calls; what is not contiguous it multiplies number by number."""
    narrow = 1 < vectors.size(0) <= 64 and rows.numel() >= 1 << 18
    single = vectors.dtype == torch.float32 and rows.dtype == torch.float32
    return narrow and single and vectors.is_contiguous() and rows.is_contiguous()


if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):

    def scores(vectors: Tensor, rows: Tensor) -> Tensor:
        """vectors rows', [vectors, rows], on the processor."""
        if _suits(vectors, rows):
            return torch.ops.mkldnn._linear_pointwise(vectors, rows, None, "none", [], "")
        return vectors @ rows.t()

    def combine(shares: Tensor, rows: Tensor) -> Tensor:
        """shares rows, [shares, columns], on the processor."""
        if _suits(shares, rows):
            return torch.ops.mkldnn._linear_pointwise(shares, rows.t(), None, "none", [], "")
        return shares @ rows

else:

    def scores(vectors: Tensor, rows: Tensor) -> Tensor:
        """vectors rows', [vectors, rows]."""
        return vectors @ rows.t()

    def combine(shares: Tensor, rows: Tensor) -> Tensor:
        """shares rows, [shares, columns]."""
        return shares @ rows
